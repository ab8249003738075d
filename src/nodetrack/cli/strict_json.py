"""JSON that every strict parser reads: numbers that JSON has no word for are written as text.

NaN and the infinities become "NaN", "Infinity" and "-Infinity", bytes (of images) become base64. Everything
else is written as it is; characters beyond ASCII are escaped, so that the result survives any terminal.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def strict(value: object) -> Json:
    """The value as strict JSON can hold it. Raises TypeError for an object that is no value of a journal."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else nonfinite_word(value)
    if isinstance(value, Mapping):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Sequence):
        return [strict(item) for item in value]
    raise TypeError(f"{type(value).__name__} is no value of a journal")


def nonfinite_word(value: float) -> str:
    """How a number that is not finite is spelled."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_line(value: object) -> str:
    """One value in one line, without the line's end."""
    try:
        return _encode(value)
    except (TypeError, ValueError):  # NaN, bytes, or a mapping that is no dict: rare, and so is the walk
        return _encode(strict(value))


def json_text(value: object) -> str:
    """One value for people and programs, indented."""
    return json.dumps(strict(value), allow_nan=False, indent=2)
