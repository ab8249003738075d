"""Nodes that log to TensorBoard through their delivery processes, read with TensorBoard's own reader."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

import nodetrack
from nodetrack.journal.folder import TrackingFolder
from nodetrack.journal.views import all_rows

ALL = dict.fromkeys(("scalars", "histograms", "images", "tensors", "compressedHistograms", "audio"), 0)
SECONDS = 60
#: What a node does that is started again and again: 50 steps from where it is told.
NODE = """
import sys, nodetrack
first, mode = int(sys.argv[1]), sys.argv[2]
run = nodetrack.init("p", role="miner", uid=1, version=f"0.{first // 40}.0", mode=mode, quiet=True,
                     backends=[{"kind": "tensorboard", "log_dir": "logs"}], config={"first": first})
for step in range(first, first + 50):
    run.log({"loss": 1 / (1 + step), "first": first}, step=step)
run.finish()
"""
#: Delivery as `nodetrack sync` does it, record by record, so that a kill meets it in the middle.
DELIVER = """
import sys
from pathlib import Path
from nodetrack.backends import _tensorboard_events
from nodetrack.backends.tensorboard import TensorboardBackend, TensorboardConfig
from nodetrack.delivery.engine import Delivery
backend = TensorboardBackend(TensorboardConfig(log_dir=Path("logs"), batch_rows=1))
delivery = Delivery(Path(sys.argv[1]), "p", {"tensorboard": backend}, follow=False)
print("ready", flush=True)
delivery.start()
sys.exit(not delivery.join(60))
"""


def node(first: int, mode: str = "online") -> None:
    """One attempt, in a process of its own."""
    command = [sys.executable, "-c", NODE, str(first), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def event_files(folder: Path = Path("logs")) -> list[Path]:
    """The files of rows; samples of the machine are apart."""
    return sorted(file for file in folder.rglob("*tfevents*") if file.parent.name != "system")


def shown(view: str, folder: Path = Path("logs")) -> Counter[tuple[str, str, int]]:
    """Attempt, tag and step of each scalar that the reader finds anywhere below the root."""
    reader = EventMultiplexer(size_guidance=ALL).AddRunsFromDirectory(str(folder)).Reload()
    return Counter(
        (Path(name).name, tag, event.step)
        for name, kinds in reader.Runs().items()
        for tag in kinds["scalars"]
        if tag.startswith(view)
        for event in reader.Scalars(name, tag)
    )


def logged(view: str) -> Counter[tuple[str, str, int]]:
    """The same of the journal."""
    [run] = TrackingFolder(Path(".nodetrack")).runs("p")
    return Counter(
        (row.attempt, f"{'latest' if view == 'latest' else f'v{row.version}'}/{name}", row.step)
        for row in all_rows(run)
        for name in row.values
    )


@pytest.mark.case("C056")
def test_three_attempts_are_three_folders_with_one_event_file_each_and_all_is_read_from_the_root() -> None:
    """The second and the third go back ten steps, under a new version."""
    for first in (0, 40, 80):
        node(first)
    files = event_files()
    assert len({file.parent for file in files}) == len(files) == 3
    for view in ("v", "latest"):
        assert shown(view) == logged(view)
    assert len(shown("v")) == 300


def test_a_node_that_is_killed_has_one_folder_named_after_it_and_its_session_ends() -> None:
    """Its delivery process writes how it ended, as the node would have."""
    code = NODE.replace("run.finish()", "import os; os.kill(os.getpid(), 9)")
    command = [sys.executable, "-c", code, "0", "online"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == -signal.SIGKILL, done.stderr
    [run] = TrackingFolder(Path(".nodetrack")).runs("p")
    [attempt] = run.attempts
    own, ended = Path("logs/p") / f"miner-1-{run.folder.name}" / attempt.folder.name, False
    end = time.monotonic() + SECONDS
    while not ended and time.monotonic() < end:
        time.sleep(0.1)
        if event_files():
            told = EventAccumulator(str(own)).Reload().PluginTagToContent("hparams")
            ended = "_hparams_/session_end_info" in told
    assert [file.parent for file in event_files()] == [own]
    assert ended


@pytest.mark.case("C032")
def test_offline_attempts_synced_in_any_order_each_twice_are_there_once() -> None:
    for first in (0, 40, 80, 120):
        node(first, "offline")
    for number in (3, 1, 4, 2):
        for _ in range(2):
            backends = '[{"kind": "tensorboard", "log_dir": "logs"}]'
            sync = ["sync", "miner-1", "--attempt", str(number), "--backends", backends]
            done = subprocess.run(
                [sys.executable, "-m", "nodetrack", *sync],
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
            assert done.returncode == 0, done.stderr
    assert len(event_files()) == 4
    assert shown("v") == logged("v")


@pytest.mark.slow
def test_a_delivery_that_is_killed_at_any_moment_leaves_each_row_once() -> None:
    """The acknowledged length cuts off what was written and not acknowledged."""
    for first in (0, 40, 80, 120):
        node(first, "offline")
    [run] = TrackingFolder(Path(".nodetrack")).runs("p")
    moments, code = random.Random(5), -signal.SIGKILL
    while code != 0:
        process = subprocess.Popen(
            [sys.executable, "-c", DELIVER, str(run.folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout, contextlib.suppress(subprocess.TimeoutExpired):
            process.stdout.readline()
            process.wait(moments.uniform(0.05, 0.3))
        process.kill()
        code = process.wait()
    assert shown("v") == logged("v")
    assert len(event_files()) == 4


@pytest.fixture
def web() -> Iterator[Callable[..., Any]]:
    """Asks TensorBoard's own web server, which reads `logs` with a program of its own, not in Python."""
    where = ["--logdir", "logs", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *where], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    address = next(found[0] for line in process.stderr if (found := re.search(r"http://[^ ]+/", line)))
    # What it says from now on is read, so that it never waits for us.
    reader = threading.Thread(target=process.stderr.read)
    reader.start()

    def ask(path: str, body: object = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{address}data/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)

    yield ask
    process.terminate()
    process.wait(SECONDS)
    reader.join()
    process.stderr.close()


