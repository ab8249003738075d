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
    return _is_number(value) or are_plain(value)


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


def _is_number(value: object) -> bool:
    return value.__class__ in _NUMBERS


def _is_process(process: object) -> bool:
    return are_plain(process) and _fits(process, {"pid": is_integer, "command": are_names})


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_ASKED_OF_FACTS: Final[Mapping[str, Check]] = {
    "version": is_text,
    "role": is_text,
    "uid": is_text,
    "environment": is_text,
    "previous_run": _or_none(is_text),
    "started_ns": is_integer,
    "stale_after_seconds": _is_number,
    "process": _is_process,
    "process_created_at": _or_none(_is_number),
    "host": are_plain,
    "git": _or_none(are_plain),
}


def are_facts(facts: object) -> TypeGuard[Mapping[str, JsonValue]]:
    """Whether this can be what an attempt says of its process, machine and version, as far as given."""
    return are_plain(facts) and _fits(facts, _ASKED_OF_FACTS)


_ASKED_OF_LABELS: Final[Mapping[str, Check]] = {
    "name": _or_none(is_text),
    "tags": _or_none(are_names),
    "notes": _or_none(is_text),
    "group": _or_none(is_text),
    "job_type": _or_none(is_text),
}


def are_labels(labels: object) -> TypeGuard[Mapping[str, JsonValue]]:
    """Whether these are name, tags, notes, group and job type, as far as given."""
    return are_plain(labels) and _fits(labels, _ASKED_OF_LABELS)


def _fits(entries: Mapping[str, JsonValue], checks: Mapping[str, Check]) -> bool:
    return all(check(entries[name]) for name, check in checks.items() if name in entries)


_ASKED_OF_EVENT: Final[Mapping[str, Mapping[str, Check]]] = {
    "rewind": {"step": is_integer},
    "checkpoint": {"step": is_integer, "counter": is_integer},
    "define_metric": {"name": is_text},
}


def is_complete(name: str, data: Mapping[str, JsonValue]) -> bool:
    """Whether an event says what its readers ask of one of that name."""
    return all(check(data.get(entry)) for entry, check in _ASKED_OF_EVENT.get(name, {}).items())
