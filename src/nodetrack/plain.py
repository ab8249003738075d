"""Any configuration as plain JSON values.

People pass what their program has: an argparse namespace, a dataclass, a pydantic model, an OmegaConf tree,
a transformers config. All of them become dicts with text keys, lists, text, numbers, True, False and None,
which strict JSON can hold. Equal configurations become equal results, in whichever process: sets are sorted
and no memory address is written. Nothing here raises for what an object does when it is looked at, and the
result is bounded in depth, entries and length of text; where something was left out, the result says so.

Secrets are not this module's matter: see `redact`, which wants plain values.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import json
import math
import re
import types
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import singledispatch
from pathlib import PurePath
from typing import Protocol, TypeAlias, cast

from nodetrack.errors import UsageError

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

DEEPEST = 32
MOST_ENTRIES = 20_000
LONGEST_TEXT = 20_000
_LONGEST_DESCRIPTION = 1_000
_LARGEST_ARRAY = 1_000
_MORE = "…"


def plain(value: object) -> Plain:
    """The value as plain JSON values, from new containers.

    NaN and the infinities become "NaN", "Infinity" and "-Infinity"; integers beyond 64 bits, dates, paths,
    dtypes and the like become text; enumeration members their value; small arrays lists. What is not
    known becomes `<type: text>`.
    """
    return _Walk().value(value)


def plain_config(config: object) -> dict[str, Plain]:
    """A whole configuration as plain values; None is an empty one.

    Raises UsageError for what has no names in it, such as a list.
    """
    if config is None:
        return {}
    result = plain(config)
    if not isinstance(result, dict):
        raise UsageError(
            f"config is of type {_type_name(config)}, which has no named values: "
            "pass a mapping, a namespace, a dataclass or a pydantic model."
        )
    return result


# ---------------------------------------------------------------------------------------------------
# Values without parts


class _Branch(enum.Enum):
    """What `_leaf` answers for a value that has parts or is not known."""

    FOUND = enum.auto()


@singledispatch
def _leaf(_: object) -> Plain | _Branch:
    return _Branch.FOUND


@_leaf.register
def _(value: None) -> Plain:
    return value


@_leaf.register
def _(value: bool) -> Plain:
    return value


@_leaf.register
def _(value: int) -> Plain:
    number = int(value)
    return number if -(2**63) <= number < 2**64 else hex(number)


@_leaf.register
def _(value: float) -> Plain:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


@_leaf.register
def _(value: str) -> Plain:
    return _bounded(str.__str__(value), LONGEST_TEXT)


@_leaf.register(bytes)
@_leaf.register(bytearray)
def _(value: bytes | bytearray) -> Plain:
    """Text if it is text, hexadecimal digits otherwise."""
    try:
        return _bounded(value.decode(), LONGEST_TEXT)
    except UnicodeDecodeError:
        return _bounded(value.hex(), LONGEST_TEXT)


@_leaf.register(datetime.date)
@_leaf.register(datetime.time)
def _(value: datetime.date | datetime.time) -> Plain:
    return value.isoformat()


@_leaf.register
def _(value: datetime.timedelta) -> Plain:
    return value.total_seconds()


@_leaf.register(PurePath)
@_leaf.register(uuid.UUID)
@_leaf.register(decimal.Decimal)
@_leaf.register(complex)
@_leaf.register(range)
@_leaf.register(slice)
def _(value: object) -> Plain:
    return _bounded(str(value), LONGEST_TEXT)


@_leaf.register(type)
@_leaf.register(types.FunctionType)
@_leaf.register(types.BuiltinFunctionType)
@_leaf.register(types.MethodType)
def _(value: type | types.FunctionType | types.BuiltinFunctionType | types.MethodType) -> Plain:
    return f"{value.__module__}.{value.__qualname__}"


def _bounded(text: str, longest: int) -> str:
    """The text cut to a length, without lone surrogates, which no file could hold."""
    cut = text if len(text) <= longest else f"{text[:longest]}{_MORE} ({len(text)} characters)"
    return cut.encode("utf-8", "backslashreplace").decode()


# ---------------------------------------------------------------------------------------------------
# Values with parts


class _PydanticModel(Protocol):
    def model_dump(self, *, warnings: bool) -> Mapping[object, object]: ...


class _WithToDict(Protocol):
    def to_dict(self) -> Mapping[object, object]: ...


def _named_parts(value: object) -> Mapping[object, object] | None:
    """The named parts of an object that has such; None for any other."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return cast(Mapping[object, object], vars(value))
    if dataclasses.is_dataclass(value):
        return _attributes(value, (field.name for field in dataclasses.fields(value)))
    for names in ("__struct_fields__", "_fields"):  # msgspec, named tuples
        if isinstance(fields := getattr(type(value), names, None), tuple):
            return _attributes(value, fields)
    if (attributes := getattr(type(value), "__attrs_attrs__", None)) is not None:
        return _attributes(value, (attribute.name for attribute in attributes))
    return _dumped(value)


