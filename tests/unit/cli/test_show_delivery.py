"""`nodetrack show --delivery`: what each backend has, and the command that sends the rest."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

import nodetrack
from nodetrack.cli.delivery_page import Line, print_delivery, print_places
from nodetrack.delivery.account import accounts
from nodetrack.journal.cursor import CursorFile, read_cursors
from nodetrack.journal.folder import RunFolder

if TYPE_CHECKING:
    from tests.servers.plugin import Jsonlines

    from conftest import Lab


def half_delivered(lab: Lab, backend: Jsonlines) -> nodetrack.Run:
    """A run whose first attempt has arrived, and of whose second nothing has: the backend is away."""
    for first in (0, 100):
        with lab.start(mode="offline") as run:
            lab.log_steps(run, range(first, first + 20))
    config = json.dumps([backend.config])
    lab.out("sync", run.id, "--attempt", 1, "--backends", config)
    backend.spoil("write unavailable")
    lab.run("sync", run.id, "--backends", config, "--timeout", 0.5)
    return run


def test_the_missing_range_is_named_by_attempt_and_steps(lab: Lab, jsonlines: Jsonlines) -> None:
    run = half_delivered(lab, jsonlines)
    lines = lab.out("show", run.id, "--delivery").splitlines()
    assert lines[0].split() == ["miner-1", "finished"]
    heading, _, line, error = lines[3:7]
    assert " ".join(heading.split()) == "backend logged delivered missing missing steps state"
    assert line.split() == ["jsonlines", "40", "20", "20", run.attempt, "100–119", "down"]
    assert error.startswith("jsonlines: 503: jsonlines was told to be away.")
    assert any(str(jsonlines.path) in line for line in lines[7:])


def test_the_command_at_the_end_sends_the_rest(lab: Lab, jsonlines: Jsonlines) -> None:
    """Also from another folder's point of view, where it has to name the place."""
    run = half_delivered(lab, jsonlines)
    jsonlines.mend()
    command = shlex.split(lab.out("show", run.id, "--delivery").splitlines()[-1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    out = lab.out("show", run.id, "--delivery")
    assert out.endswith("All that was logged has been delivered.\n")
    assert " ".join(out.splitlines()[5].split()) == "jsonlines 40 40 0 delivered"


def test_the_json_has_the_account_of_each_backend(lab: Lab, jsonlines: Jsonlines) -> None:
    run = half_delivered(lab, jsonlines)
    answer = lab.json("show", run.id, "--delivery", "--json")
    assert list(answer) == ["project", "run", "name", "state", "backends", "complete", "sync_command"]
    (backend,) = answer["backends"]
    (missing,) = backend["missing"]
    assert (missing["attempt"], missing["rows"], missing["first_step"], missing["last_step"]) == (
        *(run.attempt, 20, 100, 119),
    )
    assert (backend["missing_rows"], backend["unexplained"], answer["complete"]) == (20, 0, False)
    assert lab.json("show", run.id, "--json")["delivery"] == answer["backends"]


def test_the_page_of_a_run_has_a_line_about_delivery(lab: Lab, jsonlines: Jsonlines) -> None:
    run = half_delivered(lab, jsonlines)
    assert "delivery jsonlines down: 20 rows missing" in " ".join(lab.out("show", run.id).split())
    jsonlines.mend()
    lab.out("sync")
    assert "delivery jsonlines delivered" in " ".join(lab.out("show", run.id).split())


def test_a_cursor_that_claims_what_the_journal_does_not_have_is_told(lab: Lab, jsonlines: Jsonlines) -> None:
    run = half_delivered(lab, jsonlines)
    cursor = read_cursors(run.folder)["jsonlines"]
    next(iter(cursor.segments())).rows += 3
    CursorFile(run.folder, "jsonlines").write(cursor)
    out = lab.out("show", run.id, "--delivery")
    assert "3 rows are counted as delivered that the journal does not have." in out


def test_a_run_that_was_never_sent_says_how_to(lab: Lab) -> None:
    with lab.start(mode="offline") as run:
        lab.log_steps(run, range(7))
    out = lab.out("show", run.id, "--delivery")
    assert "7 rows logged, and none sent anywhere but to the journal." in out
    assert f"sync {run.id} --backends NAME" in out
    assert not any(line.startswith("delivery") for line in lab.out("show", run.id).splitlines())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_character_is_lost_on_a_narrow_terminal(lab: Lab, jsonlines: Jsonlines, width: int) -> None:
    run = RunFolder(half_delivered(lab, jsonlines).folder, "p")
    output = io.StringIO()
    screen = Console(file=output, width=width, force_terminal=True, color_system=None, highlight=False)
    print_delivery(screen, [Line(run, "miner-1", accounts(run.folder)["jsonlines"])])
    lines = output.getvalue().splitlines()
    assert max(map(len, map(str.rstrip, lines))) <= width
    for word in ("jsonlines", run.attempts[1].id, "100–119", "down"):
        assert word in output.getvalue()


def test_an_error_that_is_over_is_told_as_one(lab: Lab, jsonlines: Jsonlines) -> None:
    run = half_delivered(lab, jsonlines)
    cursor = read_cursors(run.folder)["jsonlines"]
    assert "well again" not in lab.out("show", run.id, "--delivery")
    cursor.state = "ok"
    CursorFile(run.folder, "jsonlines").write(cursor)
    out = lab.out("show", run.id, "--delivery")
    assert (
        "jsonlines is well again; it was down until 0 s ago: 503: jsonlines was told to be away."
        in " ".join(out.split())
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_path_or_url_is_never_broken(lab: Lab, jsonlines: Jsonlines, width: int) -> None:
    run = RunFolder(half_delivered(lab, jsonlines).folder, "p")
    account = accounts(run.folder)["jsonlines"]
    url = f"http://a-host-with-a-name:8086/{'long/' * 20}end"
    account = msgspec.structs.replace(account, url=url, last_error=f"ConnectionError: {url}", quarantined=1)
    output = io.StringIO()
    screen = Console(file=output, width=width, force_terminal=True, color_system=None, highlight=False)
    print_delivery(screen, [Line(run, "miner-1", account)])
    print_places(screen, [account], of_one_run=True)
    text = output.getvalue()
    assert text.count(url) == 2
    assert account.destination in text
    assert "quarantine/jsonlines.jsonl" in text


@pytest.mark.parametrize(
    ("destination", "url", "shown"),
    [
        ("http://h:1, bucket b", "http://h:1", "http://h:1, bucket b"),
        ("https://h/team/p", "https://h/team/p/runs/x", "https://h/team/p/runs/x"),
        ("/a", "/a", "/a"),
        ("offline in /a/wandb", None, "offline in /a/wandb"),
    ],
)
def test_a_place_that_is_part_of_the_other_is_not_shown(
    lab: Lab, jsonlines: Jsonlines, destination: str, url: str | None, shown: str
) -> None:
    run = half_delivered(lab, jsonlines)
    cursor = read_cursors(run.folder)["jsonlines"]
    cursor.destination, cursor.url = destination, url
    CursorFile(run.folder, "jsonlines").write(cursor)
    lines = lab.out("show", run.id, "--delivery").splitlines()
    place = lines.index(f"jsonlines  {shown}")
    assert lines[place + 1].split()[:2] == ["last", "delivery"]


@pytest.mark.parametrize("options", [["show", "miner-1"], ["show", "miner-1", "--delivery"], ["runs"]])
def test_what_a_program_reads_has_no_blanks_at_the_ends_of_lines(
    lab: Lab, jsonlines: Jsonlines, options: list[str]
) -> None:
    half_delivered(lab, jsonlines)
    lines = lab.out(*options).splitlines()
    assert [line.rstrip() for line in lines] == lines


def test_rows_that_were_removed_are_told_and_those_that_are_lost(lab: Lab, jsonlines: Jsonlines) -> None:
    """As `keep_bytes` and `max_bytes` leave it: the first segment had been sent, of the second nothing."""
    with lab.start(mode="offline", segment_bytes=4096) as run:
        lab.log_steps(run, range(300))
    lab.out("sync", run.id, "--backends", json.dumps([jsonlines.config]))
    first, second, *_ = lab.segments(run)
    cursor = read_cursors(run.folder)["jsonlines"]
    gone = [cursor.progress(run.attempt, path.name) for path in (first, second)]
    gone[1].lost, gone[1].rows, gone[1].offset = gone[1].rows, 0, 0
    CursorFile(run.folder, "jsonlines").write(cursor)
    for path in (first, second):
        path.unlink()
    removed, lost = gone[0].rows + gone[1].lost, gone[1].lost
    report = lab.json("show", run.id, "--json")
    assert (report["rows"], report["removed_rows"], report["removed_segments"]) == (300 - removed, removed, 2)
    assert report["attempts"][0]["host"]
    page = " ".join(lab.out("show", run.id).split())
    assert (
        f"logged 300 rows, next step 300 removed 2 segments with {removed} rows; {300 - removed} rows" in page
    )
    assert f"delivery jsonlines delivered: {lost} rows lost" in page
    heading, _, line = lab.out("runs").splitlines()
    assert ("lost" in heading.split(), str(lost) in line.split()) == (True, True)
    assert lab.json("runs", "--json")["runs"][0]["lost"] == lost
