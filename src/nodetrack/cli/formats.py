"""The formats of `nodetrack export`. Equal rows give equal bytes, in every format.

| format | what becomes of a row |
|---|---|
| jsonl | one object a line, in the shape of `rows.row_as_json`; written as it is read |
| csv | one line; a column for each key of the context and each metric, all runs together |
| parquet | as csv, in columns with types: whole numbers, floats, or text |

In the wide formats, `run`, `step`, `time_ns`, `version` and `attempt` come first, then `context.<key>`, then
the metrics by name. A metric that is called like one of these columns gets `metric.` in front, and so does
one that begins with `metric.` already: no two columns share a name. Typed values are JSON text there.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, Final, Literal, NamedTuple

from nodetrack.cli.rows import row_as_json
from nodetrack.cli.strict_json import json_line, nonfinite_word
from nodetrack.errors import MissingExtraError
from nodetrack.journal.views import ViewRow
from nodetrack.records import StoredValue

_LEADING: Final = ("run", "step", "time_ns", "version", "attempt")
_CONTEXT: Final = "context."
_METRIC: Final = "metric."
#: Cells of a row group in Parquet.
_GROUP_CELLS: Final = 20_000_000
_INT64: Final = range(-(2**63), 2**63)


class ExportRow(NamedTuple):
    """A row and the id of its run."""

    run: str
    row: ViewRow


def write_jsonl(rows: Iterable[ExportRow], file: BinaryIO) -> None:
    """One object a line."""
    file.writelines(json_line(row_as_json(run, row)).encode("ascii") + b"\n" for run, row in rows)


def write_csv(rows: Iterable[ExportRow], file: BinaryIO) -> None:
    """As RFC 4180 says, in UTF-8, with a head, lines ended by a line feed."""
    wide = _Wide(rows)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(wide.titles)
    writer.writerows(map(wide.csv_line, wide.rows))
    text.detach()


def write_parquet(rows: Iterable[ExportRow], file: BinaryIO) -> None:
    """A column has null where a row has nothing for it. Raises MissingExtraError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "Exporting to Parquet") from error
    wide = _Wide(rows)
    types = [getattr(pyarrow, kind)() for kind in wide.kinds]
    schema = pyarrow.schema(zip(wide.titles, types, strict=True))
    sink = io.BytesIO()  # pyarrow seeks, which a pipe cannot
    with pyarrow.parquet.ParquetWriter(sink, schema) as writer:
        for group in _groups(wide):
            columns = zip(wide.columns_of(group), types, strict=True)
            arrays = [pyarrow.array(values, type=kind) for values, kind in columns]
            writer.write_table(pyarrow.table(arrays, schema=schema))
    file.write(sink.getbuffer())


#: Format → how it is written.
WRITERS: Final[Mapping[str, Callable[[Iterable[ExportRow], BinaryIO], None]]] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "parquet": write_parquet,
}


# ---------------------------------------------------------------------------------------------------
# Wide rows

Kind = Literal["int64", "float64", "string"]


# What a metric's values ask of the type of their column. Plain bits: they are joined for every single value.
_FLOAT: Final = 1
_BEYOND_INT64: Final = 2
_BEYOND_FLOAT: Final = 4  # a whole number that a float would round
_TEXT: Final = 8


class _Wide:
    """Rows as lines of equal length, or as columns with types."""

    def __init__(self, rows: Iterable[ExportRow]) -> None:
        self.rows = list(rows)
        self._keys = sorted({key for _, row in self.rows for key in row.context})
        needs: dict[str, int] = {}
        for _, row in self.rows:
            for name, value in row.values.items():
                needs[name] = needs.get(name, 0) | _needs_of(value)
        self._metrics = {name: _kind(needs[name]) for name in sorted(needs)}
        first = len(_LEADING) + len(self._keys)
        self._places = {name: first + index for index, name in enumerate(self._metrics)}
        self._nothing: list[object] = [None] * len(self.titles)

    @property
    def titles(self) -> list[str]:
        """The names of the columns."""
        return [*_LEADING, *(_CONTEXT + key for key in self._keys), *map(_metric_title, self._metrics)]

    @property
    def kinds(self) -> list[Kind]:
        """The types of the columns, in pyarrow's words."""
        return ["string", "int64", "int64", "string", "string", *self._context_kinds, *self._metrics.values()]

    @property
    def _context_kinds(self) -> list[Kind]:
        return ["string" for _ in self._keys]

    def csv_line(self, exported: ExportRow) -> list[object]:
        """The cells of one row; None for an empty one."""
        line = self._nothing.copy()
        line[: len(_LEADING)] = _lead(exported)
        row = exported.row
        line[len(_LEADING) : len(_LEADING) + len(self._keys)] = [row.context.get(key) for key in self._keys]
        for name, value in row.values.items():
            line[self._places[name]] = _csv_cell(value)
        return line

    def columns_of(self, rows: Sequence[ExportRow]) -> Iterator[Sequence[object]]:
        """Some of the rows, column by column; None where a row has nothing."""
        yield from zip(*map(_lead, rows), strict=True)
        for key in self._keys:
            yield [row.context.get(key) for _, row in rows]
        for name, kind in self._metrics.items():
            values = [row.values.get(name) for _, row in rows]
            yield (
                values
                if kind != "string"
                else [value if value is None else json_line(value) for value in values]
            )


def _groups(wide: _Wide) -> Iterator[Sequence[ExportRow]]:
    """The rows in groups that bound the memory, however many columns there are."""
    size = max(1, _GROUP_CELLS // len(wide.titles))
    for start in range(0, len(wide.rows), size):
        yield wide.rows[start : start + size]


def _metric_title(name: str) -> str:
    """The column of a metric. Different metrics and all other columns have different titles."""
    is_taken = name in _LEADING or name.startswith((_CONTEXT, _METRIC))
    return _METRIC + name if is_taken else name


def _lead(exported: ExportRow) -> tuple[str, int, int, str, str]:
    row = exported.row
    return exported.run, row.step, row.time_ns, row.version, row.attempt


def _csv_cell(value: StoredValue) -> str | int | float:
    if isinstance(value, float):
        return value if math.isfinite(value) else nonfinite_word(value)
    return value if isinstance(value, int) else json_line(value)


def _needs_of(value: StoredValue) -> int:
    if isinstance(value, float):
        return _FLOAT
    if not isinstance(value, int):
        return _TEXT
    beyond_int64 = 0 if value in _INT64 else _BEYOND_INT64
    return beyond_int64 if int(float(value)) == value else beyond_int64 | _BEYOND_FLOAT


def _kind(needs: int) -> Kind:
    """The narrowest type that holds every value as it is: whole numbers, floats, or JSON text."""
    if not needs & (_TEXT | _FLOAT | _BEYOND_INT64):
        return "int64"
    return "string" if needs & (_TEXT | _BEYOND_FLOAT) else "float64"
