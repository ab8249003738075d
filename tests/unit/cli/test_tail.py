"""`nodetrack tail`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

import nodetrack
from nodetrack.journal.folder import RunFolder

if TYPE_CHECKING:
    from conftest import Lab

#: A node that logs a step for each line that it is told.
_LOGS_ON_DEMAND = """
for line in sys.stdin:
    run.log({"a": float(line)}, step=int(line))
"""


def tell(process: subprocess.Popen[str], text: object) -> None:
    """Write one line to its standard input."""
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_the_newest_rows_are_printed_oldest_first(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(50))
    head, *rows = lab.out("tail", "miner-1", "-n", "3").splitlines()
    assert head.startswith(f"attempt {run.attempt}, version 0.1.0, started ")
    assert [row.split()[1:] for row in rows] == [["47", "a", "47"], ["48", "a", "48"], ["49", "a", "49"]]
    assert [row["step"] for row in lab.lines("tail", "miner-1", "--json")] == list(range(30, 50))


def test_rows_of_earlier_attempts_are_printed_where_the_last_has_too_few(lab: Lab) -> None:
    with lab.start() as first:
        lab.log_steps(first, range(5))
    with lab.start(version="0.2.0") as second:
        lab.log_steps(second, range(3, 6), plus=100)
    rows = lab.lines("tail", "miner-1", "-n", "5", "--json")
    assert [(row["attempt"], row["step"]) for row in rows] == [
        *((first.attempt, step) for step in (3, 4)),
        *((second.attempt, step) for step in (3, 4, 5)),
    ]
    assert [row["version"] for row in rows] == ["0.1.0"] * 2 + ["0.2.0"] * 3
    assert lab.out("tail", "miner-1", "-n", "5").count("attempt ") == 2


def test_the_rows_come_from_as_many_segments_as_it_takes(lab: Lab) -> None:
    with lab.start(segment_bytes=4096) as run:
        lab.log_steps(run, range(1000))
    assert len(lab.segments(run)) > 3
    assert [row["step"] for row in lab.lines("tail", "miner-1", "-n", "900", "--json")] == list(
        range(100, 1000)
    )


def test_none_at_all_can_be_asked_for(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    assert lab.out("tail", "miner-1", "-n", "0") == ""


def test_only_metrics_that_fit_are_printed_and_rows_that_have_one(lab: Lab) -> None:
    with lab.start() as run:
        for step in range(30):
            run.log(
                {"train/loss": 1.0, "train/lr": 0.1, "eval": 2.0} if step % 10 == 0 else {"eval": 2.0},
                step=step,
            )
    rows = lab.lines("tail", "miner-1", "-n", "2", "--metric", "^train/l[or]", "--json")
    assert [row["step"] for row in rows] == [10, 20]
    assert rows[0]["values"] == {"train/loss": 1.0, "train/lr": 0.1}
    assert "eval" not in lab.out("tail", "miner-1", "--metric", "loss$")


def test_the_rows_of_processes_that_share_an_attempt_are_merged_by_time(lab: Lab) -> None:
    """After a fork each process writes its own segment."""
    lab.node("""
run.log({"a": 0.0}, step=0)
child = os.fork()
if child == 0:
    run.log({"a": 1.0}, step=1)
    os._exit(0)
