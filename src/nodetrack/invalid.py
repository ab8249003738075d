"""What is wrong with a value that somebody wrote: in plain words, and without secrets (promise P9)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from nodetrack.redact import redact, redact_text

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_LONGEST: Final = 200
#: By the type of pydantic's error, whose own words are about its parser.
_WORDS: Final = {
    "bool_parsing": "true or false is needed",
    "bool_type": "true or false is needed",
    "dict_type": "a mapping is needed",
    "float_parsing": "a number is needed",
    "float_type": "a number is needed",
    "int_from_float": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_parsing_size": "the number is too large",
    "int_type": "a whole number is needed",
    "list_type": "a list is needed",
    "path_type": "a path is needed",
    "string_type": "a text is needed",
    "tuple_type": "a list is needed",
}
_BOUNDS: Final = {
    "greater_than": ("gt", "it has to be greater than"),
    "greater_than_equal": ("ge", "it has to be at least"),
    "less_than": ("lt", "it has to be less than"),
    "less_than_equal": ("le", "it can be at most"),
    "literal_error": ("expected", "it can be"),
    "string_too_long": ("max_length", "the most characters that it can have are"),
}


def reason(error: ErrorDetails) -> str:
    """One of pydantic's errors as a part of a sentence."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind == "string_too_short":
        return "it must not be empty"
    if kind in ("value_error", "assertion_error"):
        return redact_text(str(context["error"]).rstrip("."))
    return _WORDS.get(kind) or redact_text(error["msg"].rstrip("."))


def shown(value: object, key: str = "") -> str:
    """A value for a message, without the secrets that its key or its shape gives away.

    Of a text that holds JSON objects nothing is shown from the first one on: what is wrong with it may be
    just what would tell a secret.
    """
    [masked] = redact({key: value}).values()
    if isinstance(masked, str) and "{" in masked:
        masked = f"{masked.partition('{')[0]}{{…"
    text = redact_text(repr(masked))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant; "" if none is near."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")
