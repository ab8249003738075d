"""The delivery process's word to its trainer: the newest state of each backend, never waiting to be heard."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Final

from nodetrack.delivery.spec import Answer, AnswerState, encode_answer
from nodetrack.delivery.worker import Status

_STATES: Final[Mapping[str, AnswerState]] = {
    "starting": "starting",
    "ok": "ready",
    "done": "ready",
    "down": "down",
    "refused": "refused",
    "waiting": "waiting",
}


class Speaker:
    """Takes states from any thread; `flush` writes what has changed, from one. `wake` asks for a flush.

    A trainer that does not listen for hours loses states that have passed, not the newest.
    """

    def __init__(self, channel: int, wake: Callable[[], None]) -> None:
        self._channel = channel
        self._wake = wake
        self._lock = threading.Lock()
        self._said: dict[str, Answer] = {}
        self._unsaid: dict[str, Answer] = {}
        os.set_blocking(channel, False)

    def take(self, status: Status) -> None:
        """Note where a backend stands; called after every batch."""
        state = _STATES.get(status.state)
        if state is not None:
            self.say(Answer(status.backend, state, status.error, status.url))

    def say(self, answer: Answer) -> None:
        """Have an answer written, if it is news."""
        with self._lock:
            last = self._unsaid.get(answer.backend) or self._said.get(answer.backend)
            if last is not None and (last.state, last.url) == (answer.state, answer.url):
                return
            self._unsaid[answer.backend] = answer
        self._wake()

    def flush(self) -> None:
        """Write what is not said yet, as far as the pipe takes it."""
        with self._lock:
            for name, answer in [*self._unsaid.items()]:
                try:
                    os.write(self._channel, encode_answer(answer))
                except BlockingIOError:
                    return  # it is tried again with the next tick
                except OSError:
                    pass  # nobody listens any more
                self._said[name] = self._unsaid.pop(name)
