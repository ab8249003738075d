"""`nodetrack sync`, with the example plug-in as the backend."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nodetrack
from nodetrack.delivery.lock import BackendLock
from nodetrack.journal.cursor import CURSORS, Cursor, CursorFile, read_cursors

if TYPE_CHECKING:
    from tests.servers.plugin import Jsonlines

    from conftest import Lab


def attempt(lab: Lab, steps: Iterable[int], **arguments: Any) -> nodetrack.Run:
    """An attempt that was offline, finished."""
    with lab.start(mode="offline", **arguments) as run:
        lab.log_steps(run, steps)
    return run


def to(backend: Jsonlines, **options: object) -> str:
    """What --backends takes."""
    return json.dumps([{**backend.config, **options}])


def steps(backend: Jsonlines) -> list[Any]:
    """The steps in the order in which they came, repeats included."""
    return [line["step"] for line in backend.lines() if line["record"] == "Row"]


def test_everything_is_sent_once_and_the_table_says_so(lab: Lab, jsonlines: Jsonlines) -> None:
    attempt(lab, range(30))
    heading, _, line, place = lab.out("sync", "miner-1", "--backends", to(jsonlines)).splitlines()
    assert heading.split() == ["backend", "logged", "delivered", "missing", "state"]
    assert line.split() == ["jsonlines", "30", "30", "0", "delivered"]
    assert place == f"jsonlines  {jsonlines.path}"
    assert steps(jsonlines) == list(range(30))


def test_what_was_sent_is_not_sent_again(lab: Lab, jsonlines: Jsonlines) -> None:
    attempt(lab, range(30))
    for _ in range(3):
        lab.out("sync", "--backends", to(jsonlines))
    assert steps(jsonlines) == list(range(30))


def test_the_second_time_it_goes_where_it_went_the_first_time(lab: Lab, jsonlines: Jsonlines) -> None:
    """The cursor holds the backend's options, so a bare name will do as well, or none."""
    attempt(lab, range(10))
    lab.out("sync", "--backends", to(jsonlines))
    for options in ([], ["--backends", "jsonlines"]):
        attempt(lab, range(10))
        lab.out("sync", *options)
    assert steps(jsonlines) == [*range(10), *range(10), *range(10)]


def test_the_settings_say_where_to(lab: Lab, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(lab, range(10))
    monkeypatch.setenv("NODETRACK_BACKENDS", to(jsonlines))
    lab.out("sync")
    assert steps(jsonlines) == list(range(10))


def test_a_name_has_the_options_of_the_settings_whatever_the_variable_says(
    lab: Lab, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(lab, range(10))
    Path("nodetrack.toml").write_text(f'backends = [{{ kind = "jsonlines", path = "{jsonlines.path}" }}]\n')
    monkeypatch.setenv("NODETRACK_BACKENDS", "tensorboard")
    lab.out("sync", "--backends", "jsonlines")
    assert steps(jsonlines) == list(range(10))


def test_where_nothing_says_where_to_it_is_wrong_usage(lab: Lab) -> None:
    attempt(lab, range(10))
    result = lab.run("sync")
    assert result.exit_code == 2
    assert "--backends" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backends", "nosuch"], "There is no backend named 'nosuch'"),
        (["--backends", "[1"], "--backends takes names"),
        (["miner-7"], "There is no run 'miner-7'"),
        (["--attempt", "9", "--backends", "jsonlines"], "There is no attempt '9'"),
        (["--dir", "nowhere"], "There is no folder"),
    ],
)
def test_wrong_usage_is_told_in_a_sentence(
    lab: Lab, jsonlines: Jsonlines, options: list[str], words: str
) -> None:
    attempt(lab, range(3))
    result = lab.run("sync", *options)
    assert result.exit_code == 2
    assert words in result.stderr


def test_attempts_are_sent_in_the_order_in_which_they_are_named(lab: Lab, jsonlines: Jsonlines) -> None:
    ids = [attempt(lab, range(start, start + 5)).attempt for start in (0, 100, 200)]
    lab.out("sync", "--attempt", "3", "--attempt", ids[0], "--backends", to(jsonlines))
    assert steps(jsonlines) == [*range(200, 205), *range(5)]
    lab.out("sync")
    assert steps(jsonlines) == [*range(200, 205), *range(5), *range(100, 105)]


def test_the_answer_is_about_the_attempts_that_were_to_be_sent(lab: Lab, jsonlines: Jsonlines) -> None:
    for start in (0, 100):
        attempt(lab, range(start, start + 5))
    answer = lab.json("sync", "--attempt", 2, "--backends", to(jsonlines), "--json")
    (run,) = answer["runs"]
    (backend,) = run["backends"]
    assert (backend["logged"], backend["delivered"], answer["complete"]) == (5, 5, True)


