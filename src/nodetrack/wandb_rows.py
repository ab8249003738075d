"""How rows reach a W&B run without one of them being lost.

W&B knows one rising `_step` a run and drops, in silence, every row whose step is lower. Here each row goes
to the journal first, under the caller's step; then to W&B under flat names (`v<version>/loss`,
`latest/loss`, `v<version>/step`, see `naming`), in a W&B row whose number is the caller's step while that
grows, and the next free number where it does not. The caller's step is the value of `v<version>/step`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from nodetrack.backends._wandb_rows import UnshownError, for_wandb, number_for
from nodetrack.live_run import Run
from nodetrack.naming import check_name, flatten_row
from nodetrack.values import Histogram, Image, Table, Text

_STEP: Final = "step"  # the one metric that decides where the tracker's own step goes, see flatten_row
_OURS: Final = (Histogram, Image, Table, Text)

_log = logging.getLogger("nodetrack")


class Send(Protocol):
    """The `log` that the W&B run had of its own."""

    def __call__(
        self, data: dict[str, object], step: int | None = None, commit: bool | None = None
    ) -> None: ...


@dataclass
class _OpenRow:
    """The W&B row that may still be added to; `step` is the caller's, `number` is W&B's."""

    step: int
    number: int
    names: set[str] = field(default_factory=set)
    user_step: dict[str, object] = field(default_factory=dict)


class WandbRows:
    """The `log` of the runs that `initialize_wandb` returns.

    `send` is None where there is no W&B: then rows are journalled only. `refused` counts the rows that W&B
    did not take, so that only the journal has them.
    """

    def __init__(self, journal: Run, send: Send | None, first_number: int = 0) -> None:
        self._journal = journal
        self._send_row = send
        self._lowest_number = first_number
        self._open: _OpenRow | None = None
        self._pid = os.getpid()
        self.refused = 0
        self._renew_lock()
        renew = weakref.WeakMethod(self._renew_lock)
        # A child that is forked while another thread logs would wait for ever.
        os.register_at_fork(after_in_child=lambda: (found := renew()) and found())

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def log(
        self,
        data: Mapping[str, object],
        step: int | None = None,
        commit: bool | None = None,
        sync: bool | None = None,  # noqa: ARG002 - older wandb has it, and its callers pass it
    ) -> None:
        """What `wandb.Run.log` does, for every step: see the module.

        Raises UsageError and RunFinishedError for the caller's own mistakes, nothing for W&B's troubles.
        """
        with self._lock:
            tracker_step = self._tracker_step(step)
            self._journal.log(data, step, commit=commit)
            if self._send_row is not None and not self._journal.disabled:
                ends = bool(commit) if step is not None else commit is not False
                self._send(self._send_row, _flattened(data), tracker_step, ends)

    def _tracker_step(self, step: int | None) -> int:
        """The step that the journal is about to give the row."""
        if step is None:
            return cast("int", self._journal.state_dict()["counter"])
        try:
            return math.floor(step)
        except (TypeError, ValueError, OverflowError):
            return self._tracker_step(None)  # the journal keeps such a row under its counter, and warns

    def _send(self, send: Send, values: Mapping[str, object], step: int, ends: bool) -> None:
        if not values:
            return
        if os.getpid() != self._pid:
            self._note_refused("forked children share W&B's row number, and rows would be lost")
            return
        row = self._row_for(values, step)
        flat = flatten_row(self._journal.version, step, {**row.user_step, **values})
        try:
            _send_what_can_be(send, flat, row.number, ends)
        except Exception as error:  # the service, its process or its package: never the training's affair
            self._note_refused(f"{type(error).__name__}: {error}")
            return
        row.names.update(values)
        if _STEP in values:
            row.user_step = {_STEP: values[_STEP]}
        self._open = None if ends else row
        self._lowest_number = row.number + 1

    def _row_for(self, values: Mapping[str, object], step: int) -> _OpenRow:
        """The open W&B row if the values belong to it and overwrite nothing there, else a new one."""
        row = self._open
        if row is not None and row.step == step and row.names.isdisjoint(values):
            return row
        return _OpenRow(step, number_for(step, self._lowest_number))

    def _note_refused(self, reason: str) -> None:
        self.refused += 1
        if self.refused == 1:
            _log.warning(
                "W&B did not get a row of run %s (%s): it and any that follow are in the journal in %s.",
                self._journal.id,
                reason,
                self._journal.folder,
            )


def _flattened(data: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """The values by full name, as the journal names them; names that it refuses are left out here too."""
    flat: dict[str, object] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flattened(value, f"{name}/"))
        elif check_name(name) is None:
            flat[name] = value
    return flat


def _send_what_can_be(send: Send, flat: Mapping[str, object], number: int, ends: bool) -> None:
    """The row; if W&B cannot encode one of its values, the row without what is not a plain value."""
    row: dict[str, object] = {}
    for name, value in flat.items():
        with contextlib.suppress(UnshownError):  # the journal has it
            row[name] = for_wandb(value.stored()) if isinstance(value, _OURS) else value
    try:
        send(row, step=number, commit=ends)
    except TypeError:
        for name in [name for name, value in row.items() if not isinstance(value, bool | int | float | str)]:
            del row[name]
        send(row, step=number, commit=ends)
