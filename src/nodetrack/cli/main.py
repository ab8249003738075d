"""The program `nodetrack`: every command in one place.

The command files import only what `--help` needs; what a command works with, it imports when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from nodetrack.cli import hparams

_EPILOG = "Exit codes: 0 done, 1 something was found wrong, 2 wrong usage, unknown run or a value that cannot be used."

app = typer.Typer(
    name="nodetrack",
    help="Look at what the nodes of a project log: runs, attempts, metrics and the journals they lie in.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(hparams.app, name="hparams")


def _print_version(wanted: bool) -> None:
    if wanted:
        import nodetrack

        typer.echo(nodetrack.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print nodetrack's version."),
    ] = False,
) -> None:
    """See the module."""
