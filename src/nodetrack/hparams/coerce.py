"""A written value as the type of its default, or the reason why it is none.

Text becomes the number or truth value it spells, a whole float becomes an int, an int becomes a float.
Nothing else is converted: a number is never a truth value, and 16.5 is never an int.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import get_args, get_origin

from nodetrack.hparams.fields import ValueType
from nodetrack.hparams.layers import Json

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_LONGEST_WHOLE_NUMBER = 4000  # digits; Python refuses to convert more than 4300
_TRUTH = {"true": True, "false": False}


class CannotCoerceError(ValueError):
    """The value is not of the wanted type. The message reads on after the key: `must be …`."""


def coerce(value: Json, wanted: ValueType) -> Json:
    """The value as `wanted`; None passes, because null sets None.

    Raises `CannotCoerceError`.
    """
    if value is None:
        return None
    if get_origin(wanted) is list:
        return _to_list(value, wanted)
    return _CONVERSIONS[wanted](value)


def is_worth_a_notice(before: Json, after: Json) -> bool:
    """Whether a conversion changed more than an int in the place of a float."""
    if isinstance(before, list) and isinstance(after, list):
        return any(is_worth_a_notice(*pair) for pair in zip(before, after, strict=True))
    return type(before) is not type(after) and not (type(before) is int and type(after) is float)


def shown(value: Json) -> str:
    """A value as JSON writes it, short enough for a message."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= 60 else f"{text[:57]}…"


def _to_bool(value: Json) -> bool:
    if isinstance(value, bool):
        return value
    truth = _TRUTH.get(value.strip().lower()) if isinstance(value, str) else None
    if truth is None:
        raise CannotCoerceError(f"must be true or false, not {shown(value)}")
    return truth


def _to_int(value: Json) -> int:
    number = _number(value)
    if isinstance(number, int):
        return number
    if number is None or not number.is_integer():
        raise CannotCoerceError(f"must be a whole number, not {shown(value)}")
    return int(number)


def _to_float(value: Json) -> float:
    number = _number(value)
    try:
        converted = None if number is None else float(number)
    except OverflowError:
        converted = None
    if converted is None or not math.isfinite(converted):
        raise CannotCoerceError(f"must be a finite number, not {shown(value)}")
    return converted


def _number(value: Json) -> int | float | None:
    """The number that a value is or spells; int when it is written without point and exponent."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if not _NUMBER.fullmatch(text):
        return None
    is_whole = text.lstrip("+-").isdigit() and len(text) < _LONGEST_WHOLE_NUMBER
    return int(text) if is_whole else float(text)


def _to_str(value: Json) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise CannotCoerceError(f"must be a text, not {shown(value)}")


def _to_list(value: Json, wanted: ValueType) -> list[Json]:
    if not isinstance(value, list):
        raise CannotCoerceError(f"must be a list, not {shown(value)}")
    (item_type,) = get_args(wanted)
    return [_item(item, item_type, index) for index, item in enumerate(value)]


def _item(value: Json, wanted: ValueType, index: int) -> Json:
    try:
        return coerce(value, wanted)
    except CannotCoerceError as error:
        raise CannotCoerceError(f"{error} (item {index})") from None


_CONVERSIONS: dict[ValueType, Callable[[Json], Json]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
}
