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

from nodetrack.backends.factory import parse_backends
from nodetrack.cli.command import FOUND_WRONG, INTERRUPTED, ends_well, note
from nodetrack.cli.demo_page import print_report
from nodetrack.cli.strict_json import json_text
from nodetrack.cli.sync_jobs import Written, take_variables_from_dotenv, written_backends
from nodetrack.cli.terminal import console as standard_console
from nodetrack.demo.defaults import DemoHparams
from nodetrack.demo.display import Display, LiveDisplay, PlainDisplay
from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.orchestrate import Demo
from nodetrack.demo.report import DemoReport, make_report
from nodetrack.errors import DemoNodeError, MissingExtraError
from nodetrack.hparams.load import load_hparams
from nodetrack.hparams.namespace import Namespace
from nodetrack.settings import resolve

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
Backends = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,…",
        help="Where the rows go besides the journals: names of backends, JSON with options, or `none`. "
        "Default: NODETRACK_BACKENDS or the setting, else tensorboard, into the folder.",
    ),
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
    backends: Backends = None,
    as_json: AsJson = False,
) -> None:
    """Train a small language model with miners and a validator, each its own process, and track them.

    One miner is killed on the way and comes back, then all nodes are restarted under the next code version,
    whose training step differs. Takes about a minute on two cores. Downloads nothing.
    """
    console = _standard_error() if as_json else standard_console()
    try:
        hparams = _hparams(hparams_dir, local, windows, seed, overrides)
        place = DemoFolder(folder)
        report = _run(miners, hparams, place, console, _backends(backends, place))
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


def _backends(given: str | None, folder: DemoFolder) -> list[Written]:
    """Where the nodes deliver to. Raises UsageError, or what is wrong with a backend's name or options."""
    written: Sequence[Written] | None = written_backends(given)
    if written is None:
        written = resolve().settings.backends or (["tensorboard"] if _is_installed("tensorboard") else [])
    here = {"kind": "tensorboard", "log_dir": str(folder.tensorboard.absolute())}
    entries = [here if entry == "tensorboard" else entry for entry in written]
    take_variables_from_dotenv(entries)
    parse_backends(entries)
    return entries


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _run(
    miners: int, hparams: Namespace, folder: DemoFolder, console: Console, backends: Sequence[Written]
) -> DemoReport:
    _require_torch()
    display: Display = LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
    started_at = time.monotonic()
    demo = Demo(hparams, miners, folder, display, backends)
    cleared = folder.prepare()
    display.tell(_headline(demo, miners))
    display.tell(f"Everything goes to {folder.path}{_note_on(cleared)}.{_note_on_backends(backends)}")
    with display:
        demo.run()
    return make_report(demo, time.monotonic() - started_at)


def _require_torch() -> None:
    """Raises MissingExtraError without importing torch: only the nodes need it."""
    if not _is_installed("torch"):
        raise MissingExtraError("torch", "demo", "nodetrack demo")


def _headline(demo: Demo, miners: int) -> str:
    return (
        f"{miners} miners and 1 validator train a byte-level transformer of "
        f"{demo.shape.parameters / 1e6:.2f} M parameters on the source of Python's standard library, "
        f"for {demo.hparams.windows} windows of {demo.hparams.inner_steps} inner steps."
    )


def _note_on(cleared: bool) -> str:
    return " (an earlier demo in it was cleared away)" if cleared else ""


def _note_on_backends(backends: Sequence[Written]) -> str:
    if not backends:
        return " The nodes keep journals only; --backends says where else their rows go."
    kinds = [entry if isinstance(entry, str) else str(entry["kind"]) for entry in backends]
    return f" Each node also delivers to {' and '.join(kinds)}."
