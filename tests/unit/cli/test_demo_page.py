"""The demo's last words: whole words and lines that can be copied, on a terminal and through a pipe."""

from __future__ import annotations

import io
import shlex
import sys

import msgspec
import pytest
from rich.console import Console

from nodetrack.cli.demo_page import print_report
from nodetrack.cli.own_command import own_command
from nodetrack.cli.terminal import console as standard_console
from nodetrack.delivery.account import Account, MissingRange
from nodetrack.demo.report import AttemptLine, DeliveryLine, DemoReport, KillLine, MetricLine, RunLine

KILLED = "killed: the process ended without a word"
KILL = KillLine(
    node="miner-1",
    window=2,
    printed_steps=101,
    last_step=100,
    missing_steps=(),
    back_at_step=80,
    resumed_at_step=80,
)
REPORT = DemoReport(
    folder="demo-run",
    journals="demo-run/.nodetrack",
    seconds=64.2,
    runs=(
        RunLine(
            role="miner",
            uid="1",
            run="gigd8vz897",
            versions=("0.1.0", "0.1.1"),
            state="finished",
            step=480,
            rows=503,
            attempts=(
                AttemptLine(1, "0.1.0", "crashed", KILLED),
                AttemptLine(2, "0.1.0", "finished", ""),
                AttemptLine(3, "0.1.1", "finished", ""),
            ),
        ),
    ),
    metrics=(
        MetricLine("miner-1", "train/loss", {"0.1.0": 0.0388871, "0.1.1": 2.3417}),
        MetricLine("validator-0", "eval/loss", {"0.1.0": 6.31774, "0.1.1": 2.5204}),
    ),
    kills=(KILL,),
)


def on_terminal(report: DemoReport, width: int) -> str:
    """What a terminal gets, before it breaks what is too long for it."""
    output = io.StringIO()
    terminal = Console(file=output, width=width, force_terminal=True, color_system=None, highlight=False)
    print_report(terminal, report)
    return output.getvalue()


def prose(report: DemoReport) -> str:
    return " ".join(on_terminal(report, 80).split())


@pytest.mark.parametrize("width", [40, 80, 140])
def test_on_a_terminal_sentences_are_broken_between_words(width: int) -> None:
    page = on_terminal(report_with(folder="demo"), width)
    sentences = page[page.index("The kill") : page.index("Try next")]
    assert max(map(len, sentences.splitlines())) <= width
    wide = on_terminal(report_with(folder="demo"), 1000)
    assert sentences.split() == wide[wide.index("The kill") : wide.index("Try next")].split()


def test_a_killed_attempt_takes_one_line_of_the_table() -> None:
    lines = on_terminal(REPORT, 80).splitlines()
    assert any(line.rstrip().endswith("1  0.1.0    crashed (killed)") for line in lines)
    assert not any("without a word" in line for line in lines)


def test_through_a_pipe_each_sentence_and_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(standard_console(), REPORT)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("miner-1 was killed") and line.endswith("not deleted.") for line in lines) == 1
    assert sum(line.rstrip().endswith("crashed (killed)") for line in lines) == 1


def test_the_commands_can_be_copied_however_long_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    journals = f"a folder/{'long' * 30}/.nodetrack"
    lines = on_terminal(report_with(journals=journals), 40).splitlines()
    commands = lines[lines.index("Try next:") + 1 :]
    expected = [["runs"], ["show", "miner-1"], ["tail", "validator-0"]]
    program = shlex.split(own_command())
    assert [shlex.split(command) for command in commands] == [
        [*program, *arguments, "--dir", journals] for arguments in expected
    ]


def test_the_hidden_folder_of_the_journals_is_named() -> None:
    assert "Journals: demo-run/.nodetrack (a hidden folder, which `ls -a demo-run` shows)." in prose(REPORT)


def test_the_kill_tells_how_far_the_miner_had_come_and_how_far_it_went_back() -> None:
    page = prose(REPORT)
    assert "It had logged up to step 100, and all 101 steps" in page
    assert "went back to its last checkpoint, at step 80: what it had logged from there to step 100" in page
    assert "is superseded by the new attempt, not deleted." in page


def test_a_miner_that_did_not_go_back_went_on() -> None:
    page = prose(report_with(kill={"back_at_step": 101, "resumed_at_step": 120}))
    assert "the same run and went on at step 120." in page


def test_a_miner_that_came_back_too_late_is_told_so() -> None:
    page = prose(report_with(kill={"back_at_step": None, "resumed_at_step": None}))
    assert "the same run, but too late to train." in page


def test_a_missing_step_is_not_kept_quiet() -> None:
    page = prose(report_with(kill={"missing_steps": (7, 8)}))
    assert "2 of the 101 steps that it had reported are NOT in its journal" in page


def test_where_a_version_trained_nothing_no_conclusion_is_drawn() -> None:
    evaluation = MetricLine("validator-0", "eval/loss", {"0.1.0": 6.3})
    page = on_terminal(report_with(metrics=(REPORT.metrics[0], evaluation)), 80)
    assert "The two versions" not in page


def report_with(*, kill: dict[str, object] | None = None, **changes: object) -> DemoReport:
    """REPORT, changed, and its kill with it."""
    kills = (msgspec.structs.replace(KILL, **(kill or {})),)
    return msgspec.structs.replace(REPORT, **{"kills": kills, **changes})


def delivery(backend: str, **counts: int) -> DeliveryLine:
    missing = (MissingRange("0003-aaaa", counts["missing"], 1, 240, 479),) if counts.get("missing") else ()
    account = Account(
        backend=backend,
        state="down" if missing else "delivered",
        logged=503,
        delivered=503 - counts.get("missing", 0),
        quarantined=0,
        lost=0,
        missing=missing,
        destination="http://127.0.0.1:8086",
        last_error="Connection refused" if missing else "",
    )
    return DeliveryLine("miner-1", account)


def test_what_each_backend_has_is_told_at_the_end() -> None:
    page = on_terminal(report_with(delivery=(delivery("tensorboard"),)), 80)
    heading, _, line = page[page.index("\nDelivery\n") + 10 :].splitlines()[:3]
    assert heading.split() == ["backend", "logged", "delivered", "missing", "state"]
    assert line.split() == ["tensorboard", "503", "503", "0", "delivered"]
    assert "Not delivered" not in page
    assert "show miner-1 --delivery --dir demo-run/.nodetrack" in page


def test_what_is_not_delivered_is_told_with_the_reason_and_the_command() -> None:
    page = prose(report_with(delivery=(delivery("tensorboard"), delivery("influxdb", missing=246))))
    assert "influxdb lacks rows of miner-1: Connection refused." in page
    assert "tensorboard lacks" not in page
    assert "sync --dir demo-run/.nodetrack" in page
    assert "0003-aaaa 240–479" in page
