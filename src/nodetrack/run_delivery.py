"""The delivery process of an attempt: what it is told, how long it is waited for, what is said in the end."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec

from nodetrack.delivery.account import has_grown_beyond
from nodetrack.delivery.process import DeliveryProcess
from nodetrack.delivery.spec import Spec, TrainerProcess, name_of, revealed
from nodetrack.errors import BackendRefusedError
from nodetrack.machine import encodable
from nodetrack.process_end import process_end
from nodetrack.records import JsonValue
from nodetrack.run_state import RunState
from nodetrack.settings import Settings

#: What a handler of SIGTERM may wait for delivery: whoever sent it sends SIGKILL soon.
_HANDLER_SECONDS: Final = 5.0
_REFUSED_SECONDS: Final = 0.5
#: With a limit on the journal, a segment is at most this part of it: only whole ones can be removed.
_SEGMENTS_IN_LIMIT: Final = 10
_LEAST_SEGMENT_BYTES: Final = 4096


def segment_bytes(settings: Settings) -> int:
    """How large a segment may become."""
    limits = [limit for limit in (settings.keep_bytes, settings.max_bytes) if limit is not None]
    if not limits:
        return settings.segment_bytes
    return min(settings.segment_bytes, max(_LEAST_SEGMENT_BYTES, min(limits) // _SEGMENTS_IN_LIMIT))


class RunDelivery:
    """Has a run delivered to `backends`, given as to `init`. `facts` tell which process this is."""

    def __init__(
        self,
        state: RunState,
        settings: Settings,
        backends: Sequence[str | Mapping[str, object]],
        facts: Mapping[str, JsonValue],
    ) -> None:
        self._state = state
        self._settings = settings
        self._backends = backends
        self._facts = facts
        self._pid = os.getpid()
        self._is_refused = False
        state.delivered = tuple(map(name_of, backends))

    def start(self) -> None:
        """Start a process for the run as it is now, if there is anything for it to do."""
        state, settings = self._state, self._settings
        has_work = self._backends or settings.system_seconds or settings.max_bytes is not None
        if state.disabled or not has_work:
            return
        spec = Spec(
            folder=os.fsencode(state.identity.folder),
            header=msgspec.structs.replace(state.header(0, 0), summary={}, labels={}),
            backends=[revealed(given) for given in self._backends],
            trainer=TrainerProcess(
                self._pid,
                cast("float", self._facts.get("process_created_at") or 0.0),
                cast("int | None", self._facts.get("process_start_ticks")),
            ),
            finish_timeout=settings.finish_timeout,
            heartbeat_seconds=settings.heartbeat_seconds,
            system_seconds=settings.system_seconds,
            segment_bytes=segment_bytes(settings),
            keep_bytes=settings.keep_bytes,
            max_bytes=settings.max_bytes,
        )
        state.delivery = DeliveryProcess(spec, self._sync_command, state.warn)
        state.delivery.start()

    def shake_hands(self, deadline: float) -> None:
        """Let each backend answer, until `deadline` (monotonic). Raises BackendRefusedError."""
        delivery = self._state.delivery
        if delivery is None or not self._backends:
            return
        try:
            delivery.shake_hands(deadline)
        except BackendRefusedError:
            self._is_refused = True
            raise

    def tend(self) -> bool:
        """Once a second. Whether there is a process, which then syncs the journal."""
        delivery = self._state.delivery
        if delivery is None:
            return False
        delivery.tend()
        return delivery.is_alive

    def leave(self) -> None:
        """The attempt goes on as another run: have the rest of this one sent without waiting for it."""
        if self._state.delivery is not None:
            self._state.delivery.end(self._settings.finish_timeout, 0.0)

    def end(self, deadline: float) -> None:
        """Have the rest sent, until `deadline` (monotonic) at most, and name what is left then."""
        delivery = self._state.delivery
        if delivery is None or os.getpid() != self._pid:
            return
        seconds = max(0.0, deadline - time.monotonic())
        patience = min(seconds, _HANDLER_SECONDS) if process_end.handling else seconds
        if self._is_refused:  # `init` is about to say so; the others have a moment to take note of the end
            delivery.end(_REFUSED_SECONDS, _REFUSED_SECONDS)
            return
        try:
            all_sent = delivery.end(seconds, patience)
        except KeyboardInterrupt as interrupt:
            if self._backends:
                self._warn_of_interrupt(deadline)
            raise interrupt.with_traceback(None) from None  # where it was in our wait helps nobody
        if not all_sent and self._backends:
            self._warn_of_the_rest(seconds)

    def _warn_of_the_rest(self, seconds: float) -> None:
        """Delivery was not done in time."""
        run, left = self._state.identity.run, self._what_is_left()
        if left:
            self._state.warn(
                f"Run {run} ended before all of it was sent (still to be sent: {left}): "
                f"`{self._sync_command}` sends the rest."
            )
        else:
            self._state.warn(
                f"All of run {run} was sent, but {' or '.join(self._state.delivered)} had not closed after "
                f"{seconds:.0f} seconds and is waited for no longer. Nothing is left to be sent."
            )

    def _warn_of_interrupt(self, deadline: float) -> None:
        seconds, left = max(0.0, deadline - time.monotonic()), self._what_is_left()
        self._state.warn(
            f"Run {self._state.identity.run} was interrupted while its last records were sent (still to be "
            f"sent: {left or 'nothing'}): the delivery process goes on for at most {seconds:.0f} seconds, "
            f"and `{self._sync_command}` sends what is left then."
        )

    def _what_is_left(self) -> str:
        """For each backend that lacks something; empty if none does."""
        state, identity = self._state, self._state.identity
        reached = state.cursors()
        health = state.health(reached).backends
        lacking = []
        for kind in state.delivered:
            cursor = reached[kind].cursor if kind in reached else None
            if health[kind].pending:
                lacking.append(f"{kind} {health[kind].pending} rows")
            elif has_grown_beyond(identity.folder, cursor, [identity.attempt]):
                lacking.append(f"{kind} records other than rows")
        return ", ".join(lacking)

    @property
    def _sync_command(self) -> str:
        identity = self._state.identity
        folder = encodable(str(identity.folder.parents[2]))
        return f"nodetrack sync {identity.run} --dir {shlex.quote(folder)}"
