"""The declared keys as a tree, read from a pydantic model: what `check` types, names and explains by."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, Union, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from nodetrack.hparams.layers import Json, KeyPath, dotted

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

ValueType: TypeAlias = "type[object] | types.GenericAlias"
"""What a value is coerced to: `int`, `float`, `bool`, `str`, or a list of one of them."""


@dataclass(frozen=True)
class Field:
    """One declared value. `value_type` is None when anything may stand here (`extra`)."""

    path: KeyPath
    default: Json
    value_type: ValueType | None
    description: str
    unit: str | None
    rule: object
    """The annotation with its bounds, for pydantic."""

    @cached_property
    def _adapter(self) -> TypeAdapter[object]:
        return TypeAdapter(cast("type[object]", self.rule))

    def broken_rule(self, value: Json) -> str | None:
        """What the bounds or choices of this field say against a value of the right type."""
        try:
            self._adapter.validate_python(value, strict=True)
        except ValidationError as error:
            return error.errors()[0]["msg"].removeprefix("Input ").removeprefix("Value ")
        return None


@dataclass(frozen=True)
class Group:
    """An object of declared keys."""

    path: KeyPath
    members: Mapping[str, Field | Group]
    description: str
    default: dict[str, Json]

    def find(self, path: KeyPath) -> Field | Group | None:
        """What is declared under this path; beneath a free-form field, that field."""
        node: Field | Group | None = self
        for name in path:
            if isinstance(node, Field):
                return node if node.value_type is None else None
            node = node.members.get(name) if node else None
        return node

    def walk(self) -> Iterator[Field | Group]:
        """Everything declared below, in the order of declaration."""
        for member in self.members.values():
            yield member
            if isinstance(member, Group):
                yield from member.walk()

    def nearest(self, path: KeyPath) -> str | None:
        """The declared key that was probably meant by an unknown one.

        The same name in another object comes first, then a slip of the pen in the same object, then one
        anywhere.
        """
        parent = self.find(path[:-1])
        siblings = (
            [dotted(member.path) for member in parent.members.values()] if isinstance(parent, Group) else []
        )
        everywhere = [dotted(member.path) for member in self.walk()]
        return (
            next((key for key in everywhere if key.rpartition(".")[2] == path[-1]), None)
            or _closest(path[-1], siblings)
            or _closest(path[-1], everywhere)
        )


def _closest(name: str, keys: list[str]) -> str | None:
    """The key whose last part looks most like `name`."""
    by_name = {key.rpartition(".")[2].casefold(): key for key in reversed(keys)}
    found = get_close_matches(name.casefold(), by_name, n=1, cutoff=0.65)
    return by_name[found[0]] if found else None


def declared_fields(model: type[BaseModel]) -> Group:
    """The tree of a model's fields. Every field needs a default."""
    return _group(model, (), model.__doc__ or "")


def _group(model: type[BaseModel], path: KeyPath, description: str) -> Group:
    members = {name: _member(info, (*path, name)) for name, info in model.model_fields.items()}
    defaults = {name: member.default for name, member in members.items()}
    return Group(path, members, description, defaults)


def _member(info: FieldInfo, path: KeyPath) -> Field | Group:
    annotation = info.annotation
    description = info.description or ""
    if _is_model(annotation):
        return _group(cast("type[BaseModel]", annotation), path, description)
    extra = info.json_schema_extra
    unit = extra.get("unit") if isinstance(extra, dict) else None
    rule = Annotated[(annotation, *info.metadata)] if info.metadata else annotation
    default = cast("Json", info.get_default(call_default_factory=True))
    return Field(path, default, value_type(annotation), description, str(unit) if unit else None, rule)


def _is_model(annotation: object) -> bool:
    from pydantic import BaseModel

    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def value_type(annotation: object) -> ValueType | None:
    """The type behind `X | None`, a bounded X and a choice of literals; None when anything goes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return value_type(arguments[0])
    if origin is Literal:
        return type(arguments[0])
    if origin in (Union, types.UnionType):
        return value_type(next(part for part in arguments if part is not types.NoneType))
    if origin is list or annotation in (bool, int, float, str):
        return cast("ValueType", annotation)
    return None
