"""JSON text to values, knowing the line and column of every key and saying what is wrong in plain words.

The standard library decides what is JSON and what its values are. It forgets where a key stood and keeps
the last of two equal keys in silence, so a second pass over the tokens, which may rely on the text being
well formed, notes the places and the repetitions.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, cast

from nodetrack.hparams.layers import Json, KeyPath, Mark, dotted

MAXIMUM_DEPTH = 50
"""Objects and lists inside each other; deeper than this is a mistake, and recursion stays safe."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True, slots=True)
class DuplicateKey:
    """A key that one object holds twice; the later value is the one that counts."""

    path: KeyPath
    first: Mark
    again: Mark


@dataclass(frozen=True, slots=True)
class Document:
    """What a text holds. A key inside a list has no mark: lists are replaced whole."""

    value: Json
    marks: dict[KeyPath, Mark]
    duplicates: tuple[DuplicateKey, ...]


class JsonTextError(ValueError):
    """The text is not JSON as we read it. Attributes: `hint` (what to do), `mark`, `line_text`."""

    def __init__(self, hint: str, mark: Mark, line_text: str) -> None:
        super().__init__(f"line {mark.line}, column {mark.column}: {hint}")
        self.hint = hint
        self.mark = mark
        self.line_text = line_text


def parse_json(text: str) -> Document:
    """Read one JSON value; NaN, infinities and numbers too large for a float are refused.

    Raises `JsonTextError` with the place of the fault and a hint at what to change.
    """
    places = _Places(text)
    try:
        value = cast("Json", json.loads(text))
    except json.JSONDecodeError as error:
        hint, offset = _explain(text, error)
        places.fail(hint, offset)
    except RecursionError:
        places.fail(f"values are nested more than {MAXIMUM_DEPTH} deep", 0)
    except ValueError as error:  # an integer with more digits than Python converts
        places.fail(f"a number cannot be read: {error}", 0)
    scan = _Scan(text, places)
    scan.run()
    return Document(value, scan.marks, tuple(scan.duplicates))


class _Places:
    """Offsets of a text as lines and columns."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line_starts = [0, *(found.end() for found in re.finditer("\n", text))]

    def mark(self, offset: int) -> Mark:
        line = bisect_right(self._line_starts, offset)
        return Mark(line, offset - self._line_starts[line - 1] + 1)

    def fail(self, hint: str, offset: int) -> NoReturn:
        mark = self.mark(offset)
        line_text = self._text[self._line_starts[mark.line - 1] :].split("\n", 1)[0]
        raise JsonTextError(hint, mark, line_text.rstrip("\r")) from None


class _Scan:
    """Walk the tokens of well-formed JSON, noting keys; see the module's docstring."""

    def __init__(self, text: str, places: _Places) -> None:
        self._tokens: Iterator[re.Match[str]] = _TOKEN.finditer(text)
        self._places = places
        self.marks: dict[KeyPath, Mark] = {}
        self.duplicates: list[DuplicateKey] = []

    def run(self) -> None:
        self._value(next(self._tokens), (), depth=0, in_list=False)

    def _value(self, token: re.Match[str], path: KeyPath, depth: int, *, in_list: bool) -> None:
        if depth > MAXIMUM_DEPTH:
            self._places.fail(f"values are nested more than {MAXIMUM_DEPTH} deep", token.start())
        if token[0] == "{":
            self._object(path, depth + 1, in_list=in_list)
        elif token[0] == "[":
            self._array(path, depth + 1)
        else:
            self._check_scalar(token)

    def _object(self, path: KeyPath, depth: int, *, in_list: bool) -> None:
        seen: dict[str, Mark] = {}
        for token in self._tokens:
            if token[0] == "}":
                return
            if token[0] == ",":
                continue
            key_path = (*path, self._key(token, path, seen))
            if not in_list:
                self.marks[key_path] = self._places.mark(token.start())
            next(self._tokens)  # the colon
            self._value(next(self._tokens), key_path, depth, in_list=in_list)

    def _key(self, token: re.Match[str], path: KeyPath, seen: dict[str, Mark]) -> str:
        key, mark = cast("str", json.loads(token[0])), self._places.mark(token.start())
        if key in seen:
            self.duplicates.append(DuplicateKey((*path, key), seen[key], mark))
        seen.setdefault(key, mark)
        return key

    def _array(self, path: KeyPath, depth: int) -> None:
        for token in self._tokens:
            if token[0] == "]":
                return
            if token[0] != ",":
                self._value(token, path, depth, in_list=True)

    def _check_scalar(self, token: re.Match[str]) -> None:
        if token[0] in ("NaN", "Infinity", "-Infinity"):
            hint = f"JSON has no {token[0]}; write a number, or null for None"
            self._places.fail(hint, token.start())
        if (
            token[0][0] in "-0123456789"
            and math.isinf(float(token[0]))
            and not token[0].lstrip("-").isdigit()
        ):
            self._places.fail(f"{_shortened(token[0])} is too large for a number", token.start())


