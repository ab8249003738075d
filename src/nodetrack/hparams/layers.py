"""What the parts of `hparams` hand to each other: JSON values, where they came from, and layers of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value that a JSON file can hold."""

KeyPath: TypeAlias = tuple[str, ...]
"""The names from the top to a value: `("torchtitan", "dp_shard")`, written `torchtitan.dp_shard`."""

LayerKind: TypeAlias = Literal["default", "project", "model_size", "local", "environment", "override"]
"""The layers, lowest first."""


def dotted(path: KeyPath) -> str:
    """The key as people write it."""
    return ".".join(path)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a text; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written.

    `source` names it for people: `built-in default`, a file's path, `$NODETRACK_HPARAMS__seed`, or the
    override as typed. `path`, `line` and `column` are set for files only.
    """

    kind: LayerKind
    source: str
    path: Path | None = None
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    @property
    def place(self) -> str:
        """The source and its line, as a message begins."""
        return self.source if self.line is None else f"{self.source}, line {self.line}"

    def at(self, mark: Mark | None) -> Origin:
        """The same source, at one place in it."""
        return self if mark is None else replace(self, line=mark.line, column=mark.column)


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of one source, with the place of each key that has one."""

    origin: Origin
    values: dict[str, Json]
    marks: Mapping[KeyPath, Mark] = field(default_factory=dict)

    def origin_of(self, path: KeyPath) -> Origin:
        """The place of a key, or the whole source when the source has no places."""
        return self.origin.at(self.marks.get(path))


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that one layer gave to one key."""

    value: Json
    origin: Origin


@dataclass(frozen=True, slots=True)
class Problem:
    """Something doubtful that a start may go on with: a warning, or an error when strict."""

    message: str
    origin: Origin
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A layer as read from its source, and what is doubtful about the source."""

    layer: Layer
    problems: tuple[Problem, ...] = ()
