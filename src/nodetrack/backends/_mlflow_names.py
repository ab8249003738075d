"""Names and params as MLflow takes them, and back.

MLflow takes ASCII letters and digits, `_ - . space : /`, at most 250 characters, and refuses names that would
be another path when read as one (`a//b`, `../a`). What it does not take is written as in a URL, with `:` for
`%`: `v1.2.0+cu121/mAP@50` is `v1.2.0:2Bcu121/mAP:4050`. An empty part is `::`. A name that is still too long
ends in `::` and a hash, and a tag of the run keeps what it was.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote, unquote

from nodetrack.records import JsonValue

#: MLflow's limit is 250: this leaves room for a suffix such as `__v12`.
LONGEST_NAME: Final = 240
#: What every MLflow server takes. Newer ones take 6 000, which nobody reads in a table.
LONGEST_VALUE: Final = 500
#: Follows the name of a metric whose value was infinite; no other name ends in it.
INFINITE: Final = "::inf"
#: The tag that keeps a name that was cut is this and the hash in the name.
CUT_NAME_TAG: Final = "nodetrack.name."

_EMPTY: Final = "::"
_CUT: Final = re.compile(r"::([0-9a-f]{16})\Z")


@functools.lru_cache(maxsize=8192)  # a run logs the same names again and again
def legal(name: str) -> str:
    """The name for MLflow. Different names get different ones; `original` is the inverse."""
    return legal_path(name.split("/"))


def legal_path(parts: Sequence[str]) -> str:
    """The name for MLflow of something in something: a `/` within a part is not one between two parts."""
    name = "/".join(_legal_part(part) for part in parts)
    if len(name) <= LONGEST_NAME:
        return name
    tail = f"::{_digest(name)}"
    return name[: LONGEST_NAME - len(tail)] + tail


def original(name: str, tags: Mapping[str, str] | None = None) -> str:
    """What `legal` was given. For a name that was cut, `tags` are the tags of its run."""
    cut = cut_mark(name)
    if cut is not None and tags is not None and CUT_NAME_TAG + cut in tags:
        return tags[CUT_NAME_TAG + cut]
    return "/".join("" if part == _EMPTY else unquote(part.replace(":", "%")) for part in name.split("/"))


def cut_mark(name: str) -> str | None:
    """The hash at the end of a name that was too long; None if it is whole."""
    found = _CUT.search(name)
    return found[1] if found else None


def short(text: str, longest: int = LONGEST_VALUE) -> str:
    """The text, or its beginning with a mark that tells two long texts apart."""
    text = text.replace("\0", "\\0")  # which databases refuse
    if len(text) <= longest:
        return text
    mark = f"… [{len(text)} characters, sha256 {_digest(text)}]"
    return text[: longest - len(mark)] + mark


def params_of(config: Mapping[str, JsonValue]) -> dict[str, str]:
    """A nested config as params: `{"model": {"width": 8}}` is `model/width` = `8`."""
    return {legal_path(path): short(value_text(value)) for path, value in _leaves(config, ())}


def new_params(known: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """What to add to the params that the run has, none of which can be changed, so that it has each value.

    A value that differs becomes `name__v2`, the next `name__v3`; a value that the run has under one of them
    is not added again, in whatever order and however often configs arrive.
    """
    new: dict[str, str] = {}
    for name, value in wanted.items():
        for version in _versions(name):
            if version != name and version in wanted:  # the user's own name
                continue
            if version not in known:
                new[version] = value
            if known.get(version, value) == value:
                break
    return new


def value_text(value: JsonValue) -> str:
    """A value as MLflow's own client would write it; lists as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | Sequence):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value)


def _versions(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}__v{number}"
        number += 1


def _leaves(
    config: Mapping[str, JsonValue], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _legal_part(part: str) -> str:
    # MLflow refuses `.`, and whatever begins with two dots.
    first = ":2E" if part == "." or part.startswith("..") else ""
    # `quote` leaves letters, digits and `_.-~`, and of these MLflow takes all but the last.
    rest = quote(part[1:] if first else part, safe=" ").replace("~", "%7E").replace("%", ":")
    return first + rest or _EMPTY


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
