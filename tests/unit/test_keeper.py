"""The thread that looks after a run goes on whatever happens to it."""

from __future__ import annotations

import logging
import threading

import pytest

import nodetrack.keeper
from nodetrack.keeper import Keeper


def test_a_keeper_whose_work_fails_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodetrack.keeper, "TEND_SECONDS", 0.001)
    calls, enough = [], threading.Event()

    def fail() -> None:
        calls.append(1)
        if len(calls) == 5:
            enough.set()
        raise RuntimeError("broken")

    keeper = Keeper(fail, lambda: None, 60)
    with caplog.at_level(logging.ERROR):
        keeper.start()
        assert enough.wait(30)
        keeper.stop(30)
    assert len([record for record in caplog.records if "Looking after a run failed" in record.message]) == 1


def test_stop_waits_for_the_thread() -> None:
    keeper = Keeper(lambda: None, lambda: None, 60)
    keeper.start()
    keeper.stop(30)
    assert "nodetrack-keeper" not in [thread.name for thread in threading.enumerate()]
