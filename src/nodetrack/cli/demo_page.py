"""What `nodetrack demo` prints when it is done: what was tracked, what it shows, and where to look next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import nodetrack.demo
from nodetrack.cli.delivery_page import delivery_table
from nodetrack.cli.own_command import from_here, own_command
from nodetrack.cli.terminal import number, state_text, table
from nodetrack.demo.display import tell
from nodetrack.demo.report import DeliveryLine, DemoReport, KillLine
from nodetrack.demo.versions import VERSIONS


def print_report(console: Console, report: DemoReport) -> None:
    """Prints the parts, each under its title, then commands to copy, which are never broken into lines."""
    for title, content in _parts(report):
        console.print()
        tell(console, title, "bold")
        if isinstance(content, Table):
            console.print(content)
        else:
            tell(console, content)
    console.print()
    for line in _where_it_lies(report):
        tell(console, line)
    for command in _next_commands(report):
        console.print(f"  {command}", soft_wrap=True)


def _parts(report: DemoReport) -> Iterator[tuple[str, str | Table]]:
    yield "Runs", _runs_table(report)
    yield "Last values by version", _metrics_table(report)
    for kill in report.kills:
        yield "The kill", _kill_text(kill)
    conclusion = _conclusion(report)
    if conclusion:
        yield "The two versions", conclusion
    if report.delivery:
        yield "Delivery", delivery_table([(line.node, line.account) for line in report.delivery])
    if not _is_delivered(report):
        yield "Not delivered", _missing_text(report)


def _runs_table(report: DemoReport) -> Table:
    runs = table("role", "uid", "run id", "attempt>", "version", "state~")
    for run in report.runs:
        node = (run.role, run.uid, run.run)
        for attempt in run.attempts:
            runs.add_row(
                *node,
                str(attempt.attempt),
                attempt.version,
                state_text(attempt.state, _short(attempt.reason)),
            )
            node = ("", "", "")
    return runs


def _short(reason: str) -> str:
    """`killed` of `killed: the process ended without a word`, which `nodetrack show` says in full."""
    return reason.partition(": ")[0]


def _metrics_table(report: DemoReport) -> Table:
    values = table("node", "metric", *(f"{version}>" for version in VERSIONS))
    for line in report.metrics:
        values.add_row(line.node, line.metric, *(_last(line.last.get(version)) for version in VERSIONS))
    return values


def _last(value: float | None) -> str:
    return "-" if value is None else number(value)


# -- what it shows -------------------------------------------------------------------------------------


def _kill_text(kill: KillLine) -> str:
    missing = f"{len(kill.missing_steps)} of the {kill.printed_steps} steps that it had reported are NOT"
    kept = missing if kill.missing_steps else f"all {kill.printed_steps} steps that it had reported are"
    return (
        f"{kill.node} was killed in window {kill.window}. It had logged up to step {kill.last_step}, and "
        f"{kept} in its journal. It came back as the next attempt of the same run{_return_text(kill)}"
    )


def _return_text(kill: KillLine) -> str:
    if kill.back_at_step is None or kill.resumed_at_step is None:
        return ", but too late to train."
    if kill.back_at_step > kill.last_step:
        return f" and went on at step {kill.resumed_at_step}."
    return (
        f" and went back to its last checkpoint, at step {kill.back_at_step}: what it had logged from there "
        f"to step {kill.last_step} is superseded by the new attempt, not deleted."
    )


def _conclusion(report: DemoReport) -> str:
    """What the switch of versions did, told by the two metrics that disagree under the old one."""
    old, new = VERSIONS
    last = {line.metric: line.last for line in report.metrics}
    evaluation, training = last["eval/loss"], last["train/loss"]
    if not all(version in values for version in VERSIONS for values in (evaluation, training)):
        return ""

    def losses(version: str) -> str:
        return f"train/loss {training[version]:.3f}, eval/loss {evaluation[version]:.3f}"

    releases = from_here(Path(nodetrack.demo.__path__[0]))
    return (
        f"{old} seeds its sampler anew in every step, so miners learn one batch by heart: {losses(old)}. "
        f"{new} fixes that: {losses(new)}. Compare release_0_1_0.py and release_0_1_1.py in {releases}."
    )


def _is_delivered(report: DemoReport) -> bool:
    return all(line.account.is_complete for line in report.delivery)


def _missing_text(report: DemoReport) -> str:
    """Who lacks whose rows and why, one sentence a backend."""
    lacking: dict[str, list[DeliveryLine]] = {}
    for line in report.delivery:
        if not line.account.is_complete:
            lacking.setdefault(line.account.backend, []).append(line)
    sentences = [_missing_sentence(backend, lines) for backend, lines in lacking.items()]
    return " ".join([*sentences, "The journals have all of it, and `nodetrack sync` sends the rest."])


def _missing_sentence(backend: str, lines: Sequence[DeliveryLine]) -> str:
    nodes = ", ".join(line.node for line in lines)
    error = next((line.account.last_error for line in lines if line.account.last_error), "it was too slow")
    return f"{backend} lacks rows of {nodes}: {error.rstrip('.')}."


# -- where to look next --------------------------------------------------------------------------------


def _where_it_lies(report: DemoReport) -> Iterator[str]:
    yield f"Done in {report.seconds:.0f} s. Everything is in {report.folder}."
    yield f"Journals: {report.journals} (a hidden folder, which `ls -a {report.folder}` shows)."
    for backend, destination in _destinations(report).items():
        yield f"Delivered to {backend}: {destination}"
    yield "Try next:"


def _destinations(report: DemoReport) -> dict[str, str]:
    accounts = [line.account for line in report.delivery]
    return {account.backend: account.destination for account in accounts if account.destination}


def _next_commands(report: DemoReport) -> Iterator[str]:
    """Commands that can be copied into the shell as they stand; the killed node has the most to show."""
    node = report.kills[0].node if report.kills else "miner-0"
    rest = [] if _is_delivered(report) else ["sync"]
    proof = [f"show {node} --delivery"] if report.delivery else []
    for command in (*rest, "runs", f"show {node}", *proof, "tail validator-0"):
        yield f"{own_command()} {command} --dir {shlex.quote(report.journals)}"
