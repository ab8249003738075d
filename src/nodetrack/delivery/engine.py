"""One run on its way to its backends: one worker each, from its own cursor.

Live delivery, catch-up after an outage and `nodetrack sync` all run this; they differ in `follow` alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from nodetrack.backends.base import Backend
from nodetrack.delivery.worker import Status, Worker


class Delivery:
    """Sends a run's records to `backends`, each at its own pace.

    `follow`: wait for more until `drain` is called. Without it the workers end once all that is in the
    journal has been sent. `attempts` restricts it to some, by id; `own_attempt` is the one of the trainer
    whose process this is, see Worker. `changed` is called from the workers' threads after every batch and
    whenever a backend's state changes.
    """

    def __init__(
        self,
        run_folder: Path,
        project: str,
        backends: Mapping[str, Backend[Any]],
        *,
        follow: bool,
        attempts: Collection[str] | None = None,
        changed: Callable[[Status], None] = lambda _: None,
        own_attempt: str | None = None,
    ) -> None:
        self._draining = threading.Event()
        if not follow:
            self._draining.set()
        self.workers = {
            kind: Worker(run_folder, project, kind, backend, self._draining, attempts, changed, own_attempt)
            for kind, backend in backends.items()
        }

    def start(self) -> None:
        """Begin. Returns at once."""
        for worker in self.workers.values():
            worker.start()

    def drain(self) -> None:
        """No more records are coming: each worker ends once it has sent what is there."""
        self._draining.set()
        for worker in self.workers.values():
            worker.wake()

    def stop(self) -> None:
        """Give up what is not sent: workers end after the call that they are in. What is missing stays in
        the journal, and the cursors say where to go on.
        """
        for worker in self.workers.values():
            worker.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the workers to end; False if one is still at it after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker in self.workers.values():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not worker.join(left):
                return False
        return True

    def statuses(self) -> dict[str, Status]:
        """Where each backend stands now."""
        return {kind: worker.status() for kind, worker in self.workers.items()}