os.waitpid(child, 0)
run.log({"a": 2.0}, step=2)
run.finish()
""")
    assert [row["step"] for row in lab.lines("tail", "miner-1", "--json")] == [0, 1, 2]
    assert [row["step"] for row in lab.lines("tail", "miner-1", "-n", "2", "--json")] == [1, 2]


def test_a_context_stands_before_the_values(lab: Lab) -> None:
    with lab.start() as run:
        run.bind(stage="eval").log({"a": 1.0}, step=3)
    assert lab.out("tail", "miner-1").splitlines()[-1].split()[1:] == ["3", "stage=eval", "a", "1"]


def test_a_file_that_is_no_segment_is_named_once_and_stops_nothing(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    path = Path(run.dir) / "segment-000002.ntj"
    path.write_bytes(b"this is no segment")
    result = lab.run("tail", "miner-1", "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 3
    assert result.stderr.count(path.name) == 1


def test_follow_prints_what_comes_from_new_segments_and_new_attempts_until_ctrl_c(lab: Lab) -> None:
    """A torn tail, as a killed process may leave it, does not stop it either."""
    node = lab.open_node(_LOGS_ON_DEMAND)
    tell(node, 0)
    while not (runs := lab.json("runs", "--json")["runs"]) or runs[0]["step"] != 1:
        pass
    tail = lab.open_program("tail", "miner-1", "--follow", "-n", "1")
    assert line(tail).startswith("attempt 0001-")
    assert line(tail).split()[1:] == ["0", "a", "0"]
    tell(node, 1)
    assert line(tail).split()[1:] == ["1", "a", "1"]
    node.kill()
    node.wait()
    run = RunFolder(Path(".nodetrack/p/runs") / runs[0]["run"], "p")
    with lab.segments(run)[-1].open("ab") as torn:
        torn.write(b"\x40\x00\x00\x00torn")
    assert line(tail).split(maxsplit=1)[1] == "crashed (killed: the process ended without a word)\n"
    with lab.start(version="0.2.0", segment_bytes=4096) as second:
        lab.log_steps(second, range(2, 500))
    assert line(tail).startswith(f"attempt {second.attempt}, version 0.2.0")
    assert [int(line(tail).split()[1]) for _ in range(2, 500)] == list(range(2, 500))
    assert len(lab.segments(second)) > 3
    assert line(tail).split()[1:] == ["finished"]
    tail.send_signal(signal.SIGINT)
    _, errors = tail.communicate()
    assert (tail.returncode, errors) == (0, "")


def test_follow_says_at_once_that_the_attempt_has_ended_long_ago(lab: Lab) -> None:
    lab.start().finish(3)
    tail = lab.open_program("tail", "miner-1", "--follow")
    assert line(tail).startswith("attempt ")
    assert line(tail).split(maxsplit=1)[1] == "crashed (exit code 3)\n"


def test_follow_prints_nothing_but_rows_as_json(lab: Lab) -> None:
    lab.killed_node("run.log({'a': 1.0}, step=0)")
    tail = lab.open_program("tail", "miner-1", "--follow", "--json")
    assert '"step":0' in line(tail)
    with lab.start() as run:
        lab.log_steps(run, [1])
    assert '"step":1' in line(tail)


def test_a_metric_that_no_row_has_is_remarked_on(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    result = lab.run("tail", "miner-1", "--metric", "zzz")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "nodetrack: No row has a metric in whose name 'zzz' is found.\n"
    assert lab.run("tail", "miner-1", "--metric", "zzz", "-n", "0").stderr == ""
    assert lab.run("tail", "miner-1", "--metric", "a").stderr == ""


def in_terminal(lab: Lab, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    """What is printed in a terminal of 80 columns."""
    from nodetrack.cli import tail as tail_module

    screen = Console(width=80, force_terminal=True, no_color=True, color_system=None)
    monkeypatch.setattr(tail_module, "console", lambda: screen)
    with screen.capture() as printed:
        lab.run("tail", "miner-1", *options)
    return printed.get().splitlines()


def test_a_row_of_many_metrics_goes_on_below_in_a_terminal(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"layer/{index}/norm": float(index) for index in range(12)}
    with lab.start() as run:
        run.log(values, step=7)
    _, *lines = in_terminal(lab, monkeypatch)
    assert 1 < len(lines) <= 8
    assert max(map(len, lines)) <= 80
    assert all(below.startswith(" " * 23 + "layer/") for below in lines[1:])
    words = " ".join(lines).split()[2:]
    assert dict(zip(words[::2], map(float, words[1::2]), strict=True)) == values


def test_a_row_of_hundreds_of_metrics_ends_with_how_many_are_left_out(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.start() as run:
        run.log({f"layer/{index:03}/norm": 1.0 for index in range(500)}, step=7)
    assert lab.out("tail", "miner-1").splitlines()[-1].count("layer/") == 500
    _, *lines = in_terminal(lab, monkeypatch)
    shown = sum(text.count("layer/") for text in lines)
    assert len(lines) == 8
    assert lines[-1].strip() == f"and {500 - shown} more: --metric chooses"


def test_ctrl_c_in_a_terminal_leaves_the_prompt_a_line_of_its_own(lab: Lab) -> None:
    import pty

    lab.start().finish()
    main, side = pty.openpty()
    tail = subprocess.Popen(
        [sys.executable, "-m", "nodetrack", "tail", "miner-1", "--follow"],
        stdout=side,
        stderr=subprocess.PIPE,
    )
    lab.processes.append(tail)
    os.close(side)
    printed = b""
    while b"finished" not in printed:
        printed += os.read(main, 65536)
    tail.send_signal(signal.SIGINT)
    assert tail.wait() == 0
    rest = os.read(main, 65536)
    assert (
        printed.replace(b"\x1b[34m", b"").replace(b"\x1b[0m", b"").count(b"\r\n") + rest.count(b"\r\n") == 3
    )
    os.close(main)


def test_follow_tells_of_alerts_and_rewinds(lab: Lab) -> None:
    run = lab.start()
    tail = lab.open_program("tail", "miner-1", "--follow")
    run.log({"a": 1.0}, step=1)
    assert line(tail).startswith("attempt ")
    assert line(tail).split()[1:] == ["1", "a", "1"]
    run.define_metric("a", summary="min")
    run.rewind(0)
    run.alert("look", "at it")
    assert line(tail).split(maxsplit=1)[1] == (
        "went back to step 1: earlier rows from there on are superseded\n"
    )
    assert line(tail).split()[1:] == ["alert", "look:", "at", "it"]
    assert nodetrack.run is run


# -- what the node printed ------------------------------------------------------------------------------

_PRINTS = """
print("one")
run.log({"a": 1.0}, step=0)
print("two\\tcolumns", file=sys.stderr)
print("three")
"""


def test_the_lines_that_a_node_printed_are_told_with_their_times(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODETRACK_CONSOLE", "true")
    assert lab.node(_PRINTS).returncode == 0
    head, *lines = lab.out("tail", "miner-1", "--console", "-n", "3").splitlines()
    assert head.startswith("attempt 0001-")
    assert [line.split("  ", 1)[1] for line in lines] == ["one", "two     columns", "three"]
    told = lab.lines("tail", "miner-1", "--console", "--json")
    assert [(line["stream"], line["text"]) for line in told][-3:] == [
        ("stdout", "one"),
        ("stderr", "two\tcolumns"),
        ("stdout", "three"),
    ]
    assert told[0].keys() == {"run", "attempt", "time_ns", "stream", "text"}


def test_lines_that_are_printed_meanwhile_are_followed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODETRACK_CONSOLE", "true")
    node = lab.open_node('print("ready")\nfor line in sys.stdin: print("heard", line.strip())')
    assert line(node) == "ready\n"
    tail = lab.open_program("tail", "miner-1", "--console", "--follow", "--json", "-n", "1")
    assert '"ready"' in line(tail)
    tell(node, "me")
    assert '"heard me"' in line(tail)


def test_a_node_whose_console_is_not_kept_has_no_lines(lab: Lab) -> None:
    assert lab.node(_PRINTS).returncode == 0
    result = lab.run("tail", "miner-1", "--console")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "No line that the node printed was kept." in result.stderr


def test_printed_lines_have_no_metrics(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    result = lab.run("tail", "miner-1", "--console", "--metric", "a")
    assert result.exit_code == 2
    assert "give --console or --metric" in result.stderr
