"""`nodetrack env`: the environment variables that a launched job needs to reach the same backends."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer
from rich.text import Text

from nodetrack.backends.factory import backend_class, entries_of
from nodetrack.cli.command import AsJson, ends_well, note
from nodetrack.cli.strict_json import json_line, json_text
from nodetrack.cli.sync_jobs import configured_backends, take_variables_from_dotenv, written_backends
from nodetrack.cli.terminal import console, print_table, table
from nodetrack.errors import UsageError
from nodetrack.settings import PREFIX, Backends

_BACKENDS: Final = f"{PREFIX}BACKENDS"

Chosen = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,…",
        help="Names of backends, or JSON with options. Default: NODETRACK_BACKENDS or the setting.",
    ),
]
Show = Annotated[
    bool,
    typer.Option("--show", help="Print the values too, as lines that a shell takes: export NAME='value'."),
]


class Variable(msgspec.Struct, frozen=True):
    """One variable of one backend, as `env --json` prints it."""

    name: str
    #: None for the one that names the backends.
    backend: str | None
    set: bool
    #: None unless `--show` was given.
    value: str | None


@ends_well
def env(backends: Chosen = None, show: Show = False, as_json: AsJson = False) -> None:
    """Print the variables that a launched job needs for its backends, and which of them are not set here.

    Without --show no value is printed. What is not set may not be needed: see the backend's page.
    """
    written = written_backends(backends)
    entries = written if written is not None else configured_backends()
    if not entries:
        raise UsageError("No backend is chosen: name some with --backends or NODETRACK_BACKENDS.")
    variables = _variables(entries)
    if as_json:
        shown = variables if show else [msgspec.structs.replace(each, value=None) for each in variables]
        typer.echo(json_text({"variables": msgspec.to_builtins(shown)}))
    elif show:
        for variable in variables:
            if variable.value is not None:
                typer.echo(f"export {variable.name}={shlex.quote(variable.value)}")
        missing = [variable.name for variable in variables if not variable.set]
        if missing:
            note(f"Not set here: {', '.join(missing)}.")
    else:
        _print(variables)


def _variables(entries: Backends) -> list[Variable]:
    """All variables in the order of the backends, each once. Neither options nor an SDK are needed for that:
    the job may have them, and not this machine.
    """
    names_only = all(isinstance(entry, str) for entry in entries)
    value = ",".join(map(str, entries)) if names_only else json_line(list(entries))
    found = {_BACKENDS: Variable(_BACKENDS, None, True, value)}
    take_variables_from_dotenv(entries)  # a node reads the file as well: what stands there counts as set
    for kind, _, _ in entries_of(entries):
        backend = backend_class(kind)
        values = backend.forward_env()
        for name in dict.fromkeys([*backend.variables, *values]):
            found.setdefault(name, Variable(name, kind, name in values, values.get(name)))
    return list(found.values())


def _print(variables: Sequence[Variable]) -> None:
    listed = table("variable", "for~", "here")
    for variable in variables:
        state = Text("set") if variable.set else Text("not set", style="yellow")
        listed.add_row(variable.name, variable.backend or "all backends", state)
    print_table(console(), listed)
