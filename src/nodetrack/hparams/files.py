"""A hyper-parameter file as a layer, or a message that says what is wrong with it and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from nodetrack.errors import HparamsError
from nodetrack.hparams.json_text import Document, JsonTextError, describe_duplicate, parse_json
from nodetrack.hparams.layers import Json, Layer, Mark, Origin, Problem, Reading, dotted

FileKind = Literal["project", "model_size", "local"]
_LINE_SHOWN_CHARACTERS = 80


def read_layer(path: Path, kind: FileKind) -> Reading | None:
    """The file as a layer, or None when there is no such file.

    Raises `HparamsError` for whatever keeps the file from being read as one JSON object.
    """
    text = _read_text(path)
    if text is None:
        return None
    origin = Origin(kind, str(path), path)
    if not text.strip():
        message = f"{path} is empty and read as {{}}; delete it or write values into it."
        return Reading(Layer(origin, {}), (Problem(message, origin),))
    document = _parse(text, path)
    layer = Layer(origin, _as_object(document.value, path), document.marks)
    return Reading(layer, _duplicates(document, origin))


def _read_text(path: Path) -> str | None:
    raw = _read_bytes(path)
    return None if raw is None else _decode(raw, path)


def _read_bytes(path: Path) -> bytes | None:
    if path.is_dir():
        raise HparamsError(f"{path} is a folder; a file of hyper-parameters is expected there.", path=path)
    if path.exists() and not path.is_file():  # a named pipe would be waited on for ever
        raise HparamsError(f"{path} is not a regular file; put a JSON file there.", path=path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise HparamsError(f"{path} is a link to nothing; repair or delete it.", path=path) from None
        return None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise HparamsError(f"{path} cannot be read: {reason}.", path=path) from error


def _decode(raw: bytes, path: Path) -> str:
    """UTF-8, with or without the mark that Windows editors put at the start."""
    encoding = json.detect_encoding(raw)
    if not encoding.startswith("utf-8"):
        name = encoding[:6].upper()
        message = f"{path}, line 1, column 1: the file is written in {name}; save it as UTF-8."
        raise HparamsError(message, path=path, line=1, column=1)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _undecodable(raw, error.start, path) from None


def _undecodable(raw: bytes, offset: int, path: Path) -> HparamsError:
    start = raw.rfind(b"\n", 0, offset) + 1
    mark = Mark(raw.count(b"\n", 0, offset) + 1, len(raw[start:offset].decode("utf-8-sig", "replace")) + 1)
    line_text = raw[start:].split(b"\n", 1)[0].decode("utf-8-sig", "replace")
    return _at(path, mark, f"byte 0x{raw[offset]:02X} is not UTF-8; save the file as UTF-8", line_text)


def _parse(text: str, path: Path) -> Document:
    try:
        return parse_json(text)
    except JsonTextError as error:
        raise _at(path, error.mark, error.hint, error.line_text) from None


def _at(path: Path, mark: Mark, hint: str, line_text: str) -> HparamsError:
    shown = _shown(line_text, mark)
    message = f"{path}, line {mark.line}, column {mark.column}: {hint}." + (
        f" The line is: {shown}" if shown else ""
    )
    return HparamsError(message, path=path, line=mark.line, column=mark.column)


def _shown(line_text: str, mark: Mark) -> str:
    """The line without its indentation, cut to the part around the fault when it is long."""
    if len(line_text) <= _LINE_SHOWN_CHARACTERS:
        return line_text.strip()
    start = max(0, mark.column - 1 - _LINE_SHOWN_CHARACTERS // 2)
    return f"…{line_text[start : start + _LINE_SHOWN_CHARACTERS].strip()}…"


def _as_object(value: Json, path: Path) -> dict[str, Json]:
    if isinstance(value, dict):
        return value
    found = "a list" if isinstance(value, list) else "a single value"
    message = f'{path}, line 1: {found} stands at the top; an object is expected, {{"key": value}}.'
    raise HparamsError(message, path=path, line=1)


def _duplicates(document: Document, origin: Origin) -> tuple[Problem, ...]:
    return tuple(
        Problem(
            f"{origin.at(found.again).place}, column {found.again.column}: {describe_duplicate(found)}.",
            origin.at(found.again),
            dotted(found.path),
        )
        for found in document.duplicates
    )
