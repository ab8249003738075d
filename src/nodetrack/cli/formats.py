"""The formats of `nodetrack export`. Equal rows give equal bytes, in every format.

| format | what becomes of a row |
|---|---|
| jsonl | one object a line, in the shape of `rows.row_as_json`; written as it is read |
| csv | one line; a column for each key of the context and each metric, all runs together |
| parquet | as csv, in columns with types: whole numbers, floats, or text |

In the wide formats, `run`, `step`, `time_ns`, `version` and `attempt` come first, then `context.<key>`, then the
metrics by name. A metric that is called like one of these columns gets `metric.` in front, and so does one that
begins with `metric.` already: no two columns share a name. Typed values are JSON text there.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from nodetrack.cli.rows import row_as_json
from nodetrack.cli.strict_json import json_line, nonfinite_word
from nodetrack.errors import MissingExtraError
from nodetrack.journal.views import ViewRow
from nodetrack.records import StoredValue

if TYPE_CHECKING:
    import pyarrow

_LEADING: Final = ("run", "step", "time_ns", "version", "attempt")
_CONTEXT: Final = "context."
_METRIC: Final = "metric."
_INT64: Final = range(-(2**63), 2**63)


class ExportRow(NamedTuple):
    """A row and the id of its run."""

    run: str
    row: ViewRow


def write_jsonl(rows: Iterable[ExportRow], file: BinaryIO) -> None:
    """One object a line."""
    for run, row in rows:
        file.write(json_line(row_as_json(run, row)).encode("ascii") + b"\n")


def write_csv(rows: Iterable[ExportRow], file: BinaryIO) -> None:
    """As RFC 4180 says, in UTF-8, with a head, lines ended by a line feed."""
    wide = _Wide(list(rows))
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(wide.titles)
    for run, row in wide.rows:
        writer.writerow([*_lead(run, row), *wide.context_of(row), *map(_csv_cell, wide.values_of(row))])
    text.detach()


def write_parquet(rows: Iterable[ExportRow], file: BinaryIO) -> None:
    """One row group a million rows, compressed. Raises MissingExtraError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "Exporting to Parquet") from error
    wide = _Wide(list(rows))
    table = pyarrow.table(_parquet_columns(wide))
    sink = io.BytesIO()  # pyarrow seeks, which a pipe cannot
    pyarrow.parquet.write_table(table, sink)
    file.write(sink.getbuffer())


#: Format → how it is written.
WRITERS: Final[Mapping[str, Callable[[Iterable[ExportRow], BinaryIO], None]]] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "parquet": write_parquet,
}


# ---------------------------------------------------------------------------------------------------
# Wide rows


class _Wide:
    """Rows and the columns that they need together."""

    def __init__(self, rows: Sequence[ExportRow]) -> None:
        self.rows = rows
        self._keys = sorted({key for _, row in rows for key in row.context})
        self.metrics = sorted({name for _, row in rows for name in row.values})

    @property
    def titles(self) -> list[str]:
        """The names of all columns."""
        return [*_LEADING, *(_CONTEXT + key for key in self._keys), *map(_metric_title, self.metrics)]

    def context_of(self, row: ViewRow) -> list[str | None]:
        """The row's context by column."""
        return [row.context.get(key) for key in self._keys]

    def values_of(self, row: ViewRow) -> list[StoredValue | None]:
        """The row's values by column."""
        return [row.values.get(name) for name in self.metrics]


def _metric_title(name: str) -> str:
    """The column of a metric. Different metrics and all other columns have different titles."""
    is_taken = name in _LEADING or name.startswith((_CONTEXT, _METRIC))
    return _METRIC + name if is_taken else name


def _lead(run: str, row: ViewRow) -> tuple[str, int, int, str, str]:
    return run, row.step, row.time_ns, row.version, row.attempt


def _csv_cell(value: StoredValue | None) -> str | int | float | None:
    if isinstance(value, float):
        return value if math.isfinite(value) else nonfinite_word(value)
    return value if value is None or isinstance(value, int) else json_line(value)


# ---------------------------------------------------------------------------------------------------
# Parquet columns


def _parquet_columns(wide: _Wide) -> dict[str, pyarrow.Array]:
    import pyarrow

    lead = list(zip(*(_lead(run, row) for run, row in wide.rows), strict=True)) or [()] * len(_LEADING)
    context = zip(*map(wide.context_of, (row for _, row in wide.rows)), strict=True)
    types = (pyarrow.string(), pyarrow.int64(), pyarrow.int64(), pyarrow.string(), pyarrow.string())
    columns = [pyarrow.array(column, type=kind) for column, kind in zip(lead, types, strict=True)]
    columns += [pyarrow.array(column, type=pyarrow.string()) for column in context]
    columns += [_metric_column([row.values.get(name) for _, row in wide.rows]) for name in wide.metrics]
    return dict(zip(wide.titles, columns, strict=True))


def _metric_column(values: Sequence[StoredValue | None]) -> pyarrow.Array:
    """The narrowest type that holds every value as it is: whole numbers, floats, or JSON text."""
    import pyarrow

    present = [value for value in values if value is not None]
    if all(isinstance(value, int) and value in _INT64 for value in present):
        return pyarrow.array(values, type=pyarrow.int64())
    if all(isinstance(value, float) or _is_exact(value) for value in present):
        return pyarrow.array(
            [None if value is None else float(value) for value in values], type=pyarrow.float64()
        )
    return pyarrow.array(
        [None if value is None else json_line(value) for value in values], type=pyarrow.string()
    )


def _is_exact(value: StoredValue) -> bool:
    """Whether a float holds the number without loss."""
    return isinstance(value, int) and int(float(value)) == value
