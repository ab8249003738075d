"""The program `nodetrack`: where every command lies, and what holds for all of them."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from nodetrack.cli.late import late_group

#: The commands in the order of `nodetrack --help`, and where they lie.
COMMANDS: Final = {
    "runs": "nodetrack.cli.runs:runs",
    "show": "nodetrack.cli.show:show",
    "tail": "nodetrack.cli.tail:tail",
    "export": "nodetrack.cli.export:export",
    "sync": "nodetrack.cli.sync:sync",
    "journal": "nodetrack.cli.journal:app",
    "doctor": "nodetrack.cli.doctor:doctor",
    "env": "nodetrack.cli.env:env",
    "hparams": "nodetrack.cli.hparams:app",
    "demo": "nodetrack.cli.demo:demo",
}
_EPILOG: Final = (
    "Exit codes: 0 done, 1 something was found wrong, 2 wrong usage or unknown run, 130 interrupted."
)

app = typer.Typer(
    name="nodetrack",
    help="Look at what the nodes of a project log: runs, attempts, metrics and the journals they lie in.",
    epilog=_EPILOG,
    cls=late_group(COMMANDS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
