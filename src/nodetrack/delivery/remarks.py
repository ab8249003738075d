"""What the answers of a delivery process mean to the person who trains, in sentences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from nodetrack.delivery.connection import UNREACHED
from nodetrack.delivery.spec import Answer
from nodetrack.errors import BackendRefusedError

#: A backend that comes and goes is spoken of so often at most.
_SILENCE_SECONDS: Final = 60.0
#: So long the end of the last attempt may take without being worth a word.
_SHORT_WAIT_SECONDS: Final = 1.0


class Remarks:
    """Keeps the newest answers, and says what changes: that a backend is away, and that it is back."""

    def __init__(self, backends: Collection[str], warn: Callable[[str], None]) -> None:
        #: By backend, those that have answered.
        self.answers: dict[str, Answer] = {}
        self._backends = tuple(backends)
        self._warn = warn
        #: What was last said of each backend, and when.
        self._said: dict[str, tuple[str, float]] = {}
        #: Since when another process has kept us waiting for a backend.
        self._waiting_since: dict[str, float] = {}

    def take(self, answer: Answer) -> None:
        """Note an answer."""
        if answer.state == "remark":
            self._warn(answer.message)
            return
        self.answers[answer.backend] = answer
        if answer.state == "waiting":
            self._waiting_since.setdefault(answer.backend, time.monotonic())
        else:
            self._waiting_since.pop(answer.backend, None)

    @property
    def unsettled(self) -> list[str]:
        """The backends of which it is not known yet whether they let us in. One that another process has is
        settled after a moment: that process may go on for as long as its node.
        """
        return [name for name in self._backends if self._is_open(name) or self._waits_briefly(name)]

    @property
    def refused(self) -> dict[str, str]:
        """The backends that do not let us in, and their words."""
        return {name: self.answers[name].message for name in self._backends if self._state(name) == "refused"}

    def begin(self) -> None:
        """The hand-shake is over: say who is not there."""
        for name in self._backends:
            if self._is_open(name):
                self._say(
                    name,
                    "",
                    f"The backend {name} has not answered yet: rows wait in the journal for it.",
                )
        self.speak()

    def speak(self) -> None:
        """Say what has changed."""
        for name, answer in self.answers.items():
            state, since = self._said.get(name, ("ready", -math.inf))
            just_back = state == "ready" and time.monotonic() - since < _SILENCE_SECONDS
            is_early = self._is_open(name) or self._waits_briefly(name)
            if answer.state != state and not just_back and not is_early:
                self._say(name, answer.state, _sentence(name, answer))

    def _say(self, name: str, state: str, sentence: str) -> None:
        self._said[name] = state, time.monotonic()
        self._warn(sentence)

    def _is_open(self, name: str) -> bool:
        return self._state(name) in ("", "starting")

    def _waits_briefly(self, name: str) -> bool:
        since = self._waiting_since.get(name)
        return since is not None and time.monotonic() - since < _SHORT_WAIT_SECONDS

    def _state(self, name: str) -> str:
        answer = self.answers.get(name)
        return answer.state if answer is not None else ""


def _sentence(name: str, answer: Answer) -> str:
    if answer.state == "ready":
        return f"The backend {name} can be had: the rows that waited for it are being sent."
    if answer.state == "waiting":
        return f"Another process is sending this run to {name} just now: this one goes on when it has ended."
    if answer.state == "refused":
        return f"{_stopped(answer.message)} Rows for {name} wait in the journal."
    if answer.message.startswith(UNREACHED):
        return f"The backend {name} {answer.message}. Its rows wait in the journal until it is back."
    return f"The backend {name} cannot be had ({answer.message}): rows wait in the journal until it is back."


def _stopped(message: str) -> str:
    """Words of a service as a sentence."""
    return f"{message.rstrip('.')}."


def refusal(refused: Mapping[str, str]) -> BackendRefusedError:
    """What `init` raises, naming every backend that refuses us."""
    names = [*refused]
    words = " ".join(map(_stopped, refused.values()))
    return BackendRefusedError(
        f"{words} Correct that, or leave {_listed(names)} out of the backends.", ", ".join(names)
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
