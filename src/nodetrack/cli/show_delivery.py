"""`nodetrack show --delivery`: the proof of delivery. The whole journal is counted for it."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

from nodetrack.cli.delivery_page import Line, delivery_json, print_delivery, print_places, sync_command
from nodetrack.cli.strict_json import json_text
from nodetrack.cli.terminal import console, counted, printable, state_text
from nodetrack.delivery.account import Account, accounts, missing
from nodetrack.journal.folder import RunFolder, RunOverview


def show_delivery(run: RunFolder, *, as_json: bool) -> None:
    """Print what each backend has that the run was ever sent to, and the command that sends the rest."""
    overview = run.overview()
    found = [*accounts(run.folder, recount=True).values()]
    if as_json:
        typer.echo(json_text(_as_json(overview, found, sync_command(run))))
        return
    screen = console()
    screen.print(_headline(overview))
    screen.print()
    if found:
        print_delivery(screen, [Line(run, overview.name, account) for account in found])
        screen.print()
        print_places(screen, found, of_one_run=True)
    else:
        rows = sum(part.rows for part in missing(run.folder, None))
        screen.print(Text(f"{counted(rows, 'row')} logged, and none sent anywhere but to the journal."))
    _print_what_to_do(screen, run, overview, found)


def _as_json(overview: RunOverview, found: list[Account], command: str) -> dict[str, object]:
    return {
        "project": overview.project,
        "run": overview.run,
        "name": overview.name,
        "state": overview.state,
        "backends": delivery_json(found),
        "complete": all(account.is_complete for account in found),
        "sync_command": command,
    }


def _headline(overview: RunOverview) -> Text:
    line = Text(printable(overview.name), style="bold").append("  ")
    line.append_text(state_text(overview.state, overview.reason))
    node = f"{overview.role} {overview.uid} of project {overview.project} ({overview.environment})"
    return line.append(f"\nrun {overview.run}, {printable(node)}", style="dim")


def _print_what_to_do(screen: Console, run: RunFolder, overview: RunOverview, found: list[Account]) -> None:
    screen.print()
    if found and all(account.is_complete for account in found):
        whole = all(account.delivered == account.logged for account in found)
        screen.print(
            Text("All that was logged has been delivered." if whole else "Nothing is left to be sent.")
        )
        return
    if found and overview.state == "running":
        screen.print(
            Text("The node is running and goes on sending. To send the rest by hand once it has ended:")
        )
    else:
        screen.print(Text("To send the rest:" if found else "To send them, with the name of a backend:"))
    screen.print(f"  {sync_command(run, '' if found else 'NAME')}", soft_wrap=True)
