"""What the demo leaves behind, read from the journals alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nodetrack.delivery.account import Account, accounts
from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.orchestrate import Demo, Killed
from nodetrack.demo.versions import VERSIONS
from nodetrack.journal.folder import AttemptFolder, RunDetail, RunFolder, TrackingFolder
from nodetrack.records import Row

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

    `last_step`: the highest that the run had logged by then. `back_at_step`: where the run's next attempt
    began, from its checkpoint. `resumed_at_step`: the first step that it logged, which lies in a later window
    where that of the checkpoint was closed meanwhile. Both are None when there is no such step.
    """

    node: str
    window: int
    printed_steps: int
    last_step: int
    missing_steps: tuple[int, ...]
    back_at_step: int | None
    resumed_at_step: int | None


class DeliveryLine(msgspec.Struct, frozen=True):
    """What one backend has of one node's run, by a recount of the journal."""

    node: str
    account: Account


class DemoReport(msgspec.Struct, frozen=True):
    """The whole outcome."""

    folder: str
    journals: str
    seconds: float
    runs: tuple[RunLine, ...]
    metrics: tuple[MetricLine, ...]
    kills: tuple[KillLine, ...]
    delivery: tuple[DeliveryLine, ...] = ()


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
        kills=tuple(kill_line(kill, demo.folder, found) for kill in demo.killed),
        delivery=tuple(
            DeliveryLine(node.name, account)
            for node, run in zip(demo.nodes, found, strict=True)
            for account in accounts(run.folder, recount=True).values()
        ),
    )


def printed_steps(output: Path) -> frozenset[int]:
    """The steps that a node printed, each after logging it."""
    return frozenset(map(int, _PRINTED_STEP.findall(output.read_text())))


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


def kill_line(kill: Killed, folder: DemoFolder, runs: Sequence[RunFolder]) -> KillLine:
    """Asks the killed attempt's own rows, the later attempts' left out."""
    run = next(run for run in runs if _node_of(run) == kill.node)
    steps = {attempt.number: _steps(attempt) for attempt in run.attempts}
    printed = printed_steps(folder.output(kill.node, kill.start))
    following = kill.start + 1
    return KillLine(
        node=kill.node,
        window=kill.window,
        printed_steps=len(printed),
        last_step=max(step for number in steps if number < following for step in steps[number]),
        missing_steps=tuple(sorted(printed.difference(steps.get(kill.start, ())))),
        back_at_step=next((it.starting_step for it in run.attempts if it.number == following), None),
        resumed_at_step=next(iter(steps.get(following, ())), None),
    )


def _steps(attempt: AttemptFolder) -> list[int]:
    return [record.step for record in attempt.records() if isinstance(record, Row)]


def _node_of(run: RunFolder) -> str:
    overview = run.overview()
    return f"{overview.role}-{overview.uid}"
