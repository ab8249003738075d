"""The page that `nodetrack show` prints: readable on 80 columns, and never longer than a person reads.

Each part shows a bounded number of lines and says how many it leaves out; `everything` lifts all bounds.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nodetrack.cli.delivery_page import in_one_line
from nodetrack.cli.run_report import AttemptReport, EventReport, LastValues, RunReport, SystemReport
from nodetrack.cli.strict_json import json_line
from nodetrack.cli.terminal import (
    ago,
    clock,
    counted,
    duration,
    event_text,
    in_bytes,
    moment,
    print_grid,
    print_table,
    print_text,
    printable,
    state_text,
    table,
    value_text,
)
from nodetrack.records import JsonValue, StoredValue

#: The most lines of a part, and the most columns of values.
_LINES: Final = 40
_CONFIG_LINES: Final = 20
_FEW_LINES: Final = 10
_VALUE_COLUMNS: Final = 4
#: What is shown of a value of the config and of the command line.
_CHARACTERS: Final = 200
_ALL: Final = 10**9
_DAMAGE: Final = {
    "corrupt": "damaged record",
    "unnamed_rows": "nameless row",
    "unknown_records": "unknown record",
}


def print_page(screen: Console, report: RunReport, *, everything: bool) -> None:
    """Print the parts that have something to say, one below the other."""
    screen.print(_headline(report))
    print_grid(screen, _facts(report, everything=everything))
    for title, content in _parts(report, everything):
        screen.print()
        screen.print(Text(title, style="bold"))
        for item in content:
            if isinstance(item, Text):
                print_text(screen, item)
            elif item.box is None:
                print_grid(screen, item)
            else:
                print_table(screen, item)


def _parts(report: RunReport, everything: bool) -> Iterator[tuple[str, list[Table | Text]]]:
    most, few = (_ALL, _ALL) if everything else (_LINES, _FEW_LINES)
    yield "Attempts", _attempts(report.attempts, few)
    if any(attempt.config_changes for attempt in report.attempts):
        yield "Config changes", _config_changes(report.attempts, few)
    if report.last_values or report.summary:
        yield "Last values", _values(report, most, _ALL if everything else _VALUE_COLUMNS)
    if report.system is not None:
        yield f"Machine, {ago(report.system.time_ns)}", _system(report.system, most)
    events = [event for event in report.events if event.event != "define_metric"]
    if events:
        yield "Events", _events(events, few)
    if report.nonfinite:
        yield "Values that are not finite", _nonfinite(report.nonfinite, few)
    damage = list(_damage(report.damage))
    if damage:
        yield "Damage", [Text(printable(line), style="red") for line in damage]
    if report.config:
        yield "Config", _config(report.config, everything=everything)


def _left_out(count: int, what: str) -> list[Table | Text]:
    """The line that says what is not shown, if anything is."""
    if count <= 0:
        return []
    return [Text(f"{counted(count, what)} left out: --all shows all.", style="dim")]


# ---------------------------------------------------------------------------------------------------
# Who it is


def _headline(report: RunReport) -> Text:
    run = report.run
    line = Text(printable(str(run["name"])), style="bold").append("  ")
    line.append_text(state_text(str(run["state"]), str(run["reason"])))
    line.append(
        f"\nrun {run['run']}, {run['role']} {run['uid']} of project {run['project']} ({run['environment']})",
        style="dim",
    )
    return line


def _facts(report: RunReport, *, everything: bool) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in _labelled_facts(report):
        if value:
            text = printable(value)
            grid.add_row(label, _cut(text) if label == "command" and not everything else text)
    return grid


def _labelled_facts(report: RunReport) -> Iterator[tuple[str, str]]:
    run, last = report.run, report.attempts[-1]
    yield "version", _versions(str(run["version"]), run["versions"])
    yield "commit", _commit(last.git)
    yield "host", last.host + (f", process {last.pid}" if last.pid else "")
    yield "command", shlex.join(last.command)
    yield "started", f"{moment(report.attempts[0].started_ns)} ({ago(report.attempts[0].started_ns)})"
    yield "ran", f"{duration(report.duration_seconds)} in {counted(len(report.attempts), 'attempt')}"
    yield "logged", f"{counted(report.rows + report.removed_rows, 'row')}, next step {run['step']}"
    yield "removed", _removed(report)
    yield "delivery", in_one_line(report.delivery)
    yield "group", str(run["group"] or "")
    yield "job type", str(run["job_type"] or "")
    yield "tags", " ".join(_texts(run["tags"]))
    yield "notes", str(run["notes"] or "")
    yield "replaces", str(run["previous_run"] or "")


def _removed(report: RunReport) -> str:
    """What is told below as of the whole run is only of what is left."""
    if not report.removed_segments:
        return ""
    rows = f" with {counted(report.removed_rows, 'row')}" if report.removed_rows else ""
    return f"{counted(report.removed_segments, 'segment')}{rows}; {counted(report.rows, 'row')} still here"


def _versions(current: str, all_versions: JsonValue) -> str:
    others = [version for version in _texts(all_versions) if version != current]
    return f"{current} (also {', '.join(others)})" if others else current


def _commit(git: Mapping[str, JsonValue] | None) -> str:
    if not git or not git.get("commit"):
        return ""
    branch = f" on {git['branch']}" if git.get("branch") else ""
    return f"{str(git['commit'])[:12]}{branch}{', with uncommitted changes' if git.get('dirty') else ''}"


def _texts(value: JsonValue) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Sequence) else []


# ---------------------------------------------------------------------------------------------------
# Attempts and config


def _attempts(attempts: Sequence[AttemptReport], most: int) -> list[Table | Text]:
    shown = attempts[-most:]
    listed = table("attempt", "version", "host", "from step>", "started>", "ran>", "state~")
    for attempt in shown:
        listed.add_row(
            attempt.attempt,
            attempt.version,
            printable(attempt.host),
            "?" if attempt.starting_step is None else str(attempt.starting_step),
            clock(attempt.started_ns, milliseconds=False),
            duration(attempt.duration_seconds),
            state_text(attempt.state, attempt.reason),
        )
    return [listed, *_left_out(len(attempts) - len(shown), "earlier attempt")]


def _config_changes(attempts: Sequence[AttemptReport], most: int) -> list[Table | Text]:
    changes = [
        (attempt.attempt, key, pair) for attempt in attempts for key, pair in attempt.config_changes.items()
    ]
    shown = changes[-most:]
    listed = table("attempt", "key~", "before~", "", "since~")
    for attempt_id, key, (before, since) in shown:
        listed.add_row(attempt_id, printable(key), _json(before), "→", _json(since))
    return [listed, *_left_out(len(changes) - len(shown), "earlier change")]


def _config(config: Mapping[str, JsonValue], *, everything: bool) -> list[Table | Text]:
    lines = list(_flat(config))
    shown = lines if everything else lines[:_CONFIG_LINES]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold", style="cyan")
    for key, value in shown:
        grid.add_row(printable(key), _json(value) if everything else _cut(_json(value)))
    return [grid, *_left_out(len(lines) - len(shown), "more value")]


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"


def _flat(values: Mapping[str, JsonValue], above: str = "") -> Iterator[tuple[str, JsonValue]]:
    """The values under their dotted keys, as the changes of the config name them."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _json(value: JsonValue) -> str:
    return printable(json_line(value))


