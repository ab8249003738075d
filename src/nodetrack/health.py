"""What `run.health()` answers: is anything lost, late or odd?"""

from __future__ import annotations

from typing import Literal

import msgspec


class Skipped(msgspec.Struct, frozen=True):
    """Values of one name that were left out of their rows, and why."""

    count: int
    reason: str


class BackendHealth(msgspec.Struct, frozen=True):
    """One backend: how far it has come, and what went wrong last. Counts are rows of this attempt that this
    process logged: not those of earlier attempts, nor those of forked children. `nodetrack show RUN
    --delivery` counts the whole run.
    """

    #: starting: has not answered yet. down: cannot be had just now. refused: does not let us in.
    state: Literal["starting", "ok", "down", "refused"]
    logged: int
    #: Rows that it has, that it refused for good, and that were removed from a full disk before it had them.
    delivered: int
    #: What went wrong last. It is over if `state` is ok.
    last_error: str = ""
    quarantined: int = 0
    lost: int = 0
    #: The lowest and the highest step of the rows that stand in the journal and that it lacks: those that it
    #: refused, that were removed, or that still wait in memory are not among them.
    missing: tuple[int, int] | None = None
    #: By reason: values that it has no way to show.
    left_out: dict[str, int] = {}
    #: Where the run can be looked at.
    url: str | None = None

    @property
    def pending(self) -> int:
        """How many rows are still to be sent."""
        return max(0, self.logged - self.delivered - self.quarantined - self.lost)


class Health(msgspec.Struct, frozen=True):
    """The state of a run as its own process sees it. Counts are rows of this attempt unless named
    otherwise.
    """

    state: Literal["ok", "degraded", "finished", "disabled"]
    #: Rows accepted by `log`; `logged` = `written` + `pending` + `lost` as long as only rows wait.
    logged: int
    #: Rows in the journal.
    written: int
    #: Records that wait in memory: the disk refuses, or the values of deferred rows are still computed.
    pending: int
    #: Records that could not be kept, and deferred rows whose values never came.
    lost: int
    #: Rows whose step was lower than that of an earlier row with the same metrics. They are kept.
    out_of_order: int
    #: By metric: how many values were NaN or infinite, and the step of the first.
    nonfinite: dict[str, int]
    first_nonfinite: dict[str, int]
    #: By name: values that were left out of their row.
    skipped: dict[str, Skipped]
    backends: dict[str, BackendHealth]
    #: What the disk said last, empty when it never refused.
    last_error: str
    #: Everything that was warned of, oldest first.
    warnings: list[str]
