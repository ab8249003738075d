"""The whole demo, small: real processes, a real kill, a real switch of versions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.servers.victoria_metrics import victoria_metrics

from nodetrack.demo.report import DemoReport
from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.views import all_rows, current_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TINY = [
    f"--set={override}"
    for override in (
        "inner_steps=40",
        "batch_size=8",
        "sequence_length=64",
        "hidden_size=32",
        "intermediate_size=64",
        "num_hidden_layers=1",
        "validator.eval_batches=2",
    )
]
COMMAND = [sys.executable, "-c", "from nodetrack.cli.main import app; app()", "demo", "--folder", "demo"]


def environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("NODETRACK_")}
    return {**ours, "PYTHONPATH": os.pathsep.join(sys.path)}


def start_demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *TINY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def nodes_of(demo: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(demo.pid).children(recursive=True)
    return [child for child in children if "nodetrack.demo.node" in child.cmdline()]


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoReport]:
    """One demo that all tests of its outcome read: its folder and its report."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    arguments = ["--folder", str(folder), "--windows", "8", "--json"]
    done = subprocess.run(
        [*COMMAND, *TINY, *arguments], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, msgspec.json.decode(done.stdout, type=DemoReport)


def runs_of(folder: Path) -> dict[str, RunFolder]:
    runs = [(run.overview(), run) for run in TrackingFolder(folder / ".nodetrack").runs()]
    return {f"{overview.role}-{overview.uid}": run for overview, run in runs}


def printed_steps(output: Path) -> set[int]:
    return {int(step) for step in re.findall(r"^step (\d+) ", output.read_text(), re.MULTILINE)}


def test_each_node_has_one_run_over_all_its_restarts(finished_demo: tuple[Path, object]) -> None:
    assert sorted(runs_of(finished_demo[0])) == ["miner-0", "miner-1", "validator-0"]


def test_the_killed_miner_is_back_before_the_versions_are_switched(
    finished_demo: tuple[Path, object],
) -> None:
    attempts = runs_of(finished_demo[0])["miner-1"].attempts
    assert [attempt.version for attempt in attempts] == ["0.1.0", "0.1.0", "0.1.1"]
    states = [attempt.state(attempt.finish_record()).state for attempt in attempts]
    assert states == ["crashed", "finished", "finished"]


def test_every_node_ran_both_versions(finished_demo: tuple[Path, object]) -> None:
    for run in runs_of(finished_demo[0]).values():
        assert run.overview().versions == ("0.1.0", "0.1.1")


def test_no_step_that_any_process_saw_logged_is_missing(finished_demo: tuple[Path, object]) -> None:
    """Each process prints a step after `log` has returned; its own attempt must hold it, killed or not."""
    folder, _ = finished_demo
    checked = 0
    for node, run in runs_of(folder).items():
        rows = list(all_rows(run))
        for start, attempt in enumerate(run.attempts, 1):
            journalled = {row.step for row in rows if row.attempt == attempt.id}
            printed = printed_steps(folder / "output" / f"{node}-start-{start}.log")
            assert printed <= journalled
            checked += len(printed)
    assert checked > 100


def test_the_validator_has_one_value_for_each_window(finished_demo: tuple[Path, object]) -> None:
    rows = current_rows(runs_of(finished_demo[0])["validator-0"])
    windows = [row.values["window"] for row in rows if "eval/loss" in row.values]
    assert windows == list(range(8))


def test_each_contribution_was_scored_under_its_miners_name(finished_demo: tuple[Path, object]) -> None:
    rows = current_rows(runs_of(finished_demo[0])["validator-0"])
    scored = [row.context["miner"] for row in rows if "score/loss_improvement" in row.values]
    gathered = [row.values["gather/contributions"] for row in rows if "eval/loss" in row.values]
    assert len(scored) == gathered.count(1) + 2 * gathered.count(2)
    assert set(scored) == {"miner-0", "miner-1"}


def test_the_report_tells_what_the_journals_hold(finished_demo: tuple[Path, DemoReport]) -> None:
    folder, report = finished_demo
    assert {run.run for run in report.runs} == {run.id for run in runs_of(folder).values()}
    [kill] = report.kills
    assert (kill.node, kill.missing_steps) == ("miner-1", ())
    assert kill.printed_steps > 0
    assert kill.back_at_step == runs_of(folder)["miner-1"].attempts[1].starting_step
    evaluation = next(line for line in report.metrics if line.metric == "eval/loss")
    assert set(evaluation.last) == {"0.1.0", "0.1.1"}


def test_the_backend_has_every_row_of_every_node(finished_demo: tuple[Path, DemoReport]) -> None:
    """Also what the killed process had logged: a recount says so, and TensorBoard's own reader."""
    folder, report = finished_demo
    assert {(line.node, line.account.backend) for line in report.delivery} == {
        (node, "tensorboard") for node in runs_of(folder)
    }
    assert all(line.account.is_complete for line in report.delivery)
    for node, run in runs_of(folder).items():
        for attempt in run.attempts:
            logged = {row.step for row in all_rows(run) if row.attempt == attempt.id}
            assert logged <= steps_in_tensorboard(
                folder / "tensorboard" / "demo" / f"{node}-{run.id}" / attempt.id
            )


def steps_in_tensorboard(folder: Path) -> set[int]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    [path] = folder.glob("*tfevents*")
    return {event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")}


def test_it_delivers_to_the_server_that_the_environment_names(tmp_path: Path) -> None:
    """A real VictoriaMetrics, beside TensorBoard."""
    with victoria_metrics(tmp_path / "server") as server:
        os.environ["INFLUXDB_URL"] = server.url
        demo = start_demo("--windows", "4", "--backends", "tensorboard,influxdb", "--json")
        output, errors = demo.communicate(timeout=200)
        assert demo.returncode == 0, errors
        report = msgspec.json.decode(output, type=DemoReport)
        series = server.export()
    assert len(report.delivery) == 6
    assert all(line.account.is_complete for line in report.delivery), errors
    for run in report.runs:
        values = [it for it in series if it.labels.get("run") == run.run]
        assert {it.labels["version"] for it in values} == set(run.versions)


def test_the_commands_that_it_ends_with_work_as_printed() -> None:
    """In a shell that does not know the program by its name, and for a folder that has to be quoted."""
    demo = start_demo("--windows", "4", "--folder", "my demo")
    output, errors = demo.communicate(timeout=120)
    assert demo.returncode == 0, errors
    commands = output.partition("Try next:\n")[2].splitlines()
    assert len(commands) == 4
    for command in commands:
        assert shell(command), command


def shell(command: str) -> str:
    bare = {**environment(), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, shell=True, env=bare, check=True, capture_output=True, text=True).stdout


def test_ctrl_c_stops_all_nodes_in_order() -> None:
    demo = start_demo("--windows", "400")
    wait_until(lambda: "step" in output_of("miner-0"), "miner-0 trains")
    nodes = nodes_of(demo)
    assert len(nodes) == 3
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "stopped" in errors
    assert not any(node.is_running() for node in nodes)
    states = {run.overview().state for run in runs_of(Path("demo")).values()}
    assert states == {"finished"}


def test_no_node_outlives_a_demo_that_is_killed() -> None:
    demo = start_demo("--windows", "400")
    wait_until(lambda: len(nodes_of(demo)) == 3, "all nodes are there")
    nodes = nodes_of(demo)
    demo.kill()
    demo.communicate()
    wait_until(lambda: not any(map(is_alive, nodes)), "all nodes have ended")


def test_a_failing_node_ends_the_demo_with_its_last_words() -> None:
    demo = start_demo("--set=betas=[2.0, 2.0]")
    _, errors = demo.communicate(timeout=90)
    assert demo.returncode == 1
    assert "Invalid beta parameter" in errors
    assert "ended with exit code 1" in errors


def output_of(node: str) -> str:
    path = Path("demo/output") / f"{node}-start-1.log"
    return path.read_text() if path.exists() else ""


def is_alive(node: psutil.Process) -> bool:
    return node.is_running() and node.status() != psutil.STATUS_ZOMBIE
