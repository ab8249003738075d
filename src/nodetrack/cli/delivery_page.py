"""What backends have of runs and what they lack, for people and programs: a table, JSON, a command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nodetrack.cli.own_command import from_here, own_command
from nodetrack.cli.terminal import (
    COLUMN_GAP,
    ago,
    counted,
    print_table,
    print_text,
    print_whole,
    printable,
    table,
)
from nodetrack.delivery.account import Account, MissingRange
from nodetrack.journal.folder import RunFolder
from nodetrack.redact import redact_text

_STYLES: Final = {
    "delivered": "green",
    "sending": "green",
    "behind": "yellow",
    "starting": "yellow",
    "waiting": "yellow",
    "down": "red",
    "refused": "red",
}
_MOST_RANGES: Final = 3


class Line(NamedTuple):
    """One backend of one run."""

    run: RunFolder
    name: str
    account: Account


def print_delivery(screen: Console, lines: Sequence[Line]) -> None:
    """The table, then what needs more words than a cell has."""
    print_table(screen, delivery_table([(line.name, line.account) for line in lines]))
    several = len({line.run.folder for line in lines}) > 1
    for line in lines:
        who = f"{line.account.backend} of {line.name}" if several else line.account.backend
        for text in _remarks(who, line):
            print_text(screen, text)


def print_places(screen: Console, accounts: Iterable[Account], *, of_one_run: bool) -> None:
    """Where each backend puts what it is sent. Of one run, also when it last took something."""
    lines: dict[tuple[str, str], None] = {}
    for account in accounts:
        taken = f"last delivery {ago(account.last_ack_ns)}" if account.last_ack_ns else "no delivery yet"
        for text in [*_places(account), taken] if of_one_run else filter(None, [account.destination]):
            lines[account.backend, printable(text)] = None
    width = max((len(backend) for backend, _ in lines), default=0)
    before = ""
    for backend, text in lines:
        label = "" if backend == before else backend
        print_whole(screen, Text.assemble((label.ljust(width + COLUMN_GAP), "dim"), text))
        before = backend


def _places(account: Account) -> list[str]:
    """The destination and the URL; one that is part of the other says nothing more."""
    places = [place for place in (account.destination, account.url or "") if place]
    return [it for it in dict.fromkeys(places) if not any(it != other and it in other for other in places)]


def delivery_table(accounts: Sequence[tuple[str, Account]]) -> Table:
    """A line for each run's name and backend; a column that says nothing is left out."""
    several = len({name for name, _ in accounts}) > 1
    refused = any(account.quarantined for _, account in accounts)
    lost = any(account.lost for _, account in accounts)
    lacking = any(account.missing for _, account in accounts)
    listed = table(
        *(["run~"] if several else []),
        *("backend", "logged>", "delivered>"),
        *(["quarantined>"] if refused else []),
        *(["lost>"] if lost else []),
        "missing>",
        *(["missing steps~"] if lacking else []),
        "state",
    )
    before = ""
    for name, account in accounts:
        listed.add_row(
            *([printable(name) if name != before else ""] if several else []),
            *(account.backend, str(account.logged), str(account.delivered)),
            *([str(account.quarantined)] if refused else []),
            *([str(account.lost)] if lost else []),
            str(account.missing_rows),
            *([_ranges(account.missing)] if lacking else []),
            Text(account.state, style=_STYLES.get(account.state, "")),
        )
        before = name
    return listed


def delivery_json(accounts: Iterable[Account]) -> list[dict[str, object]]:
    """The accounts as `--json` prints them."""
    return [
        {
            **msgspec.to_builtins(account),
            "missing_rows": account.missing_rows,
            "missing_records": account.missing_records,
            "unexplained": account.unexplained,
            "complete": account.is_complete,
        }
        for account in accounts
    ]


def sync_command(run: RunFolder, backends: str = "") -> str:
    """What to type to send the rest of a run, as it works in this folder and shell."""
    chosen = f" --backends {backends}" if backends else ""
    tracking = from_here(run.folder.parent.parent.parent)
    place = "" if tracking == Path(".nodetrack") else f" --dir {shlex.quote(str(tracking))}"
    return f"{own_command()} sync {shlex.quote(run.id)}{chosen}{place}"


def in_one_line(accounts: Iterable[Account]) -> str:
    """`tensorboard delivered, influxdb down: 212 rows missing`."""
    return ", ".join(map(_standing, accounts))


def _standing(account: Account) -> str:
    told = [f"{counted(account.missing_rows, 'row')} missing"] if account.missing_rows else []
    told += [f"{counted(account.lost, 'row')} lost"] if account.lost else []
    return f"{account.backend} {account.state}{': ' if told else ''}{' and '.join(told)}"


def _ranges(lacking: Sequence[MissingRange]) -> str:
    """`0002-x4f2 100–412`, for each attempt of which something is missing."""
    told = [f"{part.attempt} {_range(part)}" for part in lacking[:_MOST_RANGES]]
    more = len(lacking) - len(told)
    return "\n".join([*told, *([f"and of {counted(more, 'later attempt')}"] if more else [])])


def _range(part: MissingRange) -> str:
    if part.first_step is None:
        return counted(part.records, "other record")
    if part.first_step == part.last_step:
        return str(part.first_step)
    return f"{part.first_step}–{part.last_step}"


def _remarks(who: str, line: Line) -> Iterator[Text]:
    account = line.account
    if account.last_error and not account.is_complete:
        error, when = printable(redact_text(account.last_error)), ago(account.last_error_ns)
        if account.is_error_over:
            yield Text(f"{who} is well again; it was down until {when}: {error}", style="dim")
        else:
            yield Text(f"{who}: {error} ({when})", style="red")
    if account.unexplained:
        yield Text(_unexplained(who, account.unexplained), style="red")
    refused = account.quarantined + account.quarantined_records
    if refused:
        path = from_here(line.run.folder / "quarantine" / f"{account.backend}.jsonl")
        yield Text(f"{who} refused {counted(refused, 'record')} for good: {path} says why.", style="yellow")
    if account.left_out:
        yield Text(f"{who} cannot show {_left_out(account.left_out)}.", style="dim")


def _unexplained(who: str, count: int) -> str:
    if count > 0:
        return f"{who}: {counted(count, 'row')} of the journal are counted nowhere."
    return f"{who}: {counted(-count, 'row')} are counted as delivered that the journal does not have."


def _left_out(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {printable(reason)}" for reason, count in sorted(reasons.items()))
