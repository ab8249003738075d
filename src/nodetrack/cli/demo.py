"""`nodetrack demo`: two miners and a validator train a small model, are killed, restarted and updated.

Exit codes: 0 done, 1 a node failed, 2 it cannot start, 130 stopped by Ctrl-C. What happens goes to standard
output; with `--json` the closing report does, and what happens goes to standard error.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from nodetrack.cli.command import FOUND_WRONG, INTERRUPTED, ends_well, note
from nodetrack.cli.demo_page import print_report
from nodetrack.cli.strict_json import json_text
from nodetrack.cli.terminal import console as standard_console
from nodetrack.demo.defaults import DemoHparams
from nodetrack.demo.display import Display, LiveDisplay, PlainDisplay
from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.orchestrate import Demo
from nodetrack.demo.report import DemoReport, make_report
from nodetrack.errors import DemoNodeError, MissingExtraError
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


@ends_well
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
    console = _standard_error() if as_json else standard_console()
    try:
        report = _run(miners, _hparams(hparams_dir, local, windows, seed, overrides), folder, console)
    except KeyboardInterrupt:
        note(f"stopped. All nodes have ended; what they logged is in {folder}.")
        raise typer.Exit(INTERRUPTED) from None
    except DemoNodeError as error:
        note(str(error))
        raise typer.Exit(FOUND_WRONG) from None
    if as_json:
        typer.echo(json_text(msgspec.to_builtins(report)))
    else:
        print_report(console, report)


def _standard_error() -> Console:
    """For what happens, while standard output waits for the report."""
    return Console(stderr=True, highlight=False, emoji=False, markup=False)


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
    display.tell(_headline(demo, miners))
    display.tell(f"Everything goes to {path}{_note_on(cleared)}.")
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
