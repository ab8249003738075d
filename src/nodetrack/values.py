"""What may be logged, and the form in which the journal holds it.

Numbers go in as they are, non-finite ones included. A typed value (`Histogram`, `Text`, `Image`, `Table`)
becomes a small map with a `type`. Anything else is skipped with its reason, and the rest of the row is
kept: a tracker that raises in the middle of a validation costs more than the value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Protocol, TypeAlias, cast, runtime_checkable

import msgspec

from nodetrack.naming import check_name
from nodetrack.records import JsonValue, StoredValue

MAX_VALUE_BYTES: Final = 4 * 1024 * 1024
_MAX_DEPTH: Final = 8
_IMAGE_FORMATS: Final = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}

#: Told once for each name that was left out of a row: the name and the reason in words.
Skip: TypeAlias = Callable[[str, str], None]


@runtime_checkable
class TypedValue(Protocol):
    """A value that is more than a number."""

    def stored(self) -> Mapping[str, JsonValue]:
        """The map that the journal keeps; its `type` names the kind of value."""
        ...


class Histogram:
    """Counts by bin, with the edges of the bins.

    Give the observations, or the `counts` that were computed elsewhere and, if known, the `edges` (one more
    than counts). Observations that are not finite fall into no bin and are counted in `nonfinite`.
    """

    type: ClassVar = "histogram"

    def __init__(
        self,
        values: Iterable[float] | None = None,
        *,
        bins: int = 64,
        range: tuple[float, float] | None = None,  # noqa: A002 - numpy's and wandb's word
        counts: Sequence[float] | None = None,
        edges: Sequence[float] | None = None,
    ) -> None:
        if (values is None) == (counts is None):
            raise ValueError("Histogram needs either the observations or their counts.")
        self.nonfinite = 0
        if counts is not None:
            self.counts = _numbers(counts)
            self.edges = _numbers(edges) if edges is not None else None
        else:
            self.counts, self.edges, self.nonfinite = _binned(_numbers(values or ()), bins, range)
        if self.edges is not None and len(self.edges) != len(self.counts) + 1:
            raise ValueError(
                f"Histogram has {len(self.counts)} counts and {len(self.edges)} edges, not one more."
            )

    def stored(self) -> Mapping[str, JsonValue]:
        """See TypedValue."""
        return {"type": self.type, "counts": self.counts, "edges": self.edges, "nonfinite": self.nonfinite}


class Text:
    """A piece of text, such as a sample that the model wrote."""

    type: ClassVar = "text"

    def __init__(self, text: str) -> None:
        self.text = text

    def stored(self) -> Mapping[str, JsonValue]:
        """See TypedValue."""
        return {"type": self.type, "text": self.text}


class Table:
    """Rows under named columns; cells are numbers, text, booleans or None, anything else becomes text."""

    type: ClassVar = "table"

    def __init__(self, columns: Sequence[str], data: Iterable[Sequence[object]] = ()) -> None:
        self.columns = [str(column) for column in columns]
        self.data: list[list[JsonValue]] = []
        for row in data:
            self.add_data(*row)

    def add_data(self, *row: object) -> None:
        """Append one row. Raises ValueError unless it has one cell a column."""
        if len(row) != len(self.columns):
            raise ValueError(f"Table has {len(self.columns)} columns; the row has {len(row)} cells.")
        self.data.append([_cell(cell) for cell in row])

    def stored(self) -> Mapping[str, JsonValue]:
        """See TypedValue."""
        return {"type": self.type, "columns": self.columns, "data": self.data}


class Image:
    """An encoded image: the bytes of a PNG, JPEG, GIF or WebP, a path to one, or a Pillow image (kept as
    PNG).
    """

    type: ClassVar = "image"

    def __init__(self, image: bytes | str | Path | object, caption: str | None = None) -> None:
        self.data = _image_bytes(image)
        self.format = next(
            (name for magic, name in _IMAGE_FORMATS.items() if self.data.startswith(magic)), ""
        )
        if not self.format:
            raise ValueError(
                "Image takes the bytes of a PNG, JPEG, GIF or WebP, a path to one, or a Pillow image."
            )
        self.caption = caption

    def stored(self) -> Mapping[str, JsonValue]:
        """See TypedValue."""
        data = cast("JsonValue", self.data)  # MessagePack holds bytes as they are
        return {"type": self.type, "format": self.format, "data": data, "caption": self.caption}


def coerce(values: Mapping[str, object], skip: Skip) -> dict[str, StoredValue]:
    """The values that can be kept, in the journal's form and the caller's order.

    A nested mapping is flattened, `{"train": {"loss": 1.0}}` is `train/loss`. Whatever cannot be kept is
    told to `skip` and left out.
    """
    kept: dict[str, StoredValue] = {}
    _collect(values, "", skip, kept, _MAX_DEPTH)
    return kept


def _collect(
    values: Mapping[str, object], prefix: str, skip: Skip, kept: dict[str, StoredValue], depth: int
) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        fault = check_name(name)
        if fault is not None:
            skip(name, f"the name {fault}")
        elif isinstance(value, Mapping) and depth:
            _collect(value, f"{name}/", skip, kept, depth - 1)
        else:
            stored = _stored(value)
            if isinstance(stored, str):
                skip(name, stored)
            else:
                kept[name] = stored


def _stored(value: object) -> StoredValue | str:
    """The journal's form of a value, or the reason in words why there is none."""
    if isinstance(value, bool | int | float):
        return _number(value)
    if isinstance(value, TypedValue):
        return _typed(value)
    if isinstance(value, str):
        return "a text is no number: wrap it in nodetrack.Text"
    if value is None:
        return "None is no number"
    return _scalar(value)


