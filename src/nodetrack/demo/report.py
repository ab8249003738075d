"""What the demo leaves behind, read from the journals alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.orchestrate import Demo, Killed
from nodetrack.demo.versions import VERSIONS
from nodetrack.journal.folder import RunDetail, RunFolder, TrackingFolder
from nodetrack.journal.recover import attempt_number
from nodetrack.journal.views import all_rows

SHOWN_METRICS = {
    "miner": ("train/loss", "train/gradient_norm", "train/tokens_per_second"),
    "validator": ("eval/loss", "eval/bits_per_byte", "gather/contributions"),
}
_PRINTED_STEP = re.compile(r"^step (\d+) ", re.MULTILINE)


class AttemptLine(msgspec.Struct, frozen=True):
    """One process start."""

    attempt: int
    version: str
    state: str
    reason: str


class RunLine(msgspec.Struct, frozen=True):
    """One node's run."""

    role: str
    uid: str
    run: str
    versions: tuple[str, ...]
    state: str
    step: int
    rows: int
    attempts: tuple[AttemptLine, ...]


class MetricLine(msgspec.Struct, frozen=True):
    """One metric's last value under each version that logged it."""

    node: str
    metric: str
    last: dict[str, float]


class KillLine(msgspec.Struct, frozen=True):
    """What a killed process had printed as logged, and what of it is missing in the journal: nothing.

    `resumed_at_step`: the first step of the run's next attempt, None when there is none.
    """

    node: str
    window: int
    printed_steps: int
    missing_steps: tuple[int, ...]
    resumed_at_step: int | None


class DemoReport(msgspec.Struct, frozen=True):
    """The whole outcome."""

    folder: str
    journals: str
    seconds: float
    runs: tuple[RunLine, ...]
    metrics: tuple[MetricLine, ...]
    kills: tuple[KillLine, ...]


def make_report(demo: Demo, seconds: float) -> DemoReport:
    """Reads back what the demo's nodes have journalled."""
    project = demo.hparams.project
    found = [TrackingFolder(demo.folder.journals).find(node.name, project) for node in demo.nodes]
    details = [run.detail() for run in found]
    return DemoReport(
        folder=str(demo.folder.path),
        journals=str(demo.folder.journals),
        seconds=round(seconds, 1),
        runs=tuple(_run_line(detail) for detail in details),
        metrics=tuple(line for detail in details for line in _metric_lines(detail)),
        kills=tuple(_kill_line(kill, demo.folder, found) for kill in demo.killed),
    )


def missing_steps(output: Path, journalled: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """How many steps a node printed after logging them, and those of them that are not in its journal."""
    printed = {int(step) for step in _PRINTED_STEP.findall(output.read_text())}
    return len(printed), tuple(sorted(printed - set(journalled)))


def _run_line(detail: RunDetail) -> RunLine:
    overview = detail.overview
    return RunLine(
        role=overview.role,
        uid=overview.uid,
        run=overview.run,
        versions=overview.versions,
        state=overview.state,
        step=overview.step,
        rows=detail.rows,
        attempts=tuple(
            AttemptLine(folder.number, folder.version, state.state, state.reason)
            for folder, state in detail.attempts
        ),
    )


def _metric_lines(detail: RunDetail) -> list[MetricLine]:
    overview = detail.overview
    lines = []
    for metric in SHOWN_METRICS[overview.role]:
        by_version = {version: detail.last_by_version.get(version, {}).get(metric) for version in VERSIONS}
        last = {version: value for version, value in by_version.items() if isinstance(value, int | float)}
        lines.append(MetricLine(f"{overview.role}-{overview.uid}", metric, last))
    return lines


def _kill_line(kill: Killed, folder: DemoFolder, runs: Sequence[RunFolder]) -> KillLine:
    """Asks the killed attempt's own rows, the later attempts' left out."""
    run = next(run for run in runs if _node_of(run) == kill.node)
    steps: dict[int, list[int]] = {}
    for row in all_rows(run):
        steps.setdefault(attempt_number(row.attempt), []).append(row.step)
    printed, missing = missing_steps(folder.output(kill.node, kill.start), steps.get(kill.start, []))
    resumed_at = next(iter(steps.get(kill.start + 1, [])), None)
    return KillLine(kill.node, kill.window, printed, missing, resumed_at)


def _node_of(run: RunFolder) -> str:
    overview = run.overview()
    return f"{overview.role}-{overview.uid}"
