"""What stands in `delivery.log`: what has changed and when, never more than a disk can bear.

A backend that comes and goes every second for weeks has its first lines, and from then on one a minute; of
what is left out the newest is written as soon as there is room for it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from nodetrack.redact import redact_text

if TYPE_CHECKING:
    from nodetrack.delivery.worker import Status

FORMAT: Final = "%(asctime)s %(name)s %(levelname)s: %(message)s"
#: So many lines about one thing at once, and one more after so many seconds.
_LINES: Final = 30
_LINE_SECONDS: Final = 60.0

_log = logging.getLogger("nodetrack.delivery")


class Diary:
    """Takes what happens from any thread, and writes it to the log of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[str, _Page] = {}
        self._statuses: dict[str, Status] = {}

    def take(self, status: Status) -> None:
        """Note where a backend stands; called after every batch."""
        before, name = self._statuses.get(status.backend), status.backend
        self._statuses[name] = status
        words = _news(status, before)
        if words:
            self.note(name, f"{name}: {words}")
        if status.quarantined > (before.quarantined if before is not None else status.quarantined):
            self.note(
                f"{name} quarantine",
                f"{name}: {status.quarantined} rows of the run refused for good so far: "
                f"see quarantine/{name}.jsonl",
            )

    def note(self, about: str, sentence: str) -> None:
        """Write a sentence, unless there is too much about this already."""
        with self._lock:
            self._pages.setdefault(about, _Page()).add(sentence)

    def tend(self) -> None:
        """Now and then: write what there is room for by now."""
        with self._lock:
            for page in self._pages.values():
                page.write()


class _Page:
    """The lines about one thing."""

    def __init__(self) -> None:
        self._room = float(_LINES)
        self._counted_at = time.monotonic()
        self._unwritten = ""
        self._left_out = 0

    def add(self, sentence: str) -> None:
        self._left_out += bool(self._unwritten)
        self._unwritten = sentence
        self.write()

    def write(self) -> None:
        now = time.monotonic()
        self._room = min(_LINES, self._room + (now - self._counted_at) / _LINE_SECONDS)
        self._counted_at = now
        if self._unwritten and self._room >= 1:
            left_out = f" ({self._left_out} lines before this were left out)" if self._left_out else ""
            _log.info("%s%s", redact_text(self._unwritten), left_out)
            self._room -= 1
            self._unwritten, self._left_out = "", 0


def _news(status: Status, before: Status | None) -> str:
    """What is new about a backend since the last time; "" if nothing is."""
    if before is not None and (before.state, before.error) == (status.state, status.error):
        return ""
    match status.state:
        case "starting":
            return ""
        case "ok":
            if before is not None and before.state in ("down", "refused"):
                return "back; what waited for it is being sent"
            return f"ready{'' if status.url is None else f', {status.url}'}"
        case "done":
            return f"has all that there is, {status.delivered} rows of the run"
        case "waiting":
            return "another process is sending this run to it"
        case state:
            return f"{state}: {status.error}"


def log_line(sentence: str) -> str:
    """A line as the process itself would write it, for whoever writes to its log while there is none."""
    record = logging.LogRecord(_log.name, logging.INFO, "", 0, sentence, None, None)
    return f"{logging.Formatter(FORMAT).format(record)}\n"
