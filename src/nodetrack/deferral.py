"""Rows whose values are still being computed, and the thread that waits for those values.

A value of a lazy kind, such as a JAX array, is a promise: to read it is to wait for the device. A deferred
row has its time, its step and its place among the rows from the call, and its values when there are some.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

from nodetrack.records import StoredValue

if TYPE_CHECKING:
    from threading import RLock

#: More rows than this wait for nothing: the next call reads its own values.
MOST_DEFERRED: Final = 256
_DEEPEST: Final = 8
_JOIN_SECONDS: Final = 0.2
_LOCK_SECONDS: Final = 0.02

#: An event stands for "all that came before is done", None for the end.
_Item: TypeAlias = "DeferredRow | threading.Event | None"


class DeferredRow:
    """One call of `log`, without its values. `order` is its place among all rows of the run."""

    __slots__ = ("counted", "kept", "order", "read", "skipped", "step", "time_ns", "values", "write")

    def __init__(
        self,
        values: Mapping[str, object],
        step: int,
        time_ns: int,
        *,
        counted: bool,
        order: int,
        read: Callable[[DeferredRow], None],
        write: Callable[[DeferredRow], None],
    ) -> None:
        self.values = values
        self.step = step
        self.time_ns = time_ns
        self.counted = counted
        self.order = order
        #: Makes `kept` and `skipped` of the values, waiting for them if need be. Raises and locks nothing.
        self.read = read
        #: Writes what was kept, under the journal's lock. Raises nothing.
        self.write = write
        self.kept: dict[str, StoredValue] = {}
        self.skipped: list[tuple[str, str]] = []


class Deferral:
    """Reads deferred rows one after the other, in the order of the calls, in a thread of its own.

    The thread begins with the first row and is a daemon, as a value may never come. The caller holds the
    journal's `lock` around `put` and `give_up`.

    A handler of SIGTERM may stand on top of a frame that holds that lock. So the thread never insists on it:
    what it has read and cannot write is written by whoever calls `drain`.
    """

    def __init__(self, lock: Callable[[], RLock]) -> None:
        self._lock = lock
        self._begin()

    def _begin(self) -> None:
        # Not `Queue`: a signal handler may log while its own thread is in `put`.
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._waiting: set[DeferredRow] = set()
        self._ready: deque[DeferredRow] = deque()
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """How many rows wait for their values."""
        return len(self._waiting)

    def has_room(self) -> bool:
        """Whether a row can be put; if not, its values are the caller's to read."""
        if len(self._waiting) >= MOST_DEFERRED:
            return False
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(
                target=self._work, args=(self._queue,), name="nodetrack-deferral", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had, or the interpreter is about to end
                return False
            self._thread = thread
        return True

    def put(self, row: DeferredRow) -> None:
        """Have a row written when its values are there."""
        self._waiting.add(row)
        self._queue.put(row)

    def drain(self, seconds: float) -> bool:
        """Wait until all that was put before is written; False if it is not after so many seconds. What can
        be written by then is.
        """
        if not self._waiting or threading.current_thread() is self._thread:
            return True
        reached = threading.Event()
        self._queue.put(reached)
        in_time = reached.wait(max(0.0, seconds))
        with self._lock():
            self._write_ready()
        return in_time

    def give_up(self) -> int:
        """Write none of the rows that wait, however late their values come. How many these were."""
        count = len(self._waiting)
        self._waiting.clear()
        return count

    def stop(self) -> None:
        """End the thread. One that waits for a value which does not come is left to the process's end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join(_JOIN_SECONDS)

    def after_fork_in_child(self) -> None:
        """The rows that wait are the parent's, and so is the thread."""
        self._begin()

    def _work(self, queue: SimpleQueue[_Item]) -> None:
        while True:
            item = queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
            elif item in self._waiting:
                item.read(item)
                self._ready.append(item)
                self._write_when_free(queue)

    def _write_when_free(self, queue: SimpleQueue[_Item]) -> None:
        while self._ready:
            lock = self._lock()
            if lock.acquire(timeout=_LOCK_SECONDS if queue.empty() else 0):
                try:
                    self._write_ready()
                finally:
                    lock.release()
            elif not queue.empty():  # there is something else to do meanwhile
                return

    def _write_ready(self) -> None:
        """The caller holds the lock."""
        while self._ready:
            row = self._ready.popleft()
            if row in self._waiting:  # else it was given up
                self._waiting.remove(row)
                row.write(row)


def held(values: Mapping[str, object], depth: int = _DEEPEST) -> Mapping[str, object]:
    """The mapping as it is now, so that the caller may fill it anew. Of the values only the names are
    copied.
    """
    return {
        name: held(value, depth - 1) if depth and isinstance(value, Mapping) else value
        for name, value in values.items()
    }