def test_several_runs_or_a_project_are_sent(lab: Lab, jsonlines: Jsonlines) -> None:
    for project, uid in (("p", 1), ("p", 2), ("q", 3)):
        attempt(lab, [uid], project=project, uid=uid)
    lab.out("sync", "--project", "q", "--backends", to(jsonlines))
    assert steps(jsonlines) == [3]
    lab.out("sync", "miner-1", "miner-3", "--backends", to(jsonlines))
    assert steps(jsonlines) == [3, 1]
    answer = lab.json("sync", "--backends", to(jsonlines), "--json")
    assert [run["name"] for run in answer["runs"]] == ["miner-1", "miner-2", "miner-3"]
    assert steps(jsonlines) == [3, 1, 2]


def test_everything_below_a_folder_is_found(lab: Lab, jsonlines: Jsonlines) -> None:
    for uid in (1, 2):
        attempt(lab, [uid], uid=uid, dir=Path(f"disk/node-{uid}/.nodetrack"))
    lab.out("sync", "--dir", "disk", "--backends", to(jsonlines))
    assert sorted(steps(jsonlines)) == [1, 2]


def test_a_run_copied_from_another_machine_is_sent_from_its_folder_alone(
    lab: Lab, jsonlines: Jsonlines
) -> None:
    """With its cursors: what the machine that it comes from had sent is not sent again."""
    run = attempt(lab, range(10), project="net", uid=5)
    lab.out("sync", "--backends", to(jsonlines))
    attempt(lab, range(10, 15), project="net", uid=5)
    shutil.copytree(run.folder, Path("copied/some-run") / run.id)
    shutil.rmtree(".nodetrack")
    answer = lab.json("sync", f"copied/some-run/{run.id}", "--json")
    assert [(it["project"], it["run"]) for it in answer["runs"]] == [("net", run.id)]
    assert steps(jsonlines) == list(range(15))


def test_a_backend_that_is_away_is_told_and_what_is_left_named(lab: Lab, jsonlines: Jsonlines) -> None:
    run = attempt(lab, range(5, 25))
    jsonlines.spoil("write unavailable")
    result = lab.run("sync", "--backends", to(jsonlines), "--timeout", 1)
    assert result.exit_code == 1
    line = result.stdout.splitlines()[2]
    assert line.split() == ["jsonlines", "20", "0", "20", run.attempt, "5–24", "down"]
    assert "told to be away" in result.stdout
    assert f"sync {run.id}" in result.stderr
    jsonlines.mend()
    lab.out("sync", run.id)
    assert steps(jsonlines) == list(range(5, 25))


def test_a_backend_that_is_away_for_a_while_is_waited_for(lab: Lab, jsonlines: Jsonlines) -> None:
    """Two answers are lost: the rows arrive more than once, and the count is of what was acknowledged."""
    attempt(lab, range(20))
    jsonlines.spoil("write lose")
    process = lab.open_program("sync", "--backends", to(jsonlines))
    while not jsonlines.lines():
        assert process.poll() is None
    jsonlines.mend()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output.splitlines()[2].split() == ["jsonlines", "20", "20", "0", "delivered"]
    assert [row["step"] for row in jsonlines.rows()] == list(range(20))


def test_a_backend_that_refuses_us_is_not_waited_for(lab: Lab, jsonlines: Jsonlines) -> None:
    attempt(lab, range(5))
    result = lab.run("sync", "--backends", to(jsonlines, needs_token=True))
    assert result.exit_code == 1
    assert "401: jsonlines does not know this token" in result.stderr


def test_a_token_may_stand_in_the_dotenv_file(lab: Lab, jsonlines: Jsonlines) -> None:
    attempt(lab, range(5))
    Path(".env").write_text("JSONLINES_TOKEN=let-me-in\n")
    lab.out("sync", "--backends", to(jsonlines, needs_token=True))
    assert steps(jsonlines) == list(range(5))
    (cursor,) = Path(".nodetrack").rglob("cursors/jsonlines.json")
    assert "let-me-in" not in cursor.read_text()


def test_rows_that_a_backend_refuses_for_good_are_quarantined_and_counted(
    lab: Lab, jsonlines: Jsonlines
) -> None:
    with lab.start(mode="offline") as run:
        lab.log_steps(run, range(10))
        run.log({"bad": 1.0}, step=10)
    jsonlines.spoil("write reject bad")
    out = lab.out("sync", "--backends", to(jsonlines))
    heading, _, line, remark, _ = out.splitlines()
    assert heading.split() == ["backend", "logged", "delivered", "quarantined", "missing", "state"]
    assert line.split() == ["jsonlines", "11", "10", "1", "0", "delivered"]
    assert "quarantine/jsonlines.jsonl" in remark


def test_who_sends_the_run_already_is_left_to_it(lab: Lab, jsonlines: Jsonlines) -> None:
    run = attempt(lab, range(10))
    lock = BackendLock(run.folder / CURSORS / "jsonlines.lock")
    assert lock.acquire()
    try:
        result = lab.run("sync", "--backends", to(jsonlines))
    finally:
        lock.release()
    assert result.exit_code == 1
    assert f"is being sent by another process (process {os.getpid()})" in result.stderr
    assert jsonlines.lines() == []


