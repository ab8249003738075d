"""Projects, runs, attempts and their state, from the files alone."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import nodetrack
from nodetrack.errors import RunNotFoundError
from nodetrack.journal import folder as folder_module
from nodetrack.journal.folder import AttemptFolder, Damage, RunFolder, Series, TrackingFolder
from nodetrack.journal.segment import segment_paths
from nodetrack.live_run import Run
from nodetrack.records import Row

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts attempts, of one node unless told otherwise."""
    return lambda **arguments: nodetrack.init(
        **{"project": "p", "role": "miner", "uid": 1, "version": "0.1.0", "dir": tmp_path, **arguments}
    )


@pytest.fixture
def tracking(tmp_path: Path) -> TrackingFolder:
    """The folder that they log into."""
    return TrackingFolder(tmp_path)


def on_disk(run: Run) -> RunFolder:
    """The run as a reader finds it."""
    return RunFolder(run.folder, "p")


def run_killed(folder: Path, body: str = "run.log({'a': 1.0})") -> None:
    """One attempt that ends by SIGKILL."""
    script = (
        "import nodetrack, os, signal\n"
        f"run = nodetrack.init('p', role='miner', uid=1, version='0.1.0', dir={str(folder)!r})\n"
        f"{body}\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9


# ---------------------------------------------------------------------------------------------------
# Finding


def test_projects_and_runs_are_listed_by_name(start: Start, tracking: TrackingFolder) -> None:
    for project, uid in (("zoo", 1), ("a/b c", 1), ("a/b c", 2)):
        start(project=project, uid=uid).finish()
    assert tracking.projects() == ["a/b c", "zoo"]
    assert [run.project for run in tracking.runs()] == ["a/b c", "a/b c", "zoo"]
    assert len(tracking.runs("zoo")) == 1
    assert tracking.runs("nothing") == []


def test_a_folder_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert TrackingFolder(tmp_path / "nowhere").projects() == []
    assert TrackingFolder(tmp_path / "nowhere").runs() == []


def test_files_that_lie_about_are_not_taken_for_runs(start: Start, tracking: TrackingFolder) -> None:
    run = start()
    run.finish()
    (run.folder.parent / "notes.txt").write_text("mine")
    (run.folder.parent / "empty").mkdir()
    (run.folder / "0002-zzzz.bak").mkdir()
    (tracking.folder / "stray").mkdir()
    assert [found.id for found in tracking.runs()] == [run.id]
    assert [attempt.id for attempt in tracking.runs()[0].attempts] == [run.attempt]


def test_a_run_is_found_by_id_beginning_name_or_node(start: Start, tracking: TrackingFolder) -> None:
    run = start(name="the first")
    run.finish()
    start(uid=2).finish()
    for reference in (run.id, run.id[:7], "the first", "miner-1"):
        assert tracking.find(reference).id == run.id
        assert tracking.find(reference, "p").id == run.id


def test_of_several_runs_of_a_node_the_newest_is_meant(start: Start, tracking: TrackingFolder) -> None:
    older = start()
    older.finish()
    newer = start(resume="never")
    newer.finish()
    assert tracking.find("miner-1").id == newer.id
    assert [run.id for run in tracking.find_all("miner-1")] == [newer.id, older.id]


def test_of_several_runs_of_a_node_the_one_that_runs_is_meant(start: Start, tracking: TrackingFolder) -> None:
    running = start(uid=1)
    newer = start(uid=2, name="miner-1")
    newer.finish()
    assert tracking.find("miner-1").id == running.id
    assert [run.id for run in tracking.find_all("miner-1")] == [running.id, newer.id]


def test_an_id_is_meant_before_a_name_that_reads_the_same(start: Start, tracking: TrackingFolder) -> None:
    run = start(id="abc")
    run.finish()
    start(uid=2, name="abc").finish()
    assert [found.id for found in tracking.find_all("abc")] == [run.id]


def test_a_run_that_is_not_there_is_an_error_that_says_what_to_do(
    start: Start, tracking: TrackingFolder, tmp_path: Path
) -> None:
    def message(reference: str, project: str | None = None) -> str:
        with pytest.raises(RunNotFoundError) as raised:
            tracking.find(reference, project)
        return str(raised.value)

    assert (
        message("miner-1")
        == f"There are no runs in {tmp_path}: give another folder with --dir or NODETRACK_DIR."
    )
    start(id="abc-one").finish()
    none = f"There is no run 'zzz' in {tmp_path}; `nodetrack runs` lists"
    assert message("zzz") == f"{none} the one that is there."
    start(id="abc-two", uid=2, project="q").finish()
    assert message("zzz") == f"{none} the 2 that are there."
    assert message("abc") == "2 runs begin with 'abc': abc-one, abc-two."
    assert message("minr-2") == f"There is no run 'minr-2' in {tmp_path}; did you mean 'miner-2'?"
    assert message("minr-2", "q").startswith(
        f"There is no run 'minr-2' in project 'q' of {tmp_path}; did you"
    )
    assert message("abc-one", "r") == f"There is no project 'r' with runs in {tmp_path}; there are 'p', 'q'."


def test_a_folder_is_named_in_full(tracking: TrackingFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody in the wrong working folder sees it from the message."""
    monkeypatch.chdir(tracking.folder)
    assert (
        f"There are no runs in {tracking.folder / 'elsewhere'}:"
        in TrackingFolder(Path("elsewhere")).nothing_there()
    )


# ---------------------------------------------------------------------------------------------------
# State


def test_a_run_is_running_while_its_process_lives_and_finished_after(start: Start) -> None:
    run = start()
    assert on_disk(run).overview().state == "running"
    run.finish()
    overview = on_disk(run).overview()
    assert (overview.state, overview.reason) == ("finished", "")


def test_a_killed_process_is_known_to_be_gone_at_once(tmp_path: Path, tracking: TrackingFolder) -> None:
    run_killed(tmp_path)
    overview = tracking.find("miner-1").overview()
    assert (overview.state, overview.reason) == ("crashed", "killed: the process ended without a word")


def _as_if_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this is another machine than the one that logged."""
    elsewhere = msgspec.structs.replace(
        folder_module.this_host(), hostname="elsewhere", boot_id="another boot"
    )
    monkeypatch.setattr(folder_module, "this_host", lambda: elsewhere)


def test_a_run_on_another_machine_is_stale_when_it_shows_no_sign_of_life(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(stale_after_seconds=60, heartbeat_seconds=1000)
    run.log({"a": 1.0})
    _as_if_elsewhere(monkeypatch)
    assert on_disk(run).overview().state == "running"
    hour_ago = time.time() - 3600
    in_an_hour = time.time_ns() + 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: in_an_hour)
    overview = on_disk(run).overview()
    assert overview.state == "stale"
    assert overview.reason.startswith("no sign of life for 36")
    monkeypatch.undo()
    for path in run.folder.rglob("*"):
        os.utime(path, (hour_ago, hour_ago))
    run.log({"a": 2.0})
    assert on_disk(run).overview().state == "running"  # a late row brings it back


def test_an_attempt_on_another_machine_that_was_followed_by_another_has_ended(
    tmp_path: Path, start: Start, tracking: TrackingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_killed(tmp_path)
    start().finish()
    _as_if_elsewhere(monkeypatch)
    states = [state.state for _, state in tracking.find("miner-1").detail().attempts]
    assert states == ["crashed", "finished"]


def test_a_new_hostname_is_still_the_same_machine(
    tmp_path: Path, tracking: TrackingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DHCP may rename a machine between the kill and the look."""
    run_killed(tmp_path)
    renamed = msgspec.structs.replace(folder_module.this_host(), hostname="renamed")
    monkeypatch.setattr(folder_module, "this_host", lambda: renamed)
    assert tracking.find("miner-1").overview().state == "crashed"


def test_a_process_of_which_the_start_is_not_known_is_not_said_to_be_dead(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number alone tells nothing: only its silence does, or a later attempt."""
    run = start(stale_after_seconds=60)
    attempts = on_disk(run).attempts
    unknown = ("process_created_at", "process_start_ticks")
    attempts[0].facts = {name: value for name, value in attempts[0].facts.items() if name not in unknown}
    assert attempts[0].state(None).state == "running"
    in_an_hour = time.time_ns() + 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: in_an_hour)
    assert attempts[0].state(None).state == "stale"
    attempts[0].is_last = False
    assert attempts[0].state(None).state == "crashed"


# ---------------------------------------------------------------------------------------------------
# Overview and detail


def test_the_overview_tells_who_and_where(start: Start) -> None:
    with start(tags=["eu"], group="night", job_type="training", notes="n", environment="dev") as run:
        run.log({"a": 1.0}, step=9)
    with start(version="0.10.0") as run:
        run.tags += ("late",)
    with start(version="0.9.0", name="renamed"):
        pass
    overview = on_disk(run).overview()
    assert (overview.project, overview.run, overview.name) == ("p", run.id, "renamed")
    assert (overview.role, overview.uid, overview.environment) == ("miner", "1", "prod")
    assert (overview.version, overview.versions) == ("0.9.0", ("0.1.0", "0.9.0", "0.10.0"))
    assert (overview.attempts, overview.step, overview.tags) == (3, 10, ("eu", "late"))
    assert overview.notes == "n"


def test_the_overview_of_a_run_whose_segments_are_lost_comes_from_the_file_beside(start: Start) -> None:
    run = start(environment="dev")
    run.finish()
    for path in segment_paths(run.folder / run.attempt):
        path.write_bytes(b"\0" * 100)
    overview = on_disk(run).overview()
    assert (overview.version, overview.environment) == ("0.1.0", "dev")
    (run.folder / run.attempt / "metadata.json").unlink()
    overview = on_disk(run).overview()
    assert (overview.version, overview.role, overview.uid, overview.environment) == (
        *("unknown", "miner", "1", "dev"),
    )
    (run.folder / "run.json").unlink()
    assert on_disk(run).overview().environment == "prod"


def test_what_a_removed_segment_said_is_known_from_the_files_beside(start: Start) -> None:
    """With `keep_bytes` the beginning of a long attempt goes; process, config and summary stay."""
    run = start(config={"lr": 0.1, "version": 3}, segment_bytes=4096)
    run.summary["best"] = 7
    for step in range(500):
        run.log({"a": 1.0}, step=step)
    run.finish()
    before = on_disk(run).attempts[0]
    facts, step = before.facts, before.starting_step
    first, *others = segment_paths(run.folder / run.attempt)
    assert others
    first.unlink()
    detail = on_disk(run).detail()
    [(attempt, _)] = detail.attempts
    assert attempt.facts == facts
    assert [config for _, _, config in detail.config_history] == [{"lr": 0.1, "version": 3}]
    assert detail.summary["best"] == 7
    assert (step, attempt.starting_step) == (0, None)
    (run.folder / run.attempt / "metadata.json").unlink()
    assert on_disk(run).attempts[0].version == "0.1.0", "the headers say that much"


def test_a_segment_that_is_removed_while_it_is_read_is_no_damage(start: Start) -> None:
    run = start()
    run.finish()
    damage = Damage()
    assert list(folder_module.segment_records(run.folder / run.attempt / "segment-000009.ntj", damage)) == []
    assert damage.problems == []


def test_the_newest_values_are_kept_by_attempt_and_context(start: Start) -> None:
    with start() as first:
        first.log({"a": 1.0, "b": 1.0}, step=0)
        first.log({"a": 2.0}, step=1)
        first.bind(stage="eval").log({"a": 3.0}, step=1)
    with start(version="0.2.0") as second:
        second.log({"a": 4.0}, step=1)
    detail = on_disk(second).detail()
    assert detail.last_by_attempt == {
        first.attempt: {Series("b"): 1.0, Series("a"): 2.0, Series("a", (("stage", "eval"),)): 3.0},
        second.attempt: {Series("a"): 4.0},
    }
    assert detail.last_by_version == {"0.1.0": {"b": 1.0, "a": 3.0}, "0.2.0": {"a": 4.0}}
    assert detail.summary == {"b": 1.0, "a": 4.0}
    assert detail.rows == 4


def test_the_summary_is_the_same_as_the_one_of_the_process_that_logged(start: Start) -> None:
    with start() as run:
        run.define_metric("val/*", summary="min")
        run.define_metric("hidden", summary="none")
        for value in (3.0, 1.0, 2.0):
            run.log({"val/loss": value, "a": value, "hidden": value})
        run.bind(stage="eval").log({"a": 7.0})
        run.summary.update(mine="text", gone=1)
        del run.summary["gone"]
        run.summary["a"] = 99
        del run.summary["a"]
        expected = dict(run.summary)
    assert on_disk(run).detail().summary == expected == {"val/loss": 1.0, "a": 7.0, "mine": "text"}


def test_values_that_are_not_finite_are_counted_by_metric(start: Start) -> None:
    with start() as run:
        run.log({"loss": math.nan, "a": 1.0})
        run.log({"loss": math.inf, "a": -math.inf})
        run.log({"loss": 1.7e308, "a": 1.7e308})  # finite, though their sum is not
        run.log({"loss": math.nan, "h": nodetrack.Histogram([1.0])})
    assert on_disk(run).detail().nonfinite == {"loss": 3, "a": 1}


def test_an_attempt_knows_the_step_that_it_began_at(start: Start) -> None:
    with start() as run:
        run.log({"a": 1.0}, step=41)
    with start() as run:
        pass
    assert [attempt.starting_step for attempt in on_disk(run).attempts] == [0, 42]


def test_an_attempt_that_goes_back_before_it_logs_began_at_the_step_behind_that(start: Start) -> None:
    with start() as run:
        for step in range(100):
            run.log({"a": 1.0}, step=step)
    with start() as run:
        run.rewind(90)
        run.rewind(79)
        run.log({"a": 2.0}, step=80)
        run.rewind(70)
    assert [attempt.starting_step for attempt in on_disk(run).attempts] == [0, 80]


def test_a_file_that_is_no_segment_is_named_as_damage(start: Start) -> None:
    with start() as run:
        run.log({"a": 1.0})
    (run.folder / run.attempt / "segment-000002.ntj").write_bytes(b"this is no segment")
    damage = Damage()
    (attempt,) = on_disk(run).attempts
    assert sum(isinstance(record, Row) for record in attempt.records(damage)) == 1
    assert len(damage.problems) == 1
    assert "segment-000002.ntj is not a nodetrack journal segment" in damage.problems[0]


def test_a_mark_is_none_of_what_a_run_logged(start: Start) -> None:
    with start() as run:
        run.log({"a": 1.0})
        run._attempt.state.mark()
        run.log({"a": 2.0})
    detail = on_disk(run).detail()
    assert (detail.rows, detail.summary, detail.damage) == (2, {"a": 2.0}, Damage())


def test_reading_changes_nothing_on_disk(start: Start, tracking: TrackingFolder, tmp_path: Path) -> None:
    with start() as run:
        run.log({"a": 1.0})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    tracking.find("miner-1").detail()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_copy_of_the_folder_reads_the_same(
    start: Start, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with start() as run:
        run.log({"a": 1.0}, step=3)
    copy = tmp_path_factory.mktemp("copy") / "journals"
    shutil.copytree(tmp_path, copy)
    (copied,) = TrackingFolder(copy).runs()
    assert copied.detail().last_by_attempt == on_disk(run).detail().last_by_attempt
    assert isinstance(copied.attempts[0], AttemptFolder)


def test_a_process_that_went_on_as_another_attempt_has_ended_the_first(start: Start) -> None:
    """`os.execv` keeps pid and start time, so the process of the first attempt looks alive."""
    first = start()
    facts = on_disk(first).attempts[0].facts
    first.finish()
    run = start()
    attempts = on_disk(run).attempts
    attempts[0].facts = facts
    assert [attempt.state(None).state for attempt in attempts] == ["crashed", "running"]