def _attributes(value: object, names: Iterable[str]) -> Mapping[object, object]:
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _dumped(value: object) -> Mapping[object, object] | None:
    """What the object's own class writes of it: pydantic, transformers, ml_collections."""
    kind = type(value)
    if hasattr(kind, "model_dump"):
        dumped = cast(_PydanticModel, value).model_dump(warnings=False)
    elif hasattr(kind, "to_dict") and not hasattr(value, "shape"):  # a data frame's would be its data
        dumped = cast(_WithToDict, value).to_dict()
    else:
        return None
    return dumped if isinstance(dumped, Mapping) else None


def _array(value: object) -> object:
    """A scalar or a small array of numpy, torch or jax as Python numbers; a large one as a description.

    None for what is not an array.
    """
    shape = getattr(value, "shape", None)
    as_list = getattr(value, "tolist", None)
    if not isinstance(shape, tuple) or as_list is None:
        return None
    if math.prod(shape) <= _LARGEST_ARRAY:
        return cast("object", as_list())
    return f"<{_type_name(value)}: {getattr(value, 'dtype', 'unknown')} {'x'.join(map(str, shape))}>"


class _Walk:
    """One pass over one value, with what bounds it."""

    def __init__(self) -> None:
        self._entries_left = MOST_ENTRIES
        self._open: set[int] = set()  # the containers that the walk is inside of

    def value(self, value: object) -> Plain:
        """The value as plain values; a description of it if looking at it raises."""
        try:
            leaf = _leaf(value)
            return self._branch(value) if isinstance(leaf, _Branch) else leaf
        except Exception as error:  # any object may come here, and do anything when looked at
            return f"<{_type_name(value)}: unreadable, {type(error).__name__}>"

    def _branch(self, value: object) -> Plain:
        if id(value) in self._open:
            return "<cycle>"
        if len(self._open) >= DEEPEST:
            return "<too deep>"
        self._open.add(id(value))
        try:
            return self._parts(value)
        finally:
            self._open.remove(id(value))

    def _parts(self, value: object) -> Plain:
        if isinstance(value, enum.Enum):
            return self.value(value.value) if not isinstance(_leaf(value.value), _Branch) else value.name
        if (array := _array(value)) is not None:
            return self.value(array)
        if (parts := _named_parts(value)) is not None:
            return self._mapping(parts)
        if isinstance(value, Set):
            return sorted(self._items(value), key=json.dumps)
        if isinstance(value, Sequence):
            return self._items(value)
        return _described(value)

    def _mapping(self, mapping: Mapping[object, object]) -> dict[str, Plain]:
        result: dict[str, Plain] = {}
        for number, key in enumerate(mapping):
            if self._entries_left <= 0:
                result[_MORE] = f"<{len(mapping) - number} more>"
                break
            self._entries_left -= 1
            result[self._unique_key(key, result)] = self._item_of(mapping, key)
        return result

    def _item_of(self, mapping: Mapping[object, object], key: object) -> Plain:
        """One value; it may be missing, or an interpolation that leads nowhere (OmegaConf)."""
        try:
            value = mapping[key]
        except Exception as error:  # one bad entry must not cost the others
            return f"<unreadable, {type(error).__name__}>"
        return self.value(value)

    def _unique_key(self, key: object, taken: Mapping[str, Plain]) -> str:
        """The key as text; 1 and "1" stay two entries."""
        plain_key = self.value(key)
        text = plain_key if isinstance(plain_key, str) else str(key)
        while text in taken:
            text = f"{text} ({type(key).__name__})"
        return text

    def _items(self, items: Set[object] | Sequence[object]) -> list[Plain]:
        result: list[Plain] = []
        for number, item in enumerate(items):
            if self._entries_left <= 0:
                return [*result, f"<{len(items) - number} more>"]
            self._entries_left -= 1
            result.append(self.value(item))
        return result


# ---------------------------------------------------------------------------------------------------
# Values that are not known

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SPEAKS_FOR_ITSELF = re.compile(
    r"(numpy|torch|jax|ml_dtypes)\b.*\.(\w*dtypes?\w*|device|Size)", re.IGNORECASE
)


def _described(value: object) -> str:
    """`<type: text>`, or the bare text of a dtype or a device."""
    name, text = _type_name(value), _ADDRESS.sub("", str(value))
    if _SPEAKS_FOR_ITSELF.fullmatch(name):
        return text
    if text in {f"<{name} object>", f"<{type(value).__qualname__} object>"}:
        return f"<{name}>"
    return f"<{name}: {_bounded(text, _LONGEST_DESCRIPTION)}>"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