# ---------------------------------------------------------------------------------------------------
# Values and events


def _values(report: RunReport, most: int, most_columns: int) -> list[Table | Text]:
    columns = report.last_values_of[-most_columns:]
    lines = _value_lines(report, columns)
    shown = lines[:most]
    titles = [*columns, "summary"] if _has_own_summary(report) else columns
    listed = table("metric~", *(f"{title}>" for title in titles))
    for name, cells in shown:
        listed.add_row(name, *cells[: len(titles)])
    return [
        listed,
        *_left_out(len(lines) - len(shown), "more metric"),
        *_left_out(len(report.last_values_of) - len(columns), f"earlier {report.last_values_by}"),
    ]


def _value_lines(report: RunReport, columns: Sequence[str]) -> list[tuple[str, list[str]]]:
    """For each series its name, its value in each column and its summary; then what only the summary has."""
    lines = []
    for line in report.last_values:
        cells = [_value(line.values.get(column)) for column in columns]
        lines.append((_series_name(line), [*cells, _value(report.summary.get(line.metric))]))
    logged = {line.metric for line in report.last_values}
    for name, value in sorted(report.summary.items()):
        if name not in logged:
            lines.append((printable(name), [*("" for _ in columns), _value(value)]))
    return lines


def _series_name(line: LastValues) -> str:
    context = " ".join(f"{key}={value}" for key, value in line.context.items())
    return printable(f"{line.metric} [{context}]" if context else line.metric)


def _value(value: StoredValue | JsonValue) -> str:
    if value is None:
        return ""
    return value_text(value) if isinstance(value, int | float | Mapping) else _json(value)


def _has_own_summary(report: RunReport) -> bool:
    """Whether the summary says anything that the last values do not."""
    last: dict[str, list[StoredValue]] = {}
    for line in report.last_values:
        last.setdefault(line.metric, []).extend(line.values.values())
    return any(value not in last.get(name, ()) for name, value in report.summary.items())


def _system(sample: SystemReport, most: int) -> list[Table | Text]:
    listed = table("metric~", "value>")
    for name, value in [*sample.values.items()][:most]:
        listed.add_row(printable(name), _sampled(name, value))
    return [listed, *_left_out(len(sample.values) - most, "more value")]


def _sampled(name: str, value: StoredValue) -> str:
    if isinstance(value, Mapping):
        return value_text(value)
    if name.endswith("_bytes"):
        return in_bytes(value)
    return f"{in_bytes(value)}/s" if name.endswith("_bytes_per_second") else value_text(value)


def _events(events: Sequence[EventReport], most: int) -> list[Table | Text]:
    shown = events[-most:]
    listed = table("when>", "attempt", "event", "what~")
    for event in shown:
        listed.add_row(
            ago(event.time_ns), event.attempt, printable(event.event), event_text(event.event, event.data)
        )
    return [listed, *_left_out(len(events) - len(shown), "earlier event")]


def _nonfinite(counts: Mapping[str, int], most: int) -> list[Table | Text]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    listed = table("metric~", "values>")
    for name, count in ordered[:most]:
        listed.add_row(printable(name), str(count))
    return [listed, *_left_out(len(ordered) - most, "more metric")]


def _damage(damage: Mapping[str, JsonValue]) -> Iterator[str]:
    """What could not be read. A torn tail may be growing, so it is left to `journal verify` to judge."""
    for name, what in _DAMAGE.items():
        count = damage[name]
        if isinstance(count, int) and count:
            yield f"{counted(count, what)} left out: `nodetrack journal verify` names the files."
    yield from _texts(damage["problems"])
