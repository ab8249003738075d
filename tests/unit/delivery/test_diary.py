"""What stands in the log of the delivery process, and how much of it."""

from __future__ import annotations

import logging
import re

import pytest

from nodetrack.delivery import diary as diary_module
from nodetrack.delivery.diary import Diary, log_line
from nodetrack.delivery.worker import Status, WorkerState


def status(state: WorkerState, error: str = "", quarantined: int = 0) -> Status:
    return Status("influxdb", state, error, None, delivered=7, quarantined=quarantined, lost=0)


def test_what_changes_is_written_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nodetrack.delivery")
    diary = Diary()
    for now in (
        status("starting"),
        status("ok"),
        status("ok"),
        status("down", "HTTP 503"),
        status("down", "HTTP 503"),
        status("down", "HTTP 502"),
        status("ok"),
        status("ok", quarantined=3),
        status("done", quarantined=3),
    ):
        diary.take(now)
    assert caplog.messages == [
        "influxdb: ready",
        "influxdb: down: HTTP 503",
        "influxdb: down: HTTP 502",
        "influxdb: back; what waited for it is being sent",
        "influxdb: 3 rows of the run refused for good so far: see quarantine/influxdb.jsonl",
        "influxdb: has all that there is, 7 rows of the run",
    ]


def test_a_backend_that_comes_and_goes_fills_no_disk_and_its_newest_state_is_told_in_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "nodetrack.delivery")
    now = [0.0]
    monkeypatch.setattr("nodetrack.delivery.diary.time.monotonic", lambda: now[0])
    diary = Diary()
    for _ in range(5000):
        diary.take(status("ok"))
        diary.take(status("down", "HTTP 503"))
    diary.note("limits", "one segment removed")
    assert len(caplog.messages) == diary_module._LINES + 1, "another thing has its own room"
    diary.tend()
    assert len(caplog.messages) == diary_module._LINES + 1
    now[0] = 61.0
    diary.tend()
    diary.tend()
    assert caplog.messages[-1] == "influxdb: down: HTTP 503 (9969 lines before this were left out)"
    assert len(caplog.messages) == diary_module._LINES + 2


def test_no_secret_is_written_down(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nodetrack.delivery")
    Diary().take(status("down", "no answer of https://me:hunter22@metrics:8086/"))
    assert "metrics:8086" in caplog.text
    assert "hunter22" not in caplog.text


def test_a_line_of_the_trainer_looks_like_the_others() -> None:
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} nodetrack\.delivery INFO: gone\n", log_line("gone")
    )
