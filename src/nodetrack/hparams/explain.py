"""All layers read, checked and merged, with the history of every value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from nodetrack.errors import HparamsError
from nodetrack.hparams.check import CheckedLayer, check_layer
from nodetrack.hparams.defaults import Hparams
from nodetrack.hparams.fields import Field, Group, declared_fields
from nodetrack.hparams.files import FileKind, read_layer
from nodetrack.hparams.layers import (
    Json,
    KeyPath,
    Layer,
    LayerKind,
    Origin,
    Problem,
    Reading,
    Setting,
    dotted,
)
from nodetrack.hparams.merge import Resolved, plain, resolve
from nodetrack.hparams.overrides import environment_layers, override_layers

if TYPE_CHECKING:
    from pydantic import BaseModel

PROJECT_FILE = "hparams.json"
LOCAL_RUN_FILE = "hparams-local-run.json"
_SIZE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DEFAULT_ORIGIN = Origin("default", "built-in default")


@dataclass(frozen=True, slots=True)
class Entry:
    """One value: what it is, where it was written, what it overrode (highest layer first).

    `default`, `description` and `unit` are None for a key that is not declared.
    """

    path: KeyPath
    value: Json
    origin: Origin
    overridden: tuple[Setting, ...]
    is_declared: bool
    default: Json = None
    description: str | None = None
    unit: str | None = None

    @property
    def key(self) -> str:
        return dotted(self.path)

    @property
    def is_changed(self) -> bool:
        """Whether the value differs from the built-in default; a key without one always does."""
        return not self.is_declared or self.value != self.default


@dataclass(frozen=True, slots=True)
class Explained:
    """The hyper-parameters of one start.

    `notices` tell what was converted; `problems` are doubtful, and errors in strict mode.
    """

    values: dict[str, Json]
    entries: tuple[Entry, ...]
    notices: tuple[str, ...]
    problems: tuple[Problem, ...]
    declared: Group

    @property
    def messages(self) -> tuple[str, ...]:
        """Everything a person should read once, doubts first."""
        return (*(problem.message for problem in self.problems), *self.notices)

    def select(self, key: str) -> tuple[Entry, ...]:
        """The entry of a key, or all below an object; raises `HparamsError` when there is none."""
        found = tuple(entry for entry in self.entries if f"{entry.key}.".startswith(f"{key}."))
        if not found:
            nearest = self.declared.nearest(tuple(key.split(".")))
            advice = f"did you mean {nearest!r}?" if nearest else "`nodetrack hparams show` lists all keys."
            raise HparamsError(f"There is no key {key!r}; {advice}", key=key)
        return found


def explain_hparams(
    hparams_dir: str | os.PathLike[str] = ".",
    use_local_run_hparams: bool = False,
    overrides: Iterable[str] = (),
    strict: bool = False,
    *,
    defaults: type[BaseModel] = Hparams,
) -> Explained:
    """Read, check and merge all layers; `load_hparams` says what they are and what is raised.

    Logs nothing: `notices` and `problems` are in the answer.
    """
    gathered = _Gathered(Path(hparams_dir), declared_fields(defaults))
    gathered.read_files(use_local_run_hparams)
    gathered.add(*environment_layers(os.environ, gathered.declared))
    gathered.add(*override_layers(overrides, gathered.declared))
    gathered.read_size_file()
    return gathered.explained(strict)


def explain_file(
    path: Path, overrides: Iterable[str] = (), strict: bool = False, *, defaults: type[BaseModel] = Hparams
) -> Explained:
    """One file, of any name, above the built-in defaults, without the environment: for comparing files."""
    gathered = _Gathered(path.parent, declared_fields(defaults))
    if not gathered.read(path, "project"):
        raise HparamsError(f"{path} does not exist; name a folder or a JSON file.", path=path)
    gathered.add(*override_layers(overrides, gathered.declared))
    return gathered.explained(strict)


def explain_defaults(defaults: type[BaseModel] = Hparams) -> Explained:
    """The built-in defaults alone."""
    return _Gathered(Path(), declared_fields(defaults)).explained(strict=False)


class _Gathered:
    """The layers found so far, lowest first."""

    def __init__(self, folder: Path, declared: Group) -> None:
        self._folder = folder
        self.declared = declared
        self._default = Layer(_DEFAULT_ORIGIN, declared.default)
        self._layers: list[CheckedLayer] = []
        self._problems: list[Problem] = []
        self._notices: list[str] = []

    def add(self, *readings: Reading) -> None:
        for reading in readings:
            self._problems += reading.problems
            self._layers.append(check_layer(reading.layer, self.declared))

    def read(self, path: Path, kind: FileKind) -> bool:
        """Add a file as a layer; False when there is none."""
        reading = read_layer(path, kind)
        if reading is None:
            return False
        self.add(reading)
        return True

    def read_files(self, use_local_run_hparams: bool) -> None:
        if not self._folder.is_dir():
            message = f"{self._folder} is not a folder; pass the one that holds {PROJECT_FILE}."
            raise HparamsError(message, path=self._folder)
        project = self._folder / PROJECT_FILE
        if not self.read(project, "project"):
            message = f"{project} does not exist; built-in defaults take its place."
            self._problems.append(Problem(message, Origin("project", str(project), project)))
        local = self._folder / LOCAL_RUN_FILE
        if use_local_run_hparams and not self.read(local, "local"):
            raise HparamsError(
                f"{local} does not exist; write it, or start without local-run hparams.", path=local
            )

    def read_size_file(self) -> None:
        """The layer that `model_size` names, once all other layers have settled its value."""
        size = self._resolved().get("model_size")
        if size is None or size.value is None:
            return
        path = self._folder / f"{_size_name(size)}.json"
        if not self.read(path, "model_size"):
            self._notices.append(
                f"{size.origin.place}: model_size is {size.value!r}, but there is no {path}."
            )
            return
        layer = self._layers[-1].layer
        if layer.values.get("model_size", size.value) != size.value:
            place = layer.origin_of(("model_size",)).place
            message = (
                f"{place}: the file of model_size {size.value!r} sets another model_size; delete that line."
            )
            raise HparamsError(message, path=path, key="model_size")

    def explained(self, strict: bool) -> Explained:
        problems = (*self._problems, *(found for checked in self._layers for found in checked.problems))
        if strict and problems:
            raise _strict_error(problems)
        notices = (*self._notices, *(notice for checked in self._layers for notice in checked.notices))
        tree = self._resolved()
        return Explained(
            plain(tree), tuple(_entries(tree, (), self.declared)), notices, problems, self.declared
        )

    def _resolved(self) -> Mapping[str, Resolved]:
        order: tuple[LayerKind, ...] = get_args(LayerKind)
        layers = sorted(
            (checked.layer for checked in self._layers), key=lambda layer: order.index(layer.origin.kind)
        )
        return resolve([self._default, *layers])


def _size_name(size: Resolved) -> str:
    name = str(size.value)
    if not _SIZE_NAME.fullmatch(name) or f"{name}.json" in (PROJECT_FILE, LOCAL_RUN_FILE):
        message = f"{size.origin.place}: model_size {name!r} names no size file; use a plain name such as 1b."
        raise HparamsError(message, path=size.origin.path, line=size.origin.line, key="model_size")
    return name


def _strict_error(problems: Sequence[Problem]) -> HparamsError:
    first = problems[0]
    message = " ".join(problem.message for problem in problems)
    origin = first.origin
    return HparamsError(message, path=origin.path, line=origin.line, column=origin.column, key=first.key)


def _entries(tree: Mapping[str, Resolved], path: KeyPath, declared: Group) -> Iterator[Entry]:
    for name, node in tree.items():
        if node.children:
            yield from _entries(node.children, (*path, name), declared)
        else:
            yield _entry(node, (*path, name), declared.find((*path, name)))


def _entry(node: Resolved, path: KeyPath, member: Field | Group | None) -> Entry:
    if member is None or member.path != path:  # beneath a free-form field such as `extra`
        return Entry(path, node.value, node.origin, node.overridden, is_declared=False)
    unit = member.unit if isinstance(member, Field) else None
    return Entry(
        path, node.value, node.origin, node.overridden, True, member.default, member.description, unit
    )
