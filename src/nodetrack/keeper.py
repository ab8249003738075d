"""The thread that looks after a run: once a second it syncs the journal, every few seconds it shows a
sign of life.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

TEND_SECONDS: Final = 1.0
_logger: Final = logging.getLogger("nodetrack")


class Keeper:
    """Calls `tend` once a second and `beat` every `heartbeat_seconds`, until `stop`.

    Neither should raise; if one does, that is logged the first time and the keeper goes on. The thread is
    joined by `stop`; it is a daemon only so that a process whose exit hooks do not run can still end.
    """

    def __init__(self, tend: Callable[[], None], beat: Callable[[], None], heartbeat_seconds: float) -> None:
        self._tend = tend
        self._beat = beat
        self._heartbeat_seconds = heartbeat_seconds
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nodetrack-keeper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End and wait for it, at most `timeout` seconds."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self) -> None:
        next_beat = time.monotonic()
        while True:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._heartbeat_seconds
                self._safely(self._beat)
            if self._stop.wait(TEND_SECONDS):
                return
            self._safely(self._tend)

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # a fault of ours must not end the syncing of everything that is still to come
            if not self._failed:
                self._failed = True
                _logger.exception("Looking after a run failed; it is tried again every second.")


def touch(path: Path) -> None:
    """Set the file's time to now, making the file if need be. A disk that refuses is the journal's to
    report.
    """
    try:
        os.utime(path)
    except FileNotFoundError:
        try:
            path.touch()
        except OSError:
            return
    except OSError:
        return
