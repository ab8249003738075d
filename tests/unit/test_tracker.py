"""Which run `init` takes up, under which version, and what it writes down about itself."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

import nodetrack
from nodetrack.errors import (
    IdentityInUseError,
    NoActiveRunError,
    RunExistsError,
    RunNotFoundError,
    SettingsError,
    UnknownBackendError,
    UsageError,
)
from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.views import all_rows, current_rows
from nodetrack.live_run import Run
from nodetrack.run_summary import differences

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts attempts of one node in one folder."""

    def start(**arguments: object) -> Run:
        settings: dict[str, object] = {
            "project": "p",
            "role": "miner",
            "uid": 7,
            "dir": tmp_path,
            "version": "1.0",
        }
        return nodetrack.init(**{**settings, **arguments})  # type: ignore[arg-type]

    return start


def script(folder: Path, body: str, **environment: str) -> subprocess.Popen[str]:
    """A node in a process of its own, in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def runs_in(folder: Path) -> list[RunFolder]:
    return TrackingFolder(folder / ".nodetrack").runs()


# -- one node, one history -------------------------------------------------------------------------------


@pytest.mark.case("C004")
def test_a_restarted_node_goes_on_with_its_run(start: Start) -> None:
    first = start()
    first.log({"a": 1.0}, step=10)
    first.finish()
    second = start()
    assert (second.id, second.step, second.starting_step, second.resumed) == (first.id, 11, 11, True)
    assert second.attempt != first.attempt


@pytest.mark.case("C004")
def test_a_checkpoint_brings_the_run_back_where_the_id_file_is_lost(start: Start, tmp_path: Path) -> None:
    first = start()
    for _ in range(5):
        first.log({"a": 1.0})
    checkpoint = json.loads(json.dumps(first.state_dict()))
    first.finish()
    shutil.rmtree(tmp_path / "p" / "ids")
    second = start()
    assert second.id != first.id
    second.load_state_dict(checkpoint)
    second.log({"a": 2.0})
    assert (second.id, second.step) == (first.id, 6)
    second.finish()
    assert start().id == first.id, "the id file names it again"
    assert [run.id for run in TrackingFolder(tmp_path).runs()] == [first.id], "the unused run is gone"


def test_a_checkpoint_of_an_earlier_step_supersedes_what_came_after(start: Start) -> None:
    """Back at step 50 of a run that reached 75: one value a step, and nothing deleted."""
    first = start()
    for step in range(50):
        first.log({"a": 1.0}, step=step)
    checkpoint = first.state_dict()
    for step in range(50, 75):
        first.log({"a": 1.0}, step=step)
    first.finish()
    second = start()
    second.load_state_dict(checkpoint)
    assert second.step == 50
    second.log({"a": 2.0}, step=50)
    folder = RunFolder(second.folder, "p")
    assert [row.step for row in current_rows(folder)] == list(range(51))
    assert len(list(all_rows(folder))) == 76


def test_a_checkpoint_without_a_run_id_is_warned_of(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    run = start()
    before = run.id
    run.load_state_dict({"epoch": 3})
    assert run.id == before
    assert "no run id" in caplog.text


def test_a_checkpoint_of_another_project_is_refused(start: Start) -> None:
    run = start()
    with pytest.raises(UsageError, match="project 'other'"):
        run.load_state_dict({**run.state_dict(), "project": "other"})


@pytest.mark.case("C006")
def test_a_copied_id_file_is_not_taken_for_ones_own(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start()
    first.log({"a": 1.0}, step=0)
    first.finish()
    other = tmp_path / "other"
    (other / "p" / "ids").mkdir(parents=True)
    shutil.copy(tmp_path / "p" / "ids" / "miner-7.json", other / "p" / "ids" / "miner-8.json")
    second = start(uid=8, dir=other)
    second.log({"a": 2.0}, step=0)
    assert second.id != first.id
    assert "belongs to" in caplog.text
    assert [row.values for row in all_rows(RunFolder(first.folder, "p"))] == [{"a": 1.0}]


def test_a_second_process_of_one_node_is_told_who_the_first_is(start: Start, tmp_path: Path) -> None:
    run = start()
    body = """
        import nodetrack, sys
        try:
            nodetrack.init(project="p", role="miner", uid=7, dir=sys.argv[1] if len(sys.argv) > 1 else ".")
        except nodetrack.errors.IdentityInUseError as error:
            print(error.pid, error.host, error, sep="|")
    """
    with script(tmp_path, body.replace("sys.argv[1] if len(sys.argv) > 1 else ", "")) as process:
        output, errors = process.communicate()
    pid, _, message = output.split("|")
    assert int(pid) == os.getpid(), errors
    assert f"process {os.getpid()}" in message
    assert "on_conflict" in message
    run.finish()


def test_a_second_process_may_log_to_a_run_of_its_own(start: Start, tmp_path: Path) -> None:
    run = start()
    arguments = 'project="p", role="miner", uid=7, dir=".", on_conflict="new"'
    body = f"import nodetrack; print(nodetrack.init({arguments}).id)"
    with script(tmp_path, body) as process:
        output, errors = process.communicate()
    assert output.strip() not in ("", run.id), errors
    run.finish()
    assert start().id == run.id, "the node's own run is not touched"


def test_init_twice_in_one_process_is_one_run(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    run = start()
    assert start() is run
    assert "open in this process" in caplog.text
    other = start(uid=8)
    assert other.id != run.id


def test_resume_must_and_never(start: Start) -> None:
    with pytest.raises(RunNotFoundError):
        start(resume="must")
    first = start(id="chosen1")
    first.log({"a": 1.0})
    first.finish()
    with pytest.raises(RunExistsError):
        start(id="chosen1", resume="never")
    second = start(resume="never")
    assert second.id != first.id
    assert second.previous_run == first.id
    second.finish()
    assert start(id="chosen1", resume="must").id == "chosen1"


def test_a_run_that_was_deleted_is_replaced_and_linked(start: Start) -> None:
    first, bystander = start(), start(uid=8)
    first.finish()
    bystander.finish()
    shutil.rmtree(first.folder)
    second = start()
    assert second.id != first.id
    assert second.previous_run == first.id


# -- config ---------------------------------------------------------------------------------------------


@pytest.mark.case("C007")
def test_a_changed_config_is_a_version_and_never_an_error(start: Start) -> None:
    start(config={"lr": 1e-3, "layers": {"n": 2}}).finish()
    run = start(config={"lr": 1e-4, "layers": {"n": 2}})
    run.config.update({"late": 1})
    run.config["late"] = 2
    history = [config for _, _, config in RunFolder(run.folder, "p").detail().config_history]
    assert len(history) == 4
    assert differences(history[0], history[1]) == {"lr": [0.001, 0.0001]}
    assert history[-1] == {"lr": 1e-4, "layers": {"n": 2}, "late": 2}


class Model(BaseModel):
    lr: float = 0.1
    name: str = "m"


@pytest.mark.parametrize(
    "config",
    [
        {"lr": 0.1, "name": "m"},
        argparse.Namespace(lr=0.1, name="m"),
        SimpleNamespace(lr=0.1, name="m"),
        Model(),
        nodetrack.create_namespace({"lr": 0.1, "name": "m"}),
    ],
)
def test_a_config_may_be_any_kind_of_namespace(start: Start, config: object) -> None:
    run = start(config=config)
    assert (run.config["lr"], run.config.name) == (0.1, "m")
    assert json.loads((Path(run.dir) / "config.json").read_text()) == {"lr": 0.1, "name": "m"}


@pytest.mark.case("C065")
def test_no_secret_reaches_the_disk(start: Start, tmp_path: Path) -> None:
    config = {
        "api_key": "hidden-1",
        "url": "https://u:hidden-2@h/x",
        "num_tokens": 5,
        "use_cls_token": True,
        "wallet": {"hotkey_seed": "hidden-3"},
        "pin": "hidden-4",
    }
    run = start(config=config, redact=["pin"])
    run.config.update({"password": "hidden-5"})
    run.finish()
    assert run.config["api_key"] == "hidden-1", "the process itself reads back what it set"
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"hidden-" not in path.read_bytes(), path
    kept = RunFolder(run.folder, "p").detail().config_history[-1][2]
    assert (kept["num_tokens"], kept["use_cls_token"]) == (5, True)


# -- version ---------------------------------------------------------------------------------------------


@pytest.mark.case("C063")
def test_rows_carry_the_version_that_the_process_started_with(tmp_path: Path) -> None:
    (tmp_path / "mynode.py").write_text('__version__ = "1.0"\n')
    body = """
        import nodetrack, pathlib, sys
        sys.path.insert(0, ".")
        import mynode
        run = nodetrack.init(project="p", package="mynode")
        pathlib.Path("mynode.py").write_text('__version__ = "1.1"\\n')
        run.log({"a": 1.0})
    """
    for _ in range(2):
        with script(tmp_path, body) as process:
            _, errors = process.communicate()
        assert process.returncode == 0, errors
    [run] = runs_in(tmp_path)
    assert [row.version for row in all_rows(run)] == ["1.0", "1.1"]


def test_the_version_can_be_given_by_the_environment(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODETRACK_VERSION", "v9.9")
    assert start(version=None).version == "9.9"


# -- ranks, modes, backends --------------------------------------------------------------------------------


@pytest.mark.case("C040")
@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK"])
def test_only_the_main_rank_logs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "3")
    quiet = start()
    use_everything(quiet)
    assert quiet.disabled
    assert not list(tmp_path.rglob("*.ntj"))
    monkeypatch.setenv(variable, "0")
    assert not start().disabled


@pytest.mark.case("C040")
def test_eight_processes_are_one_run_or_eight_in_a_group(tmp_path: Path) -> None:
    body = 'import nodetrack; nodetrack.init(project="p", uid=4).log({"a": 1.0})'
    for ranks, count in (("main", 1), ("all", 8)):
        folder = tmp_path / ranks
        folder.mkdir()
        nodes = [script(folder, body, RANK=str(rank), NODETRACK_RANKS=ranks) for rank in range(8)]
        for node in nodes:
            _, errors = node.communicate()
            assert node.returncode == 0, errors
        runs = [run.overview() for run in runs_in(folder)]
        assert len(runs) == count
        if ranks == "all":
            assert {run.group for run in runs} == {"trainer-4"}


def use_everything(run: Run) -> None:
    """Call every public method and read every public attribute."""
    run.log({"a": 1.0})
    run.log({"a": float("nan"), "b": "x"}, 3, context={"stage": "train"}, commit=False)
    run.bind(stage="x").log({"a": 1.0}, step=2)
    run.define_metric("a", summary="max")
    run.alert("title", "text")
    run.rewind(1)
    run.flush()
    run.summary["x"] = 1
    run.config.update({"y": 2})
    run.tags = ("t",)
    run.notes = "n"
    run.name = "other"
    run.load_state_dict(run.state_dict())
    run.health()
    for name in (name for name in dir(type(run)) if not name.startswith("_")):
        getattr(run, name)
    assert run.id is not None
    with run:
        pass
    run.finish()
    with pytest.raises(UsageError):
        run.log({"a": 1.0})


@pytest.mark.case("C073")
@pytest.mark.parametrize(
    "arguments", [{"backends": []}, {"mode": "disabled"}, {"mode": "offline"}, {"rank": 1}]
)
def test_every_method_works_in_every_mode(start: Start, arguments: dict[str, object]) -> None:
    use_everything(start(**arguments))


@pytest.mark.case("C073")
def test_a_process_that_dies_before_its_first_row_leaves_no_row(start: Start, tmp_path: Path) -> None:
    run = start()
    run.finish()
    assert RunFolder(run.folder, "p").detail().rows == 0


@pytest.mark.case("C028")
def test_nothing_is_ever_asked_for(tmp_path: Path) -> None:
    with script(tmp_path, 'import nodetrack; nodetrack.init().log({"a": 1.0}); print("done")') as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout is not None
        assert process.stdout.read() == "done\n"
    assert process.returncode == 0


def test_backends_come_from_argument_or_settings_and_the_environment_wins(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(start(backends="log,null").health().backends) == {"log", "null"}
    monkeypatch.setenv("NODETRACK_BACKENDS", "null")
    assert set(start(uid=1, backends=["log"]).health().backends) == {"null"}
    monkeypatch.setenv("NODETRACK_BACKENDS", "none")
    assert start(uid=2, backends=["log"]).health().backends == {}
    monkeypatch.setenv("NODETRACK_BACKENDS", '[{"kind": "log", "level": "DEBUG"}]')
    assert set(start(uid=3).health().backends) == {"log"}


def test_a_wrong_backend_fails_at_the_start_and_names_what_there_is(start: Start) -> None:
    with pytest.raises(UnknownBackendError, match=r"'lgo'; known backends: .*log, .*null"):
        start(backends=["lgo"])
    with pytest.raises(SettingsError, match="'log' cannot take level='LOUD'"):
        start(backends=[{"kind": "log", "level": "LOUD"}])
    with pytest.raises(SettingsError, match="named twice"):
        start(backends=["log", "log"])


def test_a_failed_start_leaves_the_node_free(start: Start) -> None:
    with pytest.raises(UnknownBackendError):
        start(backends=["nonsense"])
    assert start().id


# -- moving over from wandb --------------------------------------------------------------------------------


def test_the_module_level_surface_speaks_to_the_active_run(tmp_path: Path) -> None:
    from nodetrack import config, finish, init, log, summary

    assert nodetrack.run is None
    for use in (lambda: log({"a": 1}), lambda: summary["a"], lambda: config.update({"a": 1})):
        with pytest.raises(NoActiveRunError, match=r"call nodetrack\.init"):
            use()
    run = init(
        project="p",
        dir=tmp_path,
        config={"lr": 0.1},
        name="n",
        tags=["t"],
        group="g",
        job_type="j",
        notes="x",
    )
    assert nodetrack.run is run
    log({"a": 1.0}, 4)
    summary["best"] = 2
    config.extra = 5
    assert (config.lr, dict(summary), run.config["extra"]) == (0.1, {"a": 1.0, "best": 2}, 5)
    assert (run.name, run.tags, run.group, run.job_type, run.notes) == ("n", ("t",), "g", "j", "x")
    finish()
    assert nodetrack.run is None
    finish()


def test_arguments_that_only_wandb_has_are_ignored_with_a_word(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start(reinit=True, save_code=False, resume=True)
    assert "reinit, save_code" in caplog.text


def test_a_mistyped_argument_is_an_error_with_a_hint(start: Start) -> None:
    with pytest.raises(SettingsError, match="did you mean 'segment_bytes'"):
        start(segment_byte=5)


def test_labels_survive_a_restart_and_tags_are_a_union(start: Start) -> None:
    first = start(tags=["a"], notes="why", name="mine", group="g")
    first.tags += ("b",)
    first.finish()
    second = start(tags=["c"])
    assert (second.name, second.tags, second.notes, second.group) == ("mine", ("a", "b", "c"), "why", "g")


def test_a_name_can_be_made_of_config_fields(start: Start) -> None:
    run = start(config={"lr": 0.1, "model": {"depth": 3}}, name_fields=["lr", "model.depth", "absent"])
    assert run.name == "lr=0.1-model.depth=3"
    assert start(uid=9).name == "miner-9"


def test_the_summary_that_was_set_by_hand_survives_a_restart(start: Start) -> None:
    first = start()
    first.summary["best"] = 0.25
    first.finish()
    assert start().summary["best"] == 0.25


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.case("C012")
def test_a_file_that_exists_is_never_cut(start: Start, tmp_path: Path) -> None:
    first = start()
    first.log({"a": 1.0}, step=0)
    first.finish()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.ntj")}
    second = start()
    second.log({"a": 1.0, "b": 2.0}, step=1)
    second.finish()
    for path, content in before.items():
        assert path.read_bytes() == content
    rows = list(all_rows(RunFolder(second.folder, "p")))
    assert [row.values for row in rows] == [{"a": 1.0}, {"a": 1.0, "b": 2.0}]


def test_project_and_uid_may_be_any_text(start: Start, tmp_path: Path) -> None:
    run = start(project="../a b/ü", uid="x/../y", role="r-s")
    run.log({"a": 1.0})
    assert tmp_path in run.folder.parents
    assert TrackingFolder(tmp_path).projects() == ["../a b/ü"]
    assert TrackingFolder(tmp_path).find("r-s-x/../y").id == run.id


def test_identity_is_written_once(start: Start) -> None:
    first = start()
    content = (first.folder / "run.json").read_bytes()
    first.finish()
    second = start(environment="dev", version="2.0")
    assert (second.folder / "run.json").read_bytes() == content


def test_a_folder_that_cannot_be_written_stops_nothing(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The suite runs as root, to whom a read-only folder is writable; a file in the folder's place is not."""
    (tmp_path / "blocked").write_text("")
    with caplog.at_level(logging.WARNING):
        run = start(dir=tmp_path / "blocked")
        for step in range(10):
            run.log({"a": 1.0}, step=step)
    health = run.health()
    assert (health.state, health.logged, health.written) == ("degraded", 10, 0)
    assert health.pending >= 10
    run.finish()
    assert run.health().lost >= 10
    assert "could not be kept" in caplog.text