def _number(value: bool | float) -> int | float | str:
    if isinstance(value, float):
        return float(value)
    if -(2**63) <= value < 2**64:
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return "an integer beyond the range of a float"


def _scalar(value: object) -> int | float | str:
    """A numpy or torch scalar, or anything else that knows how to be one number."""
    kind = type(value).__name__
    size = _size(value)
    if size is not None and size != 1:
        return f"{kind} of {size} values: log a scalar, or wrap it in nodetrack.Histogram"
    try:
        if hasattr(value, "item"):
            number = value.item()
        elif hasattr(value, "__float__"):
            number = float(value)
        else:
            return f"{kind}, which is no number"
    except Exception as error:  # foreign code may raise anything, and log() must not
        return f"{kind}, whose number could not be read ({error})"
    return _number(number) if isinstance(number, bool | int | float) else f"{kind}, which is no real number"


def _size(value: object) -> int | None:
    """How many elements an array has; None for what is no array."""
    for name in ("numel", "size"):
        size = getattr(value, name, None)
        size = size() if callable(size) and name == "numel" else size
        if isinstance(size, int):
            return size
    return None


def _typed(value: TypedValue) -> Mapping[str, JsonValue] | str:
    try:
        stored = value.stored()
        size = len(msgspec.msgpack.encode(stored))
    except Exception as error:  # a lone surrogate in a text, or a class of the caller's own
        return f"{type(value).__name__}, which cannot be stored ({error})"
    if size > MAX_VALUE_BYTES:
        return f"{stored['type']} of {size} bytes, over the limit of {MAX_VALUE_BYTES}"
    return stored


def _numbers(values: object) -> list[float]:
    """A flat list of floats from a list, a numpy array or a tensor of any shape."""
    for step in ("detach", "cpu", "flatten"):
        if hasattr(values, step):
            values = getattr(values, step)()
    listed = values.tolist() if hasattr(values, "tolist") else values
    return [float(number) for number in cast("Iterable[float]", listed)]


def _binned(
    values: list[float], bins: int, limits: tuple[float, float] | None
) -> tuple[list[float], list[float], int]:
    """Counts in `bins` equal bins over `limits` (default: lowest to highest), closed on the right at the
    end.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = limits or (min(finite, default=0.0), max(finite, default=1.0))
    if low == high:
        low, high = low - 0.5, high + 0.5
    if math.isinf(high - low):  # wider than a float can say
        counts, edges, nonfinite = _binned([value / 4 for value in values], bins, (low / 4, high / 4))
        return counts, [edge * 4 for edge in edges], nonfinite
    width = (high - low) / bins
    edges = [low + width * index for index in range(bins)] + [high]
    counts = [0.0] * bins
    for value in finite:
        if low <= value <= high:
            counts[min(int((value - low) / width), bins - 1)] += 1
    return counts, edges, len(values) - len(finite)


def _cell(value: object) -> JsonValue:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    number = _scalar(value)
    return str(value) if isinstance(number, str) else number


def _image_bytes(image: object) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(image, pillow.Image):
        import io

        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return buffer.getvalue()
    return b""
