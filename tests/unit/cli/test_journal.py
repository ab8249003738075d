"""`nodetrack journal cat | verify`."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from nodetrack.cli import journal as journal_module
from nodetrack.cli.journal import _KINDS
from nodetrack.records import Record

if TYPE_CHECKING:
    from conftest import Lab


def flip(path: Path, place: int) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


# ---------------------------------------------------------------------------------------------------
# cat


def test_cat_prints_every_record_in_the_order_written(lab: Lab) -> None:
    with lab.start(config={"lr": 0.1}) as run:
        run.bind(stage="eval").log({"a": 1.0, "b": 2}, step=3)
        run.summary["best"] = 1
        run.tags += ("new",)
        run.alert("look")
    records = lab.lines("journal", "cat", "miner-1")
    assert [record["kind"] for record in records] == [
        *("header", "attempt", "tags", "config", "row", "summary", "tags", "event", "finish")
    ]
    (path,) = lab.segments(run)
    assert {record["file"] for record in records} == {str(path)}
    offsets = [record["offset"] for record in records]
    assert offsets == sorted(set(offsets))
    row = records[4]
    assert list(row) == ["file", "offset", "kind", "step", "time_ns", "context", "counted", "values"]
    assert (row["step"], row["context"], row["counted"]) == (3, {"stage": "eval"}, False)
    assert row["values"] == {"a": 1.0, "b": 2}
    assert (records[-1]["state"], records[-1]["exit_code"]) == ("finished", 0)


def test_cat_has_a_name_for_every_kind_of_record(lab: Lab) -> None:
    assert set(_KINDS) == set(Record.__subclasses__())
    with lab.start() as run:
        lab.log_steps(run, range(3))
        run.summary["best"] = math.nan
        run._attempt.state.mark()
    (mark,) = lab.lines("journal", "cat", "miner-1", "--kind", "mark")
    assert list(mark) == ["file", "offset", "kind", "time_ns", "step", "counter", "summary", "labels"]
    assert (mark["step"], mark["summary"]["best"]) == (3, "NaN")


def test_cat_prints_only_the_kinds_that_are_asked_for(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
        run.alert("look")
    kinds = [
        record["kind"]
        for record in lab.lines("journal", "cat", "miner-1", "--kind", "row", "--kind", "event")
    ]
    assert kinds == ["row", "row", "row", "event"]


def test_cat_reads_one_file_wherever_it_lies(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    (path,) = lab.segments(run)
    Path("copy.ntj").write_bytes(path.read_bytes())
    assert len(lab.lines("journal", "cat", "copy.ntj", "--kind", "row")) == 3


def test_cat_says_what_it_had_to_leave_out(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(10))
    (path,) = lab.segments(run)
    flip(path, -200)
    result = lab.run("journal", "cat", "miner-1", "--kind", "row")
    assert result.stdout.count("\n") == 9
    assert f"1 damaged record of {path} left out." in result.stderr


def test_cat_of_another_kind_of_file_is_an_error(lab: Lab) -> None:
    Path("notes.txt").write_text("nothing of ours, and long enough for a header")
    result = lab.run("journal", "cat", "notes.txt")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "notes.txt is not a nodetrack journal segment" in result.stderr


# ---------------------------------------------------------------------------------------------------
# verify


def checks(lab: Lab, exit_code: int, *targets: object) -> list[dict[str, object]]:
    """What verify says of each file; it must end with the exit code."""
    import json

    result = lab.run("journal", "verify", *targets, "--json")
    assert result.exit_code == exit_code, result.output
    answer = json.loads(result.stdout)
    assert bool(answer["damaged_files"]) == bool(exit_code)
    return list(answer["files"])


def test_verify_counts_what_a_whole_journal_holds(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(5))
    with lab.start(uid=2, project="q") as other:
        lab.log_steps(other, range(2))
    printed = lab.out("journal", "verify")
    lines = [line.split() for line in printed.splitlines()]
    assert lines[0] == ["file", "records", "rows", "corrupt", "torn", "bytes", "unknown", "verdict"]
    assert [line[1:] for line in lines[2:4]] == [
        ["9", "5", "0", "0", "0", "ok"],
        ["6", "2", "0", "0", "0", "ok"],
    ]
    assert printed.splitlines()[-1] == "2 files, none damaged."
    assert len(checks(lab, 0, "--project", "q")) == 1
    assert len(checks(lab, 0, "miner-1")) == 1


@pytest.mark.parametrize("place", [0, 20, -200], ids=["magic", "header", "row"])
def test_one_flipped_byte_is_found_wherever_it_is(lab: Lab, place: int) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(10))
    (path,) = lab.segments(run)
    flip(path, place)
    (check,) = checks(lab, 1)
    assert (check["verdict"], check["corrupt"], check["file"]) == ("damaged", 1, str(path))
    assert "1 file, 1 damaged." in lab.run("journal", "verify", path).stdout


def test_a_tail_that_a_running_process_is_writing_is_no_damage(lab: Lab) -> None:
    process = lab.open_node("run.log({'a': 1.0}, step=0)\nprint('logged')\nsys.stdin.read()")
    assert process.stdout is not None
    process.stdout.readline()
    (path,) = Path(".nodetrack/p/runs").glob("*/*/segment-*.ntj")
    with path.open("ab") as file:
        file.write(b"\x40\x00\x00")
    assert [check["verdict"] for check in checks(lab, 0)] == ["growing"]
    assert [check["verdict"] for check in checks(lab, 0, path)] == ["growing"]
    process.kill()
    process.wait()
    assert [check["verdict"] for check in checks(lab, 1)] == ["torn"]


def test_only_the_last_segment_of_a_running_process_may_be_torn(lab: Lab) -> None:
    run = lab.start(segment_bytes=4096)
    lab.log_steps(run, range(300))
    first, *others = lab.segments(run)
    assert others
    os.truncate(first, first.stat().st_size - 3)
    verdicts = [check["verdict"] for check in checks(lab, 1)]
    assert verdicts == ["torn", *("ok" for _ in others)]


def test_a_file_that_is_no_segment_is_named_with_the_others_still_checked(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    (Path(run.dir) / "segment-000002.ntj").write_bytes(b"this is no segment")
    assert [check["verdict"] for check in checks(lab, 1)] == ["ok", "unreadable"]
    result = lab.run("journal", "verify")
    assert result.exit_code == 1
    assert "segment-000002.ntj is not a nodetrack journal segment" in result.stderr


def test_nothing_to_check_is_no_damage(lab: Lab) -> None:
    assert checks(lab, 0) == []


def verified_in_terminal(
    monkeypatch: pytest.MonkeyPatch, lab: Lab, width: int, *targets: object
) -> list[str]:
    """The lines that verify prints in a terminal of that width."""
    screen = Console(width=width, force_terminal=True, no_color=True, color_system=None)
    monkeypatch.setattr(journal_module, "console", lambda: screen)
    with screen.capture() as printed:
        lab.run("journal", "verify", *targets)
    return [line.rstrip() for line in printed.get().splitlines()]


def test_verify_names_the_files_as_they_lie_in_the_tracking_folder(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    (path,) = lab.segments(run)
    within = str(path.relative_to(".nodetrack"))
    assert lab.out("journal", "verify").splitlines()[2].split()[0] == within
    heading, _, line, _ = verified_in_terminal(monkeypatch, lab, 80)
    assert heading.split() == ["file", "records", "rows", "verdict"]
    assert line.split()[0] == within
    path = path.rename("copy.ntj")
    assert lab.out("journal", "verify", "copy.ntj").splitlines()[2].split()[0] == "copy.ntj"


def test_verify_breaks_a_path_at_a_slash_and_nowhere_else(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    (path,) = lab.segments(run)
    flip(path, -100)
    os.truncate(path, path.stat().st_size - 3)
    heading, _, first, second, *_ = verified_in_terminal(monkeypatch, lab, 80)
    assert "corrupt" in heading
    assert first.split()[0] == f"p/runs/{run.id}/{run.attempt}/"
    assert second == path.name


def test_a_killed_node_leaves_a_journal_without_damage(lab: Lab) -> None:
    lab.killed_node("for step in range(100): run.log({'a': 1.0}, step=step)")
    (check,) = checks(lab, 0)
    assert check["rows"] == 100
    assert signal.SIGKILL == 9
