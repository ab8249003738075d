"""A row as JSON, in the one shape that every command prints it in."""

from __future__ import annotations

from nodetrack.journal.views import ViewRow


def row_as_json(run: str, row: ViewRow) -> dict[str, object]:
    """The keys are always the same, in this order; metrics are sorted by name."""
    return {
        "run": run,
        "step": row.step,
        "time_ns": row.time_ns,
        "version": row.version,
        "attempt": row.attempt,
        "context": dict(sorted(row.context.items())),
        "values": {name: row.values[name] for name in sorted(row.values)},
    }
