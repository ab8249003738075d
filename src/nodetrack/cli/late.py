"""Commands that are imported when wanted: `nodetrack runs` does not wait for what `hparams` needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

import typer
from typer.core import TyperGroup
from typer.main import get_group

from nodetrack.cli.plain_help import PlainCommand, PlainGroup

if TYPE_CHECKING:
    from typer.core import TyperCommand

    Command = TyperCommand | TyperGroup


def late_group(places: Mapping[str, str]) -> type[TyperGroup]:
    """A class for `typer.Typer(cls=...)` whose commands lie at `places`: command name → `module:attribute`.

    The attribute is a command function or a `typer.Typer` of commands.
    """

    class LateGroup(PlainGroup):
        """See late_group."""

        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]  # passed on as typer gives them
            self.commands = _LateCommands(places)  # type: ignore[assignment]  # typer keeps the commands' class private

    return LateGroup


class _LateCommands(Mapping[str, "Command"]):
    """Every name is there from the start; its command is made when it is first asked for."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        if name not in self._made:
            self._made[name] = _load(name, self._places[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _load(name: str, place: str) -> Command:
    module, _, attribute = place.partition(":")
    found: object = getattr(importlib.import_module(module), attribute)
    holder = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    elif callable(found):
        holder.command(name, cls=PlainCommand)(found)
    return cast("Command", get_group(holder).commands[name])