def test_beside_a_running_node_that_is_well_nothing_is_left_to_do(lab: Lab, jsonlines: Jsonlines) -> None:
    """The backend takes its time over the first batch, so that there is something left."""
    jsonlines.spoil("write hang 600")
    run = lab.start(backends=[jsonlines.config], init_timeout=50, finish_timeout=1)
    lab.log_steps(run, range(3))
    result = lab.run("sync", run.id, "--backends", to(jsonlines))
    try:
        assert result.exit_code == 0, result.output
        assert "is being sent by the running node" in result.stderr
        assert "3 rows are left to the running node." in result.stderr
        assert "To send the rest" not in result.stderr
        assert result.stdout.splitlines()[2].split()[-1] == "sending"
        assert "undelivered" not in lab.out("runs")
        elsewhere = lab.run("sync", run.id, "--backends", to(jsonlines, path=f"{jsonlines.path}-2"))
        assert (elsewhere.exit_code, "left to the running node." in elsewhere.stderr) == (1, False)
    finally:
        run.finish()


def test_a_run_that_is_sent_elsewhere_than_before_says_so_and_how_to_go_back(
    lab: Lab, jsonlines: Jsonlines
) -> None:
    run = attempt(lab, range(3))
    lab.out("sync", "--backends", to(jsonlines))
    elsewhere = jsonlines.path.with_name("elsewhere.jsonl")
    result = lab.run("sync", "--backends", to(jsonlines, path=str(elsewhere)))
    [told] = [line for line in result.stderr.splitlines() if "to go back" in line]
    assert f"jsonlines of {run.name} was at {jsonlines.path} and is at {elsewhere} from now on" in told
    command = shlex.split(told.partition("to go back: ")[2])
    assert command[-1] == to(jsonlines)
    lab.out(*command[command.index("sync") :])
    assert read_cursors(run.folder)["jsonlines"].destination == str(jsonlines.path)
    assert steps(jsonlines) == [0, 1, 2], "the old place goes on where it was"
    assert "to go back" not in lab.run("sync", "--backends", to(jsonlines)).stderr


def test_a_backend_that_the_run_calls_itself_has_nothing_to_be_sent(lab: Lab) -> None:
    attempt(lab, range(3))
    result = lab.run("sync", "--backends", "log")
    assert result.exit_code == 2
    assert "a node calls it itself" in result.stderr


def test_ctrl_c_ends_it_in_order_and_says_what_is_left(lab: Lab, jsonlines: Jsonlines) -> None:
    run = attempt(lab, range(100))
    jsonlines.spoil("write hang 0.2")
    process = lab.open_program("sync", "--backends", to(jsonlines, batch_rows=10))
    while not jsonlines.lines():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Sending was ended: stopped by Ctrl-C." in errors
    assert f"sync {run.id}" in errors
    delivered = read_cursors(run.folder)["jsonlines"].rows()
    assert output.splitlines()[2].split()[:4] == ["jsonlines", "100", str(delivered), str(100 - delivered)]
    assert len(steps(jsonlines)) == delivered, "what was acknowledged is what arrived"


def test_follow_goes_on_until_ctrl_c_and_sends_the_last(lab: Lab, jsonlines: Jsonlines) -> None:
    run = lab.start(mode="offline")
    process = lab.open_program("sync", "--follow", "--backends", to(jsonlines, batch_seconds=0.05))
    for step in range(5):
        run.log({"a": 1.0}, step=step)
        while len(steps(jsonlines)) <= step:
            assert process.poll() is None
    run.finish()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert output.splitlines()[2].split() == ["jsonlines", "5", "5", "0", "delivered"]


def test_follow_finds_runs_that_begin_later(lab: Lab, jsonlines: Jsonlines) -> None:
    attempt(lab, [1])
    process = lab.open_program("sync", "--follow", "--json", "--backends", to(jsonlines, batch_seconds=0.05))
    while 1 not in steps(jsonlines):
        assert process.poll() is None
    attempt(lab, [2], uid=2)
    while 2 not in steps(jsonlines):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert [run["name"] for run in json.loads(output)["runs"]] == ["miner-1", "miner-2"]


def test_a_backend_that_has_everything_is_not_even_asked(lab: Lab, jsonlines: Jsonlines) -> None:
    attempt(lab, range(5))
    lab.out("sync", "--backends", to(jsonlines))
    jsonlines.spoil("open refuse")
    assert "delivered" in lab.out("sync")


def test_a_recorded_backend_that_cannot_be_used_keeps_no_other_from_its_rows(
    lab: Lab, jsonlines: Jsonlines
) -> None:
    run = attempt(lab, range(5))
    lab.out("sync", "--backends", to(jsonlines))
    CursorFile(run.folder, "gone").write(Cursor(backend="gone", config={"kind": "gone"}))
    attempt(lab, range(5, 10))
    result = lab.run("sync")
    assert result.exit_code == 1
    assert "There is no backend named 'gone'" in result.stderr
    assert steps(jsonlines) == list(range(10))
