"""What the trainer prints, kept with its run: the lines of standard output and error, with their times.

Nothing is replaced. The stream objects stay; only their attribute `write` is wrapped, and calls on what was
there before, first. So `print`, `logging`, progress bars and the traceback of an uncaught exception are seen,
and what C code, a subprocess or a forked child writes is not.

A print never waits here and never raises for us. Its text is put into a queue; the thread that finds nobody
else at work takes the queue to the journal. Where the journal's lock is taken, whoever comes next goes on
with it: the next print, `tend` about once a second, or the end of the run. So a thread that prints while
another logs cannot stand in its way, whatever locks either holds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from nodetrack.console_lines import ConsoleStream, Line
from nodetrack.records import Kind

if TYPE_CHECKING:
    from nodetrack.run_state import RunState

_STREAMS: Final = ("stdout", "stderr")
#: What waits in the queue while whoever takes it to the journal is held up.
_MOST_HELD_CHARACTERS: Final = 2_000_000
_MOST_HELD_LINES: Final = 5_000
#: Pieces of a line are looked at together; so are lines that come in a flood, of which most are left out.
_PIECES: Final = 100
_PATIENCE_SECONDS: Final = 0.5


class _Write:
    """Stands in for the `write` of one stream, and gives on to `take` what was written."""

    def __init__(self, stream: Any, name: str, take: Callable[[str, object], None]) -> None:
        self.is_live = True
        below: object = vars(stream).get("write")
        if isinstance(below, _Write) and not below.is_live:  # somebody stood above it, and has gone since
            below.undo()
        self._stream = stream
        self._name = name
        self._take = take
        self._had_its_own = "write" in vars(stream)
        self._original = stream.write
        stream.write = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        written = self._original(*arguments, **keywords)
        if self.is_live and arguments:
            self._take(self._name, arguments[0])
        return written

    def undo(self) -> None:
        """Put back what was there before. If somebody has wrapped us meanwhile, only pass on from now on."""
        self.is_live = False
        if vars(self._stream).get("write") is not self:
            return
        if self._had_its_own:
            self._stream.write = self._original
        else:
            del self._stream.write


class _Watched:
    """A run that gets the lines, and those that it does not have yet."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.lines: deque[Line] = deque(maxlen=_MOST_HELD_LINES)

    def flush(self, *, wait: bool) -> None:
        """Write the lines to the journal; without `wait`, only if nobody is at it."""
        if not self.lines:
            return
        lock = self.state.journal.lock
        try:
            if not lock.acquire(blocking=wait):
                return
            while self.lines:
                line = self.lines.popleft()
                if not self.state.finished:
                    self.state.journal.write([int(Kind.CONSOLE), line.time_ns, line.stream, line.text])
        finally:
            try:
                lock.release()
            except RuntimeError:
                del lock  # it was not acquired, or a Ctrl-C came before it was


class _Console:
    """The streams of this process and the runs that get their lines."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._writes: list[_Write] = []
        self._reset()

    def _reset(self) -> None:
        self._queue: deque[tuple[int, str, str]] = deque()
        self._held = 0
        self._left_out = dict.fromkeys(_STREAMS, 0)
        self._streams = {name: ConsoleStream(name) for name in _STREAMS}
        #: Re-entrant, so that a handler of a signal cannot block on what its own thread holds: `_busy` tells.
        self._working = threading.RLock()
        self._busy = False

    def watch(self, state: RunState) -> None:
        """From now on the run gets the lines."""
        if state.disabled:
            return
        if not self._watched:
            self._reset()
            self._listen(state)
        self._watched.append(_Watched(state))

    def forget(self, state: RunState) -> None:
        """The run is about to end: it gets what it does not have yet. With the last one, the streams are as
        they were before.
        """
        leaving = [watched for watched in self._watched if watched.state is state]
        if not leaving:
            return
        is_last = len(leaving) == len(self._watched)
        if is_last:
            self._unlisten()
        self._work(is_end=is_last, timeout=_PATIENCE_SECONDS)
        for watched in leaving:
            watched.flush(wait=True)
        self._watched = [watched for watched in self._watched if watched not in leaving]

    def tend(self) -> None:
        """Once a second: what is due although nobody prints."""
        if self._watched:
            self._work()

    def after_fork_in_child(self) -> None:
        """The child's streams are as if we had never been there."""
        self._watched = []
        self._unlisten()
        self._reset()

    # -- the streams ---------------------------------------------------------------------------------

    def _listen(self, state: RunState) -> None:
        heard: list[object] = []
        for name in _STREAMS:
            stream: Any = getattr(sys, name)
            if stream is None or any(stream is other for other in heard):
                continue
            heard.append(stream)
            try:
                self._writes.append(_Write(stream, name, self._take))
            except (AttributeError, TypeError):  # no such attribute, or none that can be set
                state.warn_once(
                    f"console {name}",
                    f"What is printed to {name} is not kept: its {type(stream).__name__} cannot be wrapped.",
                )

    def _unlisten(self) -> None:
        for write in reversed(self._writes):
            write.undo()
        self._writes = []

    def _take(self, name: str, text: object) -> None:
        """What has been written to a stream. Nothing that fails here is the business of whoever prints."""
        try:
            if isinstance(text, str) and text:
                self._put(name, text)
        except Exception as error:
            self._fail(error)

    def _put(self, name: str, text: str) -> None:
        room = _MOST_HELD_CHARACTERS - self._held
        if len(text) > room:
            self._left_out[name] += text.count("\n", max(0, room))
            text = text[: max(0, room)]
        self._held += len(text)
        self._queue.append((time.time_ns(), name, text))
        if len(self._queue) >= _PIECES or ("\n" in text and not self._streams[name].is_flooded):
            self._work()

    def _fail(self, error: Exception) -> None:
        for watched in self._watched:
            watched.state.warn_once(
                "console", f"A printed line could not be kept ({type(error).__name__}: {error})."
            )

    # -- to the journal ------------------------------------------------------------------------------

    def _work(self, *, is_end: bool = False, timeout: float = 0.0) -> None:
        """Take what waits to the runs. Whoever comes while somebody is at it leaves it to him."""
        working = self._working
        try:
            if not working.acquire(timeout=timeout) or self._busy:
                return
            try:
                self._busy = True
                self._carry(is_end=is_end)
            finally:
                self._busy = False
        except Exception as error:  # as in `_take`; the keeper has no use for it either
            self._fail(error)
        finally:
            try:
                working.release()
            except RuntimeError:
                del working  # it was not acquired, or a Ctrl-C came before it was

    def _carry(self, *, is_end: bool) -> None:
        for line in self._lines(is_end=is_end):
            for watched in self._watched:
                watched.lines.append(line)
        for watched in self._watched:
            watched.flush(wait=False)

    def _lines(self, *, is_end: bool) -> Iterator[Line]:
        while self._queue:
            time_ns, name, text = self._queue.popleft()
            self._held -= len(text)
            yield from self._streams[name].add(time_ns, text)
        self._held = 0
        now = time.time_ns()
        for name, stream in self._streams.items():
            if self._left_out[name]:
                stream.leave_out(self._left_out[name])
                self._left_out[name] = 0
            yield from stream.end(now) if is_end else stream.due(now)


console = _Console()
os.register_at_fork(after_in_child=console.after_fork_in_child)
