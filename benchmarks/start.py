"""What starting costs a training process, in time and memory: `python -m benchmarks.start`.

The process that is measured imports nothing of its own; its memory is read from outside.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console

from benchmarks.peers import ENDS, IMPORTS, PEERS, STARTS, TITLES, quiet_environment
from benchmarks.processes import ROOT
from benchmarks.report import Topic, target

_ROUNDS: Final = 3
_IMPORT_ROUNDS: Final = 15
#: The least that any use of pydantic loads: the first model loads much more than the bare import does.
_PYDANTIC: Final = "import pydantic; pydantic.create_model('Model', number=(int, 1))"
_MARK: Final = "@stage"
_SETTLE_SECONDS: Final = 0.3
_TIMEOUT_SECONDS: Final = 60

#: Megabytes of the process and of the processes it started, and seconds since the stage before.
Stage = Mapping[str, float]


def topics(console: Console) -> list[Topic]:
    """Time, then memory."""
    imports = _import_milliseconds(console)
    starts: dict[str, list[dict[str, Stage]]] = {name: [] for name in PEERS}
    shares: list[dict[str, Stage]] = []
    beside_torch: list[dict[str, Stage]] = []
    for number in range(_ROUNDS):
        console.print(f"start, round {number + 1} of {_ROUNDS}", style="dim")
        for name, rounds in starts.items():
            rounds.append(_start(name))
        shares.append(_start("nodetrack", _PYDANTIC))
        beside_torch.append(_start("nodetrack", "import torch"))
    pydantic = statistics.median(_added(stages, "before") for stages in shares)
    return [_time_topic(imports, starts), _memory_topic(starts, pydantic, beside_torch)]


# -- the tables -----------------------------------------------------------------------------------------


def _time_topic(imports: Mapping[str, float], starts: Mapping[str, list[dict[str, Stage]]]) -> Topic:
    topic = Topic(
        "Time to start",
        "`import`, over an interpreter that imports nothing; a first run, with all that is loaded for it; a "
        f"second run in that process. Medians of {_ROUNDS} rounds, of {_IMPORT_ROUNDS} for our own import.",
        ("tracker", "import ms", "first run ms", "second run ms", "target"),
    )
    for name, rounds in starts.items():
        first = statistics.median(stages["init"]["seconds"] for stages in rounds)
        again = statistics.median(stages["again"]["seconds"] for stages in rounds)
        goal = f"import {target(imports[name], 60)}" if name == "nodetrack" else ""
        topic.add(TITLES[name], f"{imports[name]:.0f}", f"{first * 1e3:.0f}", f"{again * 1e3:.0f}", goal)
    return topic


def _memory_topic(
    starts: Mapping[str, list[dict[str, Stage]]], pydantic: float, beside_torch: list[dict[str, Stage]]
) -> Topic:
    topic = Topic(
        "Memory added to the training process",
        "Resident megabytes over an interpreter that imports nothing, after the first run has started; "
        f"helpers are the processes that it starts. Medians of {_ROUNDS} rounds. TensorBoard's writer comes "
        "with torch, which a training process has anyway.",
        ("tracker", "import MB", "first run MB", "together MB", "helpers MB", "target"),
    )
    for name, rounds in starts.items():
        cells = _memory_cells(rounds)
        goal = f"together {target(float(cells[2]), 25)}" if name == "nodetrack" else ""
        topic.add(TITLES[name], *cells, goal)
        if name == "nodetrack":
            topic.add("… of which pydantic", "", "", f"{pydantic:.1f}")
            topic.add("… after `import torch`", *_memory_cells(beside_torch))
    return topic


def _memory_cells(rounds: list[dict[str, Stage]]) -> list[str]:
    """Megabytes that the import and the first run add, both together, and those of the helpers."""
    imports = statistics.median(_added(stages, "import") for stages in rounds)
    inits = statistics.median(_added(stages, "init") for stages in rounds)
    helpers = statistics.median(stages["init"]["helpers"] for stages in rounds)
    return [f"{value:.1f}" for value in (imports, inits, imports + inits, helpers)]


def _added(stages: Mapping[str, Stage], stage: str) -> float:
    """Megabytes that a stage added."""
    names = list(stages)
    return stages[stage]["own"] - stages[names[names.index(stage) - 1]]["own"]


# -- the processes --------------------------------------------------------------------------------------


def _import_milliseconds(console: Console) -> dict[str, float]:
    """Milliseconds of each peer's import over a bare interpreter, both run by turns."""
    console.print("start: imports", style="dim")
    over: dict[str, list[float]] = {name: [] for name in PEERS}
    with _folder() as folder:
        for number in range(_IMPORT_ROUNDS):
            for name in PEERS if number < _ROUNDS else PEERS[:1]:
                bare = _wall_seconds("pass", folder)
                over[name].append((_wall_seconds(IMPORTS[name], folder) - bare) * 1e3)
    return {name: statistics.median(samples) for name, samples in over.items()}


def _wall_seconds(program: str, folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=_environment(folder),
        check=True,
        timeout=_TIMEOUT_SECONDS,
    )
    return time.perf_counter() - began


def _start(name: str, before: str = "pass") -> dict[str, Stage]:
    """The stages of a process that imports the peer and starts two runs, one after the other."""
    stages = {
        "bare": "pass",
        "before": before,
        "import": IMPORTS[name],
        "init": STARTS[name],
        "again": f"{ENDS[name]}; began = time.perf_counter(); {STARTS[name]}",
    }
    lines = ["import gc, sys, time"]
    for stage, statement in stages.items():
        lines += [
            "began = time.perf_counter()",
            statement,
            "seconds = time.perf_counter() - began",
            "gc.collect()",
        ]
        lines += [f"print('{_MARK}', '{stage}', seconds, flush=True); sys.stdin.readline()"]
    lines.append(ENDS[name])
    with _folder() as folder:
        return _read_stages("\n".join(lines), folder)


def _read_stages(program: str, folder: Path) -> dict[str, Stage]:
    """Run the program; at each of its stages, measure it from outside and let it go on."""
    stages: dict[str, Stage] = {}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env=_environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_MARK):
                _, stage, seconds = line.split()
                stages[stage] = {"seconds": float(seconds), **_memory(process.pid)}
                process.stdin.write("\n")
                process.stdin.flush()
    if process.returncode:
        raise RuntimeError(f"This program failed:\n{program}")
    return stages


def _memory(pid: int) -> dict[str, float]:
    time.sleep(_SETTLE_SECONDS)
    process = psutil.Process(pid)
    helpers = process.children(recursive=True)
    return {
        "own": process.memory_info().rss / 1e6,
        "helpers": sum(child.memory_info().rss for child in helpers) / 1e6,
    }


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nodetrack-benchmark-") as name:
        yield Path(name)


def _environment(folder: Path) -> dict[str, str]:
    return {**quiet_environment(folder), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


if __name__ == "__main__":
    for each in topics(Console()):
        each.print(Console())
