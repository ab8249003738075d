"""`nodetrack runs`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from nodetrack.journal import folder

if TYPE_CHECKING:
    from tests.servers.plugin import Jsonlines

    from conftest import Lab

HEADINGS = "run name role uid state version attempts step last seen tags"


def listed(lab: Lab, *options: str) -> list[str]:
    """The names of the runs that are listed, in order."""
    return [run["name"] for run in lab.json("runs", "--json", *options)["runs"]]


def nodes(lab: Lab, **by_uid: dict[str, object]) -> None:
    """One finished run for each uid."""
    for uid, arguments in by_uid.items():
        lab.start(uid=uid.removeprefix("u"), **arguments).finish()


def test_a_run_is_listed_with_who_it_is_and_how_it_stands(lab: Lab) -> None:
    with lab.start(tags=["eu", "stable"]) as run:
        run.log({"a": 1.0}, step=41)
    heading, line, cells = lab.out("runs").splitlines()
    assert " ".join(heading.split()) == HEADINGS
    assert set(line) == {"─"}
    assert cells.split() == [
        *(run.id, "miner-1", "miner", "1", "finished", "0.1.0", "1", "42", "0", "s", "ago", "eu", "stable")
    ]


def test_the_json_has_every_field_of_a_run(lab: Lab) -> None:
    lab.start(group="night", notes="first").finish(3)
    answer = lab.json("runs", "--json")
    assert list(answer) == ["runs", "left_out_environments"]
    (run,) = answer["runs"]
    assert (run["project"], run["role"], run["uid"], run["environment"]) == ("p", "miner", "1", "prod")
    assert (run["state"], run["reason"], run["group"], run["notes"]) == (
        "crashed",
        "exit code 3",
        "night",
        "first",
    )
    assert (run["version"], run["versions"], run["attempts"], run["tags"]) == ("0.1.0", ["0.1.0"], 1, [])
    assert run["started_ns"] <= run["last_seen_ns"] <= time.time_ns()


def test_runs_of_other_environments_are_left_out_and_counted(lab: Lab) -> None:
    nodes(lab, u1={}, u2={"environment": "dev"}, u3={"environment": "dev"}, u4={"environment": "lab"})
    printed = lab.out("runs")
    assert "miner-1" in printed
    assert "miner-2" not in printed
    assert "3 runs of other environments left out (2 of dev, 1 of lab)" in printed
    assert listed(lab, "--environment", "dev") == ["miner-2", "miner-3"]
    assert lab.json("runs", "--json")["left_out_environments"] == {"dev": 2, "lab": 1}


def test_all_environments_are_shown_with_their_names(lab: Lab) -> None:
    nodes(lab, u1={}, u2={"environment": "dev"})
    printed = lab.out("runs", "--all-environments")
    assert "left out" not in printed
    assert printed.splitlines()[-1].split()[-1] == "dev"


def test_versions_are_sorted_and_filtered_as_pep_440_says(lab: Lab) -> None:
    versions = {"u1": "1.9", "u2": "1.10", "u3": "1.10rc1", "u4": "2.0+cu121"}
    nodes(lab, **{uid: {"version": version} for uid, version in versions.items()})
    assert listed(lab, "--sort", "version") == ["miner-1", "miner-3", "miner-2", "miner-4"]
    assert listed(lab, "--sort", "-version") == ["miner-4", "miner-2", "miner-3", "miner-1"]
    assert listed(lab, "--version", ">=1.10") == ["miner-2", "miner-4"]
    assert listed(lab, "--version", "==1.9") == ["miner-1"]


def test_each_filter_keeps_what_it_names(lab: Lab) -> None:
    nodes(
        lab,
        u1={"tags": ["eu", "stable"], "group": "night"},
        u2={"tags": ["eu"], "role": "validator"},
        u3={"project": "q", "name": "the long one"},
    )
    lab.start(uid=4).finish(1)
    assert listed(lab, "--project", "q") == ["the long one"]
    assert listed(lab, "--role", "validator") == ["validator-2"]
    assert listed(lab, "--tag", "eu") == ["miner-1", "validator-2"]
    assert listed(lab, "--tag", "eu", "--tag", "stable") == ["miner-1"]
    assert listed(lab, "--group", "night") == ["miner-1"]
    assert listed(lab, "--state", "crashed") == ["miner-4"]
    assert listed(lab, "--state", "crashed", "--state", "finished", "--role", "miner") == [
        *("miner-1", "miner-4", "the long one")
    ]
    assert listed(lab, "--name", "^miner-[14]$") == ["miner-1", "miner-4"]


def test_names_are_sorted_as_people_count(lab: Lab) -> None:
    nodes(lab, u10={}, u9={}, u1={})
    assert listed(lab) == ["miner-1", "miner-9", "miner-10"]
    assert listed(lab, "--sort", "-uid") == ["miner-10", "miner-9", "miner-1"]


def test_the_columns_can_be_chosen(lab: Lab) -> None:
    lab.start(group="night").finish(3)
    heading, _, cells = lab.out("runs", "--columns", "name, last-seen,group,reason").splitlines()
    assert heading.split() == ["name", "last", "seen", "group", "reason"]
    assert cells.split() == ["miner-1", "0", "s", "ago", "night", "exit", "code", "3"]


def test_the_project_is_a_column_where_there_are_several(lab: Lab) -> None:
    nodes(lab, u1={}, u2={"project": "q"})
    assert lab.out("runs").startswith("project")
    assert not lab.out("runs", "--project", "q").startswith("project")


def test_a_killed_run_and_a_running_one_are_told_apart(lab: Lab) -> None:
    lab.killed_node("run.log({'a': 1.0})")
    lab.start(uid=2)
    states = {run["name"]: (run["state"], run["reason"]) for run in lab.json("runs", "--json")["runs"]}
    assert states == {
        "miner-1": ("crashed", "killed: the process ended without a word"),
        "miner-2": ("running", ""),
    }


def test_a_folder_without_runs_is_no_error(lab: Lab) -> None:
    result = lab.run("runs", "--json")
    assert (result.exit_code, result.stdout) == (0, '{\n  "runs": [],\n  "left_out_environments": {}\n}\n')
    assert f"There are no runs in {Path('.nodetrack').absolute()}" in result.stderr


def test_of_a_project_that_is_not_there_those_that_are_there_are_named(lab: Lab) -> None:
    nodes(lab, u1={}, u2={"project": "q"})
    result = lab.run("runs", "--project", "nope")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "There is no project 'nope' with runs in" in result.stderr
    assert result.stderr.endswith("; there are 'p', 'q'.\n")


def test_a_run_whose_journal_is_garbage_does_not_hide_the_others(lab: Lab) -> None:
    nodes(lab, u2={})
    run = lab.start(uid=1)
    run.finish()
    (path,) = lab.segments(run)
    path.write_bytes(os.urandom(path.stat().st_size))
    assert [run["uid"] for run in lab.json("runs", "--json", "--sort", "uid")["runs"]] == ["1", "2"]


def test_what_a_name_holds_cannot_move_the_cursor(lab: Lab) -> None:
    lab.start(name="\x1b[2Jgone\nnext").finish()
    assert "\\x1b[2Jgone\\nnext" in lab.out("runs")


def terminal(lab: Lab, columns: int, *arguments: str, **variables: str) -> str:
    """What the program prints to a real terminal of that width."""
    import pty

    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **variables}
    with subprocess.Popen(
        [sys.executable, "-m", "nodetrack", *arguments], stdout=side, env=environment
    ) as process:
        os.close(side)
        printed = b""
        while chunk := _read(main):
            printed += chunk
        assert process.wait() == 0
    os.close(main)
    return printed.decode()


def plain(lab: Lab, width: int, *arguments: str) -> str:
    """As `terminal`, without the colours."""
    return re.sub("\x1b\\[[0-9;]*m", "", terminal(lab, width, *arguments))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says EIO when the other side is closed
        return b""


def test_states_have_colours_in_a_terminal_and_nowhere_else(lab: Lab) -> None:
    lab.start().finish()
    assert "\x1b[34mfinished\x1b[0m" in terminal(lab, 140, "runs")
    assert "\x1b[34m" not in terminal(lab, 140, "runs", NO_COLOR="1")
    assert "\x1b" not in lab.out("runs")


def test_a_narrow_terminal_goes_without_a_column_rather_than_cut_an_id(lab: Lab) -> None:
    run = lab.start(tags=["eu", "stable"], name="a-name-of-twenty-four-xx")
    run.finish()
    printed = plain(lab, 80, "runs")
    assert run.id in printed
    assert "a-name-of-twenty-four-xx" in printed
    assert "Too narrow for tags, role" in printed
    assert max(map(len, printed.splitlines())) <= 80


def columns(printed: str) -> dict[str, str]:
    """What stands in each column of a table, its folded lines put together again."""
    heading, rule, *lines = printed.partition("Too narrow")[0].splitlines()
    titles = re.split(r" {2,}", heading.strip())
    starts = [heading.index(title) for title in titles]
    ends = [*starts[1:], len(rule)]
    return {
        title: "".join(line[start:end].strip() for line in lines)
        for title, start, end in zip(titles, starts, ends, strict=True)
    }


def test_long_names_fold_and_long_columns_go_but_no_character_of_a_run_is_lost(lab: Lab) -> None:
    name = "miner-on-a-machine-with-a-very-long-name-" + "y" * 60
    run = lab.start(name=name, uid="5F" + "x" * 46, project="a-project-with-quite-a-long-name")
    run.finish()
    lab.start(uid=2).finish()
    printed = plain(lab, 80, "runs", "--state", "finished", "--name", "machine")
    shown = columns(printed)
    assert (shown["run"], shown["name"], shown["state"]) == (run.id, name, "finished")
    assert max(map(len, printed.splitlines())) <= 80
    assert "Too narrow for role, uid, attempts: --columns" in printed
    both = plain(lab, 80, "runs")
    assert "Too narrow for role, uid, attempts, project: --columns" in both


def test_a_column_that_is_empty_goes_first_and_without_a_remark(lab: Lab) -> None:
    lab.start(name="a-name-of-twenty-four-xx").finish()
    assert "tags" in plain(lab, 140, "runs")
    printed = plain(lab, 96, "runs")
    assert "tags" not in printed
    assert "Too narrow" not in printed


@pytest.mark.parametrize("width", [40, 20, 7])
def test_the_narrowest_terminal_shows_who_a_run_is_and_how_it_stands(lab: Lab, width: int) -> None:
    run = lab.start(id="a-run-id-of-thirty-characters-x", name="n" * 50)
    run.finish()
    letters = re.sub(r"\s", "", plain(lab, width, "runs"))
    assert letters.count("n") >= 50
    shown = columns(plain(lab, 40, "runs"))
    assert (shown["run"], shown["name"], shown["state"]) == (run.id, "n" * 50, "finished")


def test_columns_that_were_asked_for_are_never_dropped_and_never_cut(lab: Lab) -> None:
    run = lab.start(tags=["eu", "stable"])
    run.finish()
    printed = plain(lab, 40, "runs", "--columns", "run,name,tags,role,uid")
    assert "Too narrow" not in printed
    shown = columns(printed)
    assert list(shown.values()) == [run.id, "miner-1", "eustable", "miner", "1"]


@pytest.mark.parametrize("width", [None, "40"])
def test_nothing_is_cut_where_no_person_reads(lab: Lab, width: str | None) -> None:
    name = "n" * 300
    lab.start(name=name).finish()
    variables = {**os.environ, **({"COLUMNS": width} if width else {})}
    printed = subprocess.check_output([sys.executable, "-m", "nodetrack", "runs"], text=True, env=variables)
    assert name in printed


@pytest.mark.case("C074")
def test_a_killed_node_is_not_among_the_live_ones(lab: Lab) -> None:
    node = lab.open_node("print(run.id, flush=True); sys.stdin.read()")
    assert node.stdout is not None
    living = node.stdout.readline().strip()
    lab.start(uid=2).finish()
    assert [run["run"] for run in lab.json("runs", "--live", "--json")["runs"]] == [living]
    node.kill()
    node.wait()
    assert lab.json("runs", "--live", "--json")["runs"] == []


@pytest.mark.case("C074")
def test_a_node_of_another_machine_is_live_until_the_limit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process cannot be asked, so its last sign of life counts."""
    node = lab.open_node("print(run.id, flush=True); sys.stdin.read()")
    assert node.stdout is not None
    run = node.stdout.readline().strip()
    node.kill()
    node.wait()
    elsewhere = msgspec.structs.replace(folder.this_host(), hostname="elsewhere", boot_id="another boot")
    monkeypatch.setattr(folder, "this_host", lambda: elsewhere)
    assert [it["run"] for it in lab.json("runs", "--live", "--json")["runs"]] == [run]
    an_hour_later = time.time_ns() + 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: an_hour_later)
    assert lab.json("runs", "--live", "--json")["runs"] == []
    assert [it["state"] for it in lab.json("runs", "--json")["runs"]] == ["stale"]


def test_what_a_backend_lacks_is_a_column_of_its_own(lab: Lab, jsonlines: Jsonlines) -> None:
    """Only where something is missing; a run that was never sent anywhere lacks nothing."""
    lab.start(uid=1).finish()
    with lab.start(uid=2, mode="offline") as run:
        lab.log_steps(run, range(7))
    assert "undelivered" not in lab.out("runs")
    jsonlines.spoil("write unavailable")
    lab.run("sync", run.id, "--backends", json.dumps([jsonlines.config]), "--timeout", 0.5)
    assert "undelivered" in lab.out("runs").splitlines()[0]
    assert [it["undelivered"] for it in lab.json("runs", "--json")["runs"]] == [None, 7]
    jsonlines.mend()
    lab.out("sync", run.id)
    assert "undelivered" not in lab.out("runs")
    assert [it["undelivered"] for it in lab.json("runs", "--json")["runs"]] == [None, 0]