def test_a_taken_identity_is_an_error_of_its_own_kind() -> None:
    error = IdentityInUseError("p/miner-7", 42, "host-a")
    assert (error.pid, error.host) == (42, "host-a")


def test_sigkill_and_restart_appear_as_two_attempts(tmp_path: Path) -> None:
    body = """
        import nodetrack, time
        run = nodetrack.init(project="p", version="1.0")
        for _ in range(5):
            run.log({"a": 1.0})
        print(run.id, run.step, flush=True)
        time.sleep(60)
    """
    seen = []
    for _ in range(2):
        with script(tmp_path, body) as process:
            assert process.stdout is not None
            seen.append(process.stdout.readline().split())
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert seen[0][0] == seen[1][0]
    assert [int(step) for _, step in seen] == [5, 10]
    detail = runs_in(tmp_path)[0].detail()
    assert [state.state for _, state in detail.attempts] == ["crashed", "crashed"]
    assert "killed" in detail.attempts[0][1].reason
    assert detail.rows == 10


def test_a_copied_folder_is_noticed_and_a_moved_one_is_not(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(dir=tmp_path / "here")
    first.finish()
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    second = start(dir=tmp_path / "copy")
    second.finish()
    assert second.id == first.id
    assert "seems to be a copy" in caplog.text
    caplog.clear()
    shutil.move(tmp_path / "here", tmp_path / "moved")
    assert start(dir=tmp_path / "moved").id == first.id
    assert "copy" not in caplog.text


def test_a_fault_of_ours_at_the_end_does_not_look_like_one_of_training(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.log({"a": 1.0})

    def broken(_deadline: float) -> None:
        raise NameError("x")

    monkeypatch.setattr(run._attempt, "_close_once", broken)
    run.finish()
    assert "could not be finished (NameError: x)" in caplog.text


def test_threads_that_log_while_a_checkpoint_moves_the_run_lose_no_row(start: Start, tmp_path: Path) -> None:
    first = start(id="first")
    first.log({"a": 0.0}, step=0)
    checkpoint = first.state_dict()
    first.finish()
    second = start(resume="never")
    stop = threading.Event()
    counts = [0] * 4

    def work(number: int) -> None:
        while not stop.is_set():
            second.log({f"m/{number}": 1.0}, step=counts[number])
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    second.load_state_dict(checkpoint)
    time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    second.finish()
    assert second.health().lost == 0
    rows = sum(run.detail().rows for run in TrackingFolder(tmp_path).runs())
    assert rows == sum(counts) + 1


def test_a_folder_that_is_moved_under_a_running_node_is_told_and_loses_no_row(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(dir=tmp_path / "here")
    run.log({"a": 1.0}, step=0)
    run._attempt._tend()
    assert "moved away" not in caplog.text
    shutil.move(tmp_path / "here", tmp_path / "there")
    run.log({"a": 1.0}, step=1)
    run._attempt._tend()
    run._attempt._tend()
    run.finish()
    assert caplog.text.count("was moved away from") == 1
    [moved] = TrackingFolder(tmp_path / "there").runs()
    assert [row.step for row in all_rows(moved)] == [0, 1]
