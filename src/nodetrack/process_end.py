"""How the process ends, told to the attempts that are still open.

| the process …                                   | the attempt is          |
|-------------------------------------------------|-------------------------|
| ends without `finish`                           | finished                |
| ends by `sys.exit(3)`                           | crashed, exit code 3    |
| ends by an uncaught exception                   | crashed, with its type  |
| gets Ctrl-C or SIGTERM and ends                 | terminated, by name     |

Nothing is taken from the user: `sys.excepthook`, `sys.exit` and the handler of SIGTERM are called as they
were before, and put back when the last attempt has finished unless somebody has replaced them since.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import NoReturn, Protocol, TypeAlias

_Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int"


class Ending(Protocol):
    """An attempt, as this module sees it. `end` must be harmless after `finish`."""

    def end(self, state: str, exit_code: int, reason: str) -> None:
        """Record how the attempt ended and close it."""

    def note_signal(self, name: str) -> None:
        """Record that a signal came, with the process going on for now."""


class _ProcessEnd:
    """The hooks of this process and the attempts that they speak to."""

    def __init__(self) -> None:
        self._attempts: list[Ending] = []
        self._installed = False
        self._exit_code = 0
        self._error: BaseException | None = None
        self._signal = ""
        #: Whether a handler of SIGTERM runs: it stands on top of a frame that may hold any lock.
        self.handling = False
        self._old_error: object = None
        self._mask: Iterable[int] = ()

    def watch(self, attempt: Ending) -> None:
        """Tell `attempt` when the process ends."""
        self._attempts.append(attempt)
        if not self._installed:
            self._install()

    def forget(self, attempt: Ending) -> None:
        """The attempt has finished."""
        if attempt in self._attempts:
            self._attempts.remove(attempt)
        if not self._attempts and self._installed:
            self._uninstall()

    # -- installing ----------------------------------------------------------------------------------

    def _install(self) -> None:
        self._installed = True
        self._exit_code, self._error, self._signal = 0, None, ""
        self._old_error = getattr(sys, "last_value", None)
        atexit.register(self._at_exit)
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self._exit, sys.exit = sys.exit, self._on_exit
        self._term: _Handler = signal.SIG_DFL
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGTERM)
            if previous is not signal.SIG_IGN and previous is not None:
                self._term = previous
                signal.signal(signal.SIGTERM, self._on_term)

    def _uninstall(self) -> None:
        self._installed = False
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if sys.exit == self._on_exit:
            sys.exit = self._exit
        if signal.getsignal(signal.SIGTERM) == self._on_term:
            with contextlib.suppress(
                ValueError
            ):  # only the main thread may; elsewhere ours passes signals on
                signal.signal(signal.SIGTERM, self._term)

    # -- forking -------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Hold SIGTERM back until the child is itself: Python forgets signals that come in between."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork_in_parent(self) -> None:
        """Go on as before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def after_fork_in_child(self) -> None:
        """The attempts are the parent's: the child has its handlers as if we had never been there."""
        self._attempts = []
        if self._installed:
            self._uninstall()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    # -- the hooks -----------------------------------------------------------------------------------

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._error = error
        self._excepthook(kind, error, trace)

    def _on_exit(self, status: object = None) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends the thread alone
            self._exit_code = exit_code_of(status)
        self._exit(status)  # type: ignore[arg-type]  # typeshed's alias of the same thing

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        for attempt in list(self._attempts):
            attempt.note_signal(self._signal)
        self.handling = True
        try:
            if callable(self._term):
                self._term(number, frame)
                return
            self._end_all()
        finally:
            self.handling = False
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _at_exit(self) -> None:
        self._end_all()

    def _end_all(self) -> None:
        state, exit_code, reason = self._how()
        for attempt in list(self._attempts):
            attempt.end(state, exit_code, reason)

    def _how(self) -> tuple[str, int, str]:
        error = self._error or self._last_error()
        if isinstance(error, KeyboardInterrupt):
            return "terminated", 128 + signal.SIGINT, "SIGINT"
        if error is not None:
            return ("crashed", 1, describe_error(error))
        if self._signal:
            return "terminated", 128 + signal.Signals[self._signal], self._signal
        if self._exit_code:
            return "crashed", self._exit_code, f"exit code {self._exit_code}"
        return "finished", 0, ""

    def _last_error(self) -> BaseException | None:
        """The uncaught exception, where somebody replaced our hook without calling it on."""
        if hasattr(sys, "ps1"):  # in an interactive session every mistake is an "uncaught exception"
            return None
        error = getattr(sys, "last_value", None)
        return error if isinstance(error, BaseException) and error is not self._old_error else None


def exit_code_of(status: object) -> int:
    """The exit code of `sys.exit(status)`: nothing is 0, a text is printed and is 1."""
    return status if isinstance(status, int) else 0 if status is None else 1


def describe_error(error: BaseException) -> str:
    """`ValueError: the message`, cut to a length that fits a table."""
    try:
        message = str(error)
    except Exception:  # an exception class of the caller's own
        message = ""
    text = f"{type(error).__name__}: {message}".rstrip(": ")
    return text if len(text) <= 500 else f"{text[:500]}…"


process_end = _ProcessEnd()
os.register_at_fork(
    before=process_end.before_fork,
    after_in_parent=process_end.after_fork_in_parent,
    after_in_child=process_end.after_fork_in_child,
)
