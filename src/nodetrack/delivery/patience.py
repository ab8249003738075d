"""How a worker waits: between tries of what has failed, until it succeeds, is woken, or has to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential
from tenacity.stop import stop_when_event_set

from nodetrack.errors import BatchRejectedError

_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 60.0
_LONGEST_PAUSE_AT_THE_END_SECONDS: Final = 2.0
#: A service may ask for more, by mistake or malice, and is asked again after so long.
_LONGEST_ASKED_SECONDS: Final = 3600.0


class Patience:
    """The waiting of one worker. Once `draining` is set no more records come, and pauses are short."""

    def __init__(self, draining: threading.Event) -> None:
        self.draining = draining
        self.stopping = threading.Event()
        self._awake = threading.Event()
        self._asked_to_wait = False

    def wake(self) -> None:
        """End the wait that is under way; from any thread."""
        self._awake.set()

    def stop(self) -> None:
        """Have every wait end from now on; from any thread."""
        self.stopping.set()
        self._awake.set()

    def wait(self, seconds: float) -> None:
        """Until so many seconds have passed, or somebody wakes the worker."""
        self._awake.wait(seconds)
        self._awake.clear()

    def rest(self) -> None:
        """As long as the longest pause between two tries."""
        at_the_end = self.draining.is_set()
        self.wait(_LONGEST_PAUSE_AT_THE_END_SECONDS if at_the_end else _LONGEST_PAUSE_SECONDS)

    def persist(self, call: Callable[[], None], failed: Callable[[BaseException | None, int], None]) -> bool:
        """Call until it succeeds; False if the worker was stopped before. `failed` is told of each failure
        and which one in a row it is. Raises BatchRejectedError.
        """

        def note_failure(state: RetryCallState) -> None:
            error = _error_of(state)
            self._asked_to_wait = getattr(error, "retry_after_seconds", None) is not None
            failed(error, state.attempt_number)

        def unless_stopped() -> bool:
            if self.stopping.is_set():
                return False
            call()
            return True

        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=self._pause,
            stop=stop_when_event_set(self.stopping),
            sleep=self._sleep,
            before_sleep=note_failure,
            reraise=True,
        )
        try:
            return retrying(unless_stopped)
        except BatchRejectedError:
            raise
        except Exception:
            if not self.stopping.is_set():
                raise
            return False

    def _pause(self, state: RetryCallState) -> float:
        """How long until the next try: what the service asks for, else longer and longer."""
        asked = getattr(_error_of(state), "retry_after_seconds", None)
        if asked is not None:
            return min(max(0.0, float(asked)), _LONGEST_ASKED_SECONDS)
        pause = wait_random_exponential(multiplier=_FIRST_PAUSE_SECONDS, max=_LONGEST_PAUSE_SECONDS)(state)
        return min(pause, _LONGEST_PAUSE_AT_THE_END_SECONDS) if self.draining.is_set() else pause

    def _sleep(self, seconds: float) -> None:
        """Until the next try is due, or somebody wakes the worker. A service that named the time is not
        asked before.
        """
        event = self.stopping if self._asked_to_wait else self._awake
        event.wait(seconds)
        self._awake.clear()


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, BatchRejectedError)


def _error_of(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None
