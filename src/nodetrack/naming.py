"""Flat metric names, for backends that have nothing but names (W&B, TensorBoard, MLflow).

Inside nodetrack a version is a field of every row. Outside, one row with the metric `loss` at step 7
becomes

    v0.1.0/loss   the metric under the version of the code that logged it
    latest/loss   the same value, under a name that outlives versions
    v0.1.0/step   the tracker's step, the x axis of v0.1.0/…
    latest/step   the same, the x axis of latest/… across all versions

and comes back from it. This module is the only place that knows these names. What it keeps apart:

- A metric of the user's own called `step` keeps its name (`v0.1.0/step`, `latest/step`); the tracker's
  step of such a row moves to the reserved name `nodetrack/step`, which no metric's flat name can be.
- Versions that begin with a digit are written `v<version>`, all others `v@<version>` (`v@main/loss`), so
  that a plain name such as `val/loss` is not mistaken for the version `al`.
- A version holds no `/` (see `check_version`), so the first `/` ends the view; a metric may hold any.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, cast

View = Literal["version", "latest", "plain"]
Context = tuple[tuple[str, object], ...] | Mapping[str, object]

RESERVED_STEP = "nodetrack/step"
LONGEST_NAME_BYTES = 1024

_LATEST = "latest"
_STEP = "step"
_MARK = "@"


class Flat(NamedTuple):
    """A flat name taken apart; `version` is None except in the version view."""

    view: View
    version: str | None
    metric: str


class FlatRow(NamedTuple):
    """A row read back from flat names; `version` and `step` are None where the row does not tell them."""

    version: str | None
    step: int | None
    values: dict[str, object]


# ---------------------------------------------------------------------------------------------------
# Legal names


def check_name(name: str) -> str | None:
    """Why `name` cannot be a metric's name, in words that complete "the name …"; None if it can.

    A legal name is any text that is not empty, can be encoded as UTF-8 and then takes at most 1024 bytes.
    """
    if not name:
        return "is empty"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which UTF-8 cannot encode"
    if size > LONGEST_NAME_BYTES:
        return f"takes {size} bytes in UTF-8, more than {LONGEST_NAME_BYTES}"
    return None


def check_version(version: str) -> str | None:
    """Why `version` cannot be a version, in words that complete "the version …"; None if it can."""
    if not version:
        return "is empty"
    illegal = next((character for character in version if not legal_in_version(character)), None)
    return None if illegal is None else f"holds {illegal!r}"


def legal_in_version(character: str) -> bool:
    """Whether a version may hold the character: all but `/`, white space and what cannot be printed."""
    return character.isprintable() and character not in " /"


# ---------------------------------------------------------------------------------------------------
# One name


def join(version: str, metric: str) -> str:
    """The name of `metric` under `version`: `v0.1.0/loss`. Both must be legal; `split` is the inverse."""
    return f"{_version_prefix(version)}/{metric}"


def latest(metric: str) -> str:
    """The name of `metric` whatever the version: `latest/loss`."""
    return f"{_LATEST}/{metric}"


def split(name: str) -> Flat:
    """Take a flat name apart. A name that neither `join` nor `latest` makes is plain, and whole."""
    head, _, metric = name.partition("/")
    if metric and head == _LATEST:
        return Flat("latest", None, metric)
    version = _version_of(head) if metric else None
    if version is not None:
        return Flat("version", version, metric)
    return Flat("plain", None, name)


def section(metric: str) -> str:
    """The part of a metric's name before its first `/`, under which charts are grouped; "" if none."""
    head, slash, _ = metric.partition("/")
    return head if slash else ""


def with_context(metric: str, context: Context) -> str:
    """`loss` in the context `stage=train` becomes `train/loss`: the values, in the order of their keys.

    One way only: the keys are gone, and `train/loss` may also be somebody's metric. A backend that
    has tags should be given the context as tags.
    """
    return "/".join([*_context_values(context), metric])


def _version_prefix(version: str) -> str:
    return f"v{version}" if _begins_with_digit(version) else f"v{_MARK}{version}"


def _version_of(head: str) -> str | None:
    """The inverse of `_version_prefix`; None for what it never makes."""
    marked = head.startswith(f"v{_MARK}")
    version = head[2:] if marked else head[1:]
    if head[:1] != "v" or check_version(version) is not None or _begins_with_digit(version) is marked:
        return None
    return version


def _begins_with_digit(version: str) -> bool:
    return "0" <= version[:1] <= "9"


def _context_values(context: Context) -> list[str]:
    pairs: Iterable[tuple[str, object]] = context.items() if isinstance(context, Mapping) else context
    return [str(value) for _, value in sorted(pairs, key=lambda pair: pair[0])]


# ---------------------------------------------------------------------------------------------------
# One row


class _RowNames(NamedTuple):
    """The flat names of one set of metrics, in the order of the metrics."""

    under_version: tuple[str, ...]
    under_latest: tuple[str, ...]
    steps: tuple[str, ...]


def flatten_row(
    version: str, step: int, values: Mapping[str, object], context: Context = ()
) -> dict[str, object]:
    """The row under flat names, each value and the tracker's step twice.

    What is to become one row outside must be merged before it is flattened: whether `v<version>/step` is
    the tracker's depends on the metrics of the whole row.
    """
    names = _row_names(version, tuple(values), tuple(_context_values(context)) if context else ())
    flat = dict(zip(names.under_version, values.values(), strict=True))
    flat.update(zip(names.under_latest, values.values(), strict=True))
    flat.update(dict.fromkeys(names.steps, step))
    return flat


def unflatten_row(flat: Mapping[str, object]) -> FlatRow:
    """Read a row back: `unflatten_row(flatten_row(version, step, values))` is `(version, step, values)`.

    Rows of others are read as far as they go: plain names are metrics, `latest/…` fills in what no
    version holds. If the row holds several versions, the last one is the row's and the names of the
    others stay flat.
    """
    parts = {name: split(name) for name in flat if name != RESERVED_STEP}
    version = next((part.version for part in reversed(parts.values()) if part.view == "version"), None)
    plain: dict[str, object] = {}
    newest: dict[str, object] = {}
    own: dict[str, object] = {}
    for name, part in parts.items():
        if part.view == "latest":
            newest[part.metric] = flat[name]
        elif part.view == "version" and part.version == version:
            own[part.metric] = flat[name]
        else:
            plain[name] = flat[name]
    if RESERVED_STEP in flat:
        step = flat[RESERVED_STEP]
    else:
        newest_step = newest.pop(_STEP, None)
        step = own.pop(_STEP, newest_step)
    return FlatRow(version, cast("int | None", step), {**plain, **newest, **own})


# A run logs few different sets of metrics; the bound is for the one that makes up names as it goes.
@functools.lru_cache(maxsize=64)
def _row_names(version: str, metrics: tuple[str, ...], context: tuple[str, ...]) -> _RowNames:
    prefix = "".join(f"{value}/" for value in context)
    named = [prefix + metric for metric in metrics]
    return _RowNames(
        under_version=tuple(join(version, metric) for metric in named),
        under_latest=tuple(latest(metric) for metric in named),
        steps=(RESERVED_STEP,) if _STEP in named else (join(version, _STEP), latest(_STEP)),
    )
