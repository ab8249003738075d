"""Commands whose help says nothing of the type of a flag: `--json`, and not `--json <bool>`."""

from __future__ import annotations

from typing import TypeVar

from typer.core import TyperCommand, TyperGroup, TyperOption

Parameter = TypeVar("Parameter")


class PlainCommand(TyperCommand):
    """For `@app.command(cls=...)`."""

    def get_params(self, ctx):  # type: ignore[no-untyped-def]  # typer keeps the types of both private
        """The parameters and `--help`."""
        return _plain(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """For `typer.Typer(cls=...)`."""

    def get_params(self, ctx):  # type: ignore[no-untyped-def]  # typer keeps the types of both private
        """The parameters and `--help`."""
        return _plain(super().get_params(ctx))


def _plain(parameters: list[Parameter]) -> list[Parameter]:
    """The same, with an empty word for the value of flags, which have none."""
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_flag and parameter.metavar is None:
            parameter.metavar = ""
    return parameters