@pytest.mark.slow
def test_the_web_page_shows_the_attempts_and_compares_their_hyper_parameters(
    request: pytest.FixtureRequest,
) -> None:
    for first in (0, 40):
        node(first)
    ask = request.getfixturevalue("web")
    wanted = {"allowedStatuses": ["STATUS_SUCCESS"], "colParams": [], "startIndex": 0, "sliceSize": 10}
    groups: list[Any] = []
    end = time.monotonic() + SECONDS
    while len(groups) < 2 and time.monotonic() < end:  # it reads at its own pace, ends of attempts last
        time.sleep(0.1)
        groups = ask("plugin/hparams/session_groups", {"experimentName": "", **wanted}).get(
            "sessionGroups", []
        )
    [first, second] = sorted(name for name in ask("runs") if not name.endswith("system"))
    points = ask(f"plugin/scalars/scalars?tag=latest/loss&run={urllib.parse.quote(second)}")
    assert [step for _, step, _ in points] == list(range(40, 90))
    assert points[0][2] == pytest.approx(1 / 41)
    assert sorted((group["hparams"]["version"], group["hparams"]["first"]) for group in groups) == [
        ("0.0.0", 0.0),
        ("0.1.0", 40.0),
    ]
    [text] = ask(f"plugin/text/text?tag=run/config&run={urllib.parse.quote(first)}")
    assert '"first": 0' in text["text"]


def start(log_dir: Path) -> nodetrack.Run:
    return nodetrack.init(
        "p",
        role="miner",
        uid=1,
        version="0.1.0",
        quiet=True,
        backends=[{"kind": "tensorboard", "log_dir": str(log_dir), "batch_seconds": 0.05}],
    )


def wait_until(run: nodetrack.Run, state: str, delivered: int = 0) -> None:
    """Until health says so of the backend."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        health = run.health().backends["tensorboard"]
        if health.state == state and health.delivered >= delivered:
            return
        time.sleep(0.05)
    raise AssertionError(f"never {state} with {delivered} rows: {run.health().backends}")


@pytest.mark.case("C025")
def test_a_folder_that_is_deleted_under_a_running_node_is_made_again() -> None:
    """Training goes on; what is logged from then on is in a new file."""
    logs = Path("logs").absolute()
    run = start(logs)
    for step in range(10):
        run.log({"loss": step}, step=step)
    wait_until(run, "ok", delivered=10)
    shutil.rmtree(logs)
    for step in range(10, 20):
        run.log({"loss": step}, step=step)
    run.finish()
    assert sorted(step for _, _, step in shown("latest/loss")) == list(range(10, 20))
    assert run.health().logged == 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kilobytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.case("C025")
def test_a_full_disk_of_tensorboard_is_waited_out_and_training_does_not_notice(small_disk: Path) -> None:
    """The journal is elsewhere. Once there is room again, each row is there once."""
    run = start(small_disk / "logs")
    run.log({"loss": 0.0}, step=0)
    wait_until(run, "ok", delivered=1)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    for step in range(1, 1_000):
        run.log({"loss": float(step)}, step=step)
    wait_until(run, "down")
    assert os.strerror(28) in run.health().backends["tensorboard"].last_error
    ballast.unlink()
    run.finish()
    assert shown("v", small_disk / "logs") == logged("v")
    health = run.health()
    assert (health.logged, health.lost, health.backends["tensorboard"].delivered) == (1_000, 0, 1_000)
