"""Whether what was decoded is what the format says: checked once, when a record is made.

A record can be whole and still say what no version of this library writes, because another program or a
lost bit of memory wrote it. Who reads records may rely on their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, TypeGuard

from nodetrack.records import JsonValue, StoredValue

Check: TypeAlias = Callable[[object], bool]

_NUMBERS: Final = frozenset((int, float))
_SCALARS: Final = frozenset((type(None), bool, int, float, str, bytes))
_STATES: Final = ("finished", "crashed", "terminated")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer, and no truth value."""
    return value.__class__ is int


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is text."""
    return value.__class__ is str


def is_state(value: object) -> bool:
    """Whether an attempt can have ended like this."""
    return value in _STATES


def are_values(values: object) -> TypeGuard[list[StoredValue]]:
    """Whether these are the values of a row: numbers and typed values. Rows come by the million."""
    return values.__class__ is list and (
        _NUMBERS.issuperset(map(type, values)) or all(map(_is_value, values))
    )


def _is_value(value: object) -> bool:
    return value.__class__ in _NUMBERS or are_plain(value)


def are_plain(entries: object) -> TypeGuard[Mapping[str, JsonValue]]:
    """Whether this is a map of text to whatever JSON can hold, or bytes, all the way down."""
    return isinstance(entries, dict) and _is_plain(entries)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(is_text, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value.__class__ in _SCALARS


def are_names(names: object) -> TypeGuard[list[str]]:
    """Whether these are the names of a key set."""
    return isinstance(names, list) and all(map(is_text, names))


def is_context(context: object) -> TypeGuard[Mapping[str, str]]:
    """Whether this is the context of a key set."""
    return isinstance(context, dict) and all(map(is_text, (*context, *context.values())))


def are_labels(labels: object) -> TypeGuard[Mapping[str, JsonValue]]:
    """Whether these are name, tags, notes, group and job type, as far as given."""
    if not are_plain(labels):
        return False
    tags = labels.get("tags")
    texts = [labels.get(name) for name in ("name", "notes", "group", "job_type")]
    return (tags is None or are_names(tags)) and all(text is None or is_text(text) for text in texts)


_ASKED_OF_EVENT: Final[Mapping[str, Mapping[str, Check]]] = {
    "rewind": {"step": is_integer},
    "checkpoint": {"step": is_integer, "counter": is_integer},
    "define_metric": {"name": is_text},
}


def is_complete(name: str, data: Mapping[str, JsonValue]) -> bool:
    """Whether an event says what its readers ask of one of that name."""
    return all(check(data.get(entry)) for entry, check in _ASKED_OF_EVENT.get(name, {}).items())
