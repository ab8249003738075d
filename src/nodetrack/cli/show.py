"""`nodetrack show`: one run, on one page."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from nodetrack.cli.command import AsJson, Folder, Project, RunName, ends_well, find_run, open_folder
from nodetrack.cli.delivery_page import delivery_json
from nodetrack.cli.run_report import read_report
from nodetrack.cli.show_delivery import show_delivery
from nodetrack.cli.show_page import print_page
from nodetrack.cli.strict_json import json_text
from nodetrack.cli.terminal import console


@ends_well
def show(
    run: RunName,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Last values by attempt instead of by version.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Leave out nothing, however long the tables become.")
    ] = False,
    delivery: Annotated[
        bool, typer.Option("--delivery", help="Instead: what each backend has, and what it lacks.")
    ] = False,
    project: Project = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show one run: how it stands, its attempts, its config, its last values, and what happened to it."""
    found = find_run(open_folder(folder), run, project)
    if delivery:
        show_delivery(found, as_json=as_json)
        return
    report = read_report(found, by_attempt=all_attempts)
    if as_json:
        typer.echo(json_text(msgspec.to_builtins(report) | {"delivery": delivery_json(report.delivery)}))
    else:
        print_page(console(), report, everything=everything)
