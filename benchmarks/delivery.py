"""What delivery costs the trainer, and how fast an outage is caught up: `python -m benchmarks.delivery`.

InfluxDB's protocol is spoken to a real VictoriaMetrics on this machine, which has to be installed for it
(Debian: `apt install victoria-metrics`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.processes import measure
from benchmarks.report import Topic, target

_ROUNDS: Final = 5
_CATCH_UP_ROUNDS: Final = 3
_INIT_SECONDS: Final = 5.0
_FINISH_SECONDS: Final = 3.0
_FINISH_SLACK_SECONDS: Final = 0.5
_JOURNAL_ONLY: Final = "nodetrack"
_DELIVERED: Final = "nodetrack_delivered"


def topics(console: Console) -> list[Topic]:
    """The trainer's cost, the way through an outage, and the two calls that may wait."""
    with _server() as url, _environment("INFLUXDB_URL", url):
        return [_cost_topic(console), _catch_up_topic(console), _bounds_topic(console)]


def _cost_topic(console: Console) -> Topic:
    """`log` with and without backends, by turns."""
    cost: dict[tuple[str, str], list[float]] = {}
    for number in range(_ROUNDS):
        for name in (_JOURNAL_ONLY, _DELIVERED):
            console.print(f"delivery: log call, round {number + 1} of {_ROUNDS}", style="dim")
            for cell, samples in measure("benchmarks.measure_log_call", name).items():
                cost.setdefault((name, cell), []).append(
                    statistics.median(samples["peer"]) / statistics.median(samples["yardstick"])
                )
    topic = Topic(
        "What delivery to three backends costs the calling thread",
        "The p50 of `log` of 10 floats over the yardstick of the same process, without backends and with "
        "`tensorboard`, `influxdb` (a VictoriaMetrics on this machine) and `wandb` (offline), by turns. "
        f"Medians of {_ROUNDS} rounds. The delivery process has the two cores with the trainer.",
        ("pace", "journal only ×", "three backends ×", "ratio", "target"),
    )
    for cell, shown in (("paced/10", "one call every 5 ms"), ("full speed/10", "full speed")):
        alone, delivered = (statistics.median(cost[name, cell]) for name in (_JOURNAL_ONLY, _DELIVERED))
        ratio = delivered / alone
        topic.add(shown, f"{alone:.2f}", f"{delivered:.2f}", f"{ratio:.2f}", target(round(ratio, 2), 1.1))
    return topic


def _catch_up_topic(console: Console) -> Topic:
    topic = Topic(
        "Catching up on one million points",
        "100 000 rows of 10 floats in a journal, sent in a process of its own by the engine of the delivery "
        "process and of `nodetrack sync`: points a second, and the most memory that the process had. `null` "
        f"takes everything and keeps nothing. Medians of {_CATCH_UP_ROUNDS} rounds.",
        ("backend", "points/s", "memory MB", "batches"),
    )
    for name in ("null", "influxdb", "tensorboard"):
        rounds = []
        for number in range(_CATCH_UP_ROUNDS):
            console.print(f"delivery: {name}, round {number + 1} of {_CATCH_UP_ROUNDS}", style="dim")
            rounds.append(measure("benchmarks.measure_catch_up", name))
        speed = statistics.median(each["points_per_second"] for each in rounds)
        memory = statistics.median(each["memory_mb"] for each in rounds)
        topic.add(
            name, f"{round(speed, -3):,.0f}".replace(",", " "), f"{memory:.0f}", str(rounds[0]["batches"])
        )
    return topic


def _bounds_topic(console: Console) -> Topic:
    topic = Topic(
        "The two calls that may wait for a network",
        "Seconds that `init` and `finish` take with `influxdb` at a server that takes the connection and "
        "never answers, and at one that is not there. `finish_timeout` is "
        f"{_FINISH_SECONDS:g} s here; 1000 rows wait. The worst of {_CATCH_UP_ROUNDS} rounds.",
        ("server", "init s", "finish s", "target"),
    )
    with _silent_server() as silent, _nobody() as nobody:
        for shown, url in (("never answers", silent), ("is not there", nobody)):
            rounds = []
            for number in range(_CATCH_UP_ROUNDS):
                console.print(f"delivery: {shown}, round {number + 1} of {_CATCH_UP_ROUNDS}", style="dim")
                rounds.append(measure("benchmarks.measure_bounds", url, str(_FINISH_SECONDS)))
            init, finish = (max(each[call] for each in rounds) for call in ("init", "finish"))
            goals = (
                f"init {target(round(init, 2), _INIT_SECONDS)}",
                f"finish {target(round(finish, 2), _FINISH_SECONDS + _FINISH_SLACK_SECONDS)}",
            )
            topic.add(shown, f"{init:.2f}", f"{finish:.2f}", ", ".join(goals))
    return topic


# -- the servers ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """A VictoriaMetrics for the length of the measurement. Raises RuntimeError where there is none."""
    if shutil.which("victoria-metrics") is None:
        raise RuntimeError("victoria-metrics is not installed: apt-get install victoria-metrics.")
    from tests.servers.victoria_metrics import victoria_metrics

    with (
        tempfile.TemporaryDirectory(prefix="nodetrack-benchmark-") as folder,
        victoria_metrics(Path(folder)) as server,
    ):
        yield server.url


@contextlib.contextmanager
def _silent_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def _nobody() -> Iterator[str]:
    """An address that refuses connections: bound, and not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


if __name__ == "__main__":
    for each in topics(Console()):
        each.print(Console())
