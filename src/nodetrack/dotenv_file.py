"""Reading a `.env`: whatever stands in it, it costs little, and a process can be started with it."""

from __future__ import annotations

import io
import logging
import os
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: More of it is not read: whoever has that much in it has something else than variables there.
MOST_BYTES: Final = 64 * 1024
#: The system starts no process with a variable of 128 KiB.
_MOST_VALUE_CHARACTERS: Final = 64 * 1024

logger = logging.getLogger("nodetrack")


def read_dotenv(path: Path) -> dict[str, str]:
    """What it sets, as far as an environment can hold it. Raises nothing."""
    from dotenv import dotenv_values

    try:
        text = io.StringIO(_beginning(path).decode("utf-8-sig"))
        written = dotenv_values(stream=text, interpolate=False)
    except (OSError, ValueError) as error:  # it may be another program's; ValueError: it is no UTF-8
        logger.debug("%s is passed over: %s.", path, error)
        return {}
    return _expanded(written, path)


def _beginning(path: Path) -> bytes:
    """As much of the file as is read, in whole lines."""
    with path.open("rb") as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) <= MOST_BYTES:
        return found
    return found[: found.rfind(b"\n", 0, MOST_BYTES) + 1]


def _expanded(written: Mapping[str, str | None], path: Path) -> dict[str, str]:
    """With `${NAME}` replaced, as python-dotenv does it; that copies the whole environment for each line."""
    values: dict[str, str] = {}
    for name, text in written.items():
        value = _with_variables(text, values) if text is not None and "${" in text else text
        if value is None:
            continue
        if len(value) > _MOST_VALUE_CHARACTERS or "\0" in name + value or "=" in name:
            logger.debug("%s in %s can be in no environment and is passed over.", name, path)
            continue
        values[name] = value
    return values


def _with_variables(text: str, values: dict[str, str]) -> str:
    from dotenv.variables import parse_variables

    known: ChainMap[str, str | None] = ChainMap({}, values, os.environ)  # type: ignore[arg-type]  # only read
    pieces: list[str] = []
    size = 0
    for atom in parse_variables(text):
        pieces.append(atom.resolve(known))
        size += len(pieces[-1])
        if size > _MOST_VALUE_CHARACTERS:  # values of values may grow without end
            break
    return "".join(pieces)