def _shortened(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:20]}…"


_Rule = Callable[[str], str | None]


def _starts(pattern: str, hint: str) -> _Rule:
    """A rule: when the text goes on with `pattern`, the hint, in which {0} is what was found."""
    compiled = re.compile(pattern)

    def rule(rest: str) -> str | None:
        found = compiled.match(rest)
        return hint.format(_shortened(found[0])) if found else None

    return rule


_HINTS: tuple[_Rule, ...] = (
    _starts(r"//|/\*|#", "JSON has no comments; delete the one that starts here"),
    _starts(r"<<<<<<<|=======|>>>>>>>", "a merge conflict was left in the file; resolve it"),
    _starts(r"'", 'text stands in double quotes, "like this"'),
    _starts(r"True|False|None|nil|undefined", "{0} is not JSON; write true, false or null"),
    _starts(r"(?i)[+-]?(nan|inf(inity)?)\b", "JSON has no {0}; write a number, or null for None"),
    _starts(r"[+.]\.?\d", "a number starts with a digit; write 0.5 or 1e-5"),
)

_MESSAGES = {
    "Invalid control character at": "a text is not closed on its line; add the missing double quote",
    "Unterminated string starting at": "the text that starts here is not closed; add the double quote",
    "Expecting ':' delimiter": "a colon is missing between the key and its value",
    "Expecting ',' delimiter": "a comma is missing before this, or a bracket after it",
    "Expecting property name enclosed in double quotes": "a key is expected here, in double quotes",
    "Expecting value": "a value is expected here",
    "Extra data": "the value ended before this; delete the rest, or move it inside the brackets",
}


def _explain(text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    """What is wrong and where; the place is the comma for a trailing comma, else the parser's."""
    comma = _trailing_comma(text, error.pos)
    if comma is not None:
        return "a comma stands before the closing bracket; delete it", comma
    for rule in _HINTS:
        hint = rule(text[error.pos : error.pos + 40])
        if hint:
            return hint, error.pos
    if not text[error.pos :].strip():
        return "the text ends too early; a closing bracket or a value is missing", error.pos
    return _MESSAGES.get(error.msg, f"this is not JSON ({error.msg})"), error.pos


def _trailing_comma(text: str, offset: int) -> int | None:
    """The comma before a closing bracket at `offset`. Python 3.13 already points at the comma."""
    if re.match(r",\s*[}\]]", text[offset:]):
        return offset
    before = text[:offset].rstrip()
    return len(before) - 1 if before.endswith(",") and text[offset : offset + 1] in ("}", "]") else None


def describe_duplicate(duplicate: DuplicateKey) -> str:
    """One clause about a repeated key, to follow the name of the file."""
    return (
        f"duplicate key {dotted(duplicate.path)!r}, first on line {duplicate.first.line}; "
        "the last value counts, so delete the other"
    )
