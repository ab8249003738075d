"""`nodetrack demo`: two miners and a validator train a small model, are killed, restarted and updated.

Exit codes: 0 done, 1 a node failed, 2 it cannot start, 130 stopped by Ctrl-C. What happens goes to standard
output; with `--json` the closing report does, and what happens goes to standard error.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from nodetrack.demo.defaults import DemoHparams
from nodetrack.demo.display import Display, LiveDisplay, PlainDisplay
from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.orchestrate import Demo
from nodetrack.demo.report import DemoReport, KillLine, make_report
from nodetrack.demo.versions import VERSIONS
from nodetrack.errors import DemoNodeError, MissingExtraError, NodetrackError
from nodetrack.hparams.load import load_hparams
from nodetrack.hparams.namespace import Namespace

Miners = Annotated[int, typer.Option("--miners", "--nodes", min=1, max=16, help="How many miners train.")]
Windows = Annotated[
    int | None, typer.Option(min=4, help="Windows of the whole demo; half of them under each version.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Start of every random sequence.")]
Folder = Annotated[
    Path, typer.Option(help="Where everything goes. An earlier demo in it is cleared; nothing else ever is.")
]
Local = Annotated[bool, typer.Option("--local", help="Add hparams-local-run.json: smaller and quicker.")]
HparamsDir = Annotated[Path, typer.Option(help="Folder with hparams.json.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a hyper-parameter; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the closing report as JSON.")]


def demo(
    miners: Miners = 2,
    windows: Windows = None,
    seed: Seed = None,
    folder: Folder = Path("demo-run"),
    local: Local = False,
    hparams_dir: HparamsDir = Path(),
    overrides: Set = None,
    as_json: AsJson = False,
) -> None:
    """Train a small language model with miners and a validator, each its own process, and track them.

    One miner is killed on the way and comes back, then all nodes are restarted under the next code version,
    whose training step differs. Takes about a minute on two cores. Downloads nothing.
    """
    console = Console(stderr=as_json)
    try:
        report = _run(miners, _hparams(hparams_dir, local, windows, seed, overrides), folder, console)
    except KeyboardInterrupt:
        console.print(f"Stopped. All nodes have ended; what they logged is in {folder}.", highlight=False)
        raise typer.Exit(130) from None
    except DemoNodeError as error:
        _fail(error, 1)
    except NodetrackError as error:
        _fail(error, 2)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _print_report(report, console)


def _hparams(
    folder: Path, local: bool, windows: int | None, seed: int | None, overrides: Sequence[str] | None
) -> Namespace:
    """The resolved hyper-parameters; `--windows` and `--seed` are short for overrides."""
    shortcuts = {"windows": windows, "seed": seed}
    given = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    return load_hparams(folder, local, [*(overrides or ()), *given], defaults=DemoHparams)


def _run(miners: int, hparams: Namespace, path: Path, console: Console) -> DemoReport:
    _require_torch()
    folder = DemoFolder(path)
    display: Display = LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
    started_at = time.monotonic()
    demo = Demo(hparams, miners, folder, display)
    cleared = folder.prepare()
    console.print(_headline(demo, miners), highlight=False, soft_wrap=True)
    console.print(f"Everything goes to {path}{_note_on(cleared)}.", highlight=False, soft_wrap=True)
    with display:
        demo.run()
    return make_report(demo, time.monotonic() - started_at)


def _require_torch() -> None:
    """Raises MissingExtraError without importing torch: only the nodes need it."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", "demo", "nodetrack demo")


def _headline(demo: Demo, miners: int) -> str:
    return (
        f"{miners} miners and 1 validator train a byte-level transformer of "
        f"{demo.shape.parameters / 1e6:.2f} M parameters on the source of Python's standard library, "
        f"for {demo.hparams.windows} windows of {demo.hparams.inner_steps} inner steps."
    )


def _note_on(cleared: bool) -> str:
    return " (an earlier demo in it was cleared away)" if cleared else ""


def _fail(error: NodetrackError, code: int) -> NoReturn:
    print(error, file=sys.stderr)
    raise typer.Exit(code)


# -- the closing report -------------------------------------------------------------------------------


def _print_report(report: DemoReport, console: Console) -> None:
    console.print()
    console.print(_runs_table(report))
    console.print(_metrics_table(report))
    for line in [*map(_kill_text, report.kills), _conclusion(report)]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"\nDone in {report.seconds:.0f} s. Everything lies in {report.folder}. Try next:", highlight=False
    )
    for command in ("runs", "show miner-0", "tail validator-0"):
        console.print(f"  nodetrack {command} --dir {report.journals}", highlight=False, soft_wrap=True)


def _runs_table(report: DemoReport) -> Table:
    table = Table("node", "run id", "attempt", "version", "state", "", title="Runs", title_justify="left")
    for run in report.runs:
        for attempt in run.attempts:
            is_first = attempt is run.attempts[0]
            node, run_id = (run.node, run.run) if is_first else ("", "")
            table.add_row(node, run_id, str(attempt.attempt), attempt.version, attempt.state, attempt.reason)
        table.add_section()
    return table


def _metrics_table(report: DemoReport) -> Table:
    table = Table("node", "metric", title="Last values by version", title_justify="left")
    for version in VERSIONS:
        table.add_column(version, justify="right")
    for line in report.metrics:
        table.add_row(line.node, line.metric, *(_number(line.last.get(version)) for version in VERSIONS))
    return table


def _number(value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3f}"


def _kill_text(kill: KillLine) -> str:
    found = "all of them are" if not kill.missing_steps else f"{len(kill.missing_steps)} of them are NOT"
    resumed = (
        f"and went on at step {kill.resumed_at_step}" if kill.resumed_at_step is not None else "too late"
    )
    return (
        f"{kill.node} was killed in window {kill.window}. It had logged {kill.printed_steps} steps, "
        f"and {found} in its journal. It came back as the next attempt of the same run {resumed}."
    )


def _conclusion(report: DemoReport) -> str:
    """What the switch of versions did, told by the two metrics that disagree under the old one."""
    old, new = VERSIONS
    last = {line.metric: line.last for line in report.metrics}
    evaluation, training = last["eval/loss"], last["train/loss"]
    if not all(version in values for version in VERSIONS for values in (evaluation, training)):
        return ""

    def losses(version: str) -> str:
        return f"train/loss {_number(training[version])}, eval/loss {_number(evaluation[version])}"

    return (
        f"{old} seeds its sampler anew in every step, so miners learn one batch by heart: {losses(old)}. "
        f"{new} fixes that: {losses(new)}. (Compare release_0_1_0.py and release_0_1_1.py in nodetrack/demo.)"
    )
