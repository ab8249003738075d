"""One W&B run, open in W&B's own process (`wandb-core`), with a time limit on every call.

A session never sets the run's state at the service: it ends by handing over what it holds, and the run
stays resumable. `Session.mark` opens one for the sole purpose of saying how the run ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import psutil

from nodetrack.errors import BackendRefusedError, BackendUnavailableError
from nodetrack.records import ConsoleLine, SystemRow

if TYPE_CHECKING:
    import wandb

Resume = Literal["must", "allow"]
_FINISH_SECONDS: Final = 15.0
_GRACE_SECONDS: Final = 5.0
_HASTY_SECONDS: Final = 0.5
_KEEP_SECONDS: Final = 1  # how long wandb-core gathers rows; less than a second it takes for its default, 15
_PASSES: Final = re.compile(
    r"timed out|deadline exceeded|did not respond|refused|reset|\bEOF\b", re.IGNORECASE
)
_REFUSES: Final = re.compile(
    r"\b40[134]\b|unauthori[sz]ed|permission denied|forbidden|access denied|api.key|not logged in|not found",
    re.IGNORECASE,
)
_LOGIN: Final = "set WANDB_API_KEY or run `wandb login`, and check the entity and the project"

_log = logging.getLogger("nodetrack")
_Result = TypeVar("_Result")


class NotYetError(BackendUnavailableError):
    """W&B's process holds the rows and the service has not confirmed them yet."""


@dataclass(frozen=True)
class Opening:
    """How the W&B run is opened, the same for all sessions of a backend."""

    project: str
    entity: str | None
    directory: Path
    offline: bool
    timeout_seconds: float
    labels: Mapping[str, Any] = field(default_factory=dict)


def bounded(call: Callable[[], _Result], seconds: float, what: str) -> _Result:
    """The call's result. Raises BackendUnavailableError if it takes longer; the call then goes on alone."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="nodetrack-wandb-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise BackendUnavailableError(f"W&B did not {what} within {seconds:g} s.")
    return results[0]


def told(error: Exception) -> Exception:
    """What an error of `wandb` means for the delivery, in W&B's own words."""
    import wandb

    if isinstance(error, BackendRefusedError | BackendUnavailableError):
        return error
    words = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, wandb.errors.AuthenticationError | wandb.errors.UsageError):
        return BackendRefusedError(f"W&B refuses: {words}: {_LOGIN}.")
    is_theirs = isinstance(error, wandb.errors.Error)
    if is_theirs and not _PASSES.search(words) and _REFUSES.search(words):
        return BackendRefusedError(f"W&B refuses: {words}: {_LOGIN}.")
    return BackendUnavailableError(f"W&B cannot be had: {type(error).__name__}: {words}")


class Session:
    """A W&B run that is open. `lines` is how many rows the service has or will have with ours."""

    def __init__(self, opening: Opening, run: wandb.Run) -> None:
        self._opening = opening
        self._run = run
        self._api_run: Any = None  # wandb.apis.public.Run, which has its attributes from the service
        self._is_finished = False
        self._confirmed = 0
        self.id: str = run.id
        self.url: str | None = None if opening.offline else run.url
        #: The first `_step` that W&B still takes.
        self.lowest: int = getattr(run, "starting_step", run.step)
        self.lines = 0

    @classmethod
    def start(
        cls, opening: Opening, run_id: str, resume: Resume = "allow", *, rewind_to: int | None = None
    ) -> Session:
        """Open the run. Raises what `wandb` raises."""
        session = cls(opening, _init(opening, run_id, resume, rewind_to, marks=False))
        try:
            session.lines = 0 if opening.offline else session.confirmed_lines()
        except Exception:
            session.abandon()
            raise
        return session

    @classmethod
    def mark(cls, opening: Opening, run_id: str, exit_code: int, config: Mapping[str, object]) -> None:
        """Tell the service that the run has ended; it can be resumed all the same."""
        run = _init(opening, run_id, "allow", None, marks=True)
        if config:
            run.config.update(dict(config), allow_val_change=True)  # type: ignore[no-untyped-call]
        bounded(lambda: run.finish(exit_code), _FINISH_SECONDS + _GRACE_SECONDS, "finish the run")

    # -- what is handed over -------------------------------------------------------------------------

    @property
    def run(self) -> wandb.Run:
        """For what is only handed over: labels, alerts."""
        return self._run

    def config(self) -> dict[str, object]:
        """The run's config, what the service had included."""
        return dict(self._run.config)

    def set_config(self, values: Mapping[str, object]) -> None:
        """Add to the run's config. The service has it once the session is finished."""
        self._run.config.update(dict(values), allow_val_change=True)  # type: ignore[no-untyped-call]

    def set_summary(self, values: Mapping[str, object]) -> None:
        """Set summary entries by hand; None removes one."""
        summary: Any = self._run.summary  # which has no types
        for name, value in values.items():
            if value is not None:
                summary[name] = value
            elif name in summary.keys():  # noqa: SIM118 - nor an `in` of its own
                del summary[name]

    def define(self, name: str, step_metric: str | None, summary: str | None) -> None:
        """How a metric is drawn. Each row has its step; W&B's own copy of it would take dots for nesting."""
        self._run.define_metric(name, step_metric=step_metric, step_sync=False, summary=summary)

    def log(self, row: Mapping[str, object], number: int) -> None:
        """One row, whole; `number` must be at least `lowest`."""
        self._run.log(dict(row), step=number, commit=True)
        self.lowest = number + 1
        self.lines += 1

    def write_console(self, line: ConsoleLine) -> bool:
        """One line of console output; False if this wandb has no way for it."""
        write = getattr(self._run, "write_logs", None)
        if write is None:
            return False
        write(line.text if line.stream == "stdout" else f"ERROR {line.text}")
        return True

    def write_system(self, row: SystemRow) -> bool:
        """One sample, where W&B shows the machine; False if this wandb has no way for it."""
        from wandb.proto import wandb_internal_pb2

        messages: Any = wandb_internal_pb2
        publish = getattr(getattr(self._run, "_interface", None), "_publish", None)
        if publish is None:
            return False
        sample = messages.StatsRecord(stats_type=messages.StatsRecord.StatsType.SYSTEM)
        sample.timestamp.FromNanoseconds(row.time_ns)
        for name, value in zip(row.names, row.values, strict=True):
            if isinstance(value, int | float) and value - value == 0:  # JSON has no others
                item = sample.item.add()
                item.key = name.removeprefix("system/").replace("/", ".")
                item.value_json = repr(value)
        publish(messages.Record(stats=sample))
        return True

    # -- what the service has ------------------------------------------------------------------------

    def confirm(self, seconds: float) -> None:
        """Wait until the service has all rows. Raises NotYetError, and LookupError if the run is gone."""
        if self._confirmed >= self.lines:
            return
        end = time.monotonic() + seconds
        pause = 0.0 if self._is_finished else float(_KEEP_SECONDS)
        while True:
            time.sleep(pause)
            found = self._confirmed_or_unknown()
            if self._confirmed >= self.lines:
                return
            if time.monotonic() > end:
                have = "did not say how many" if found is None else f"has {found}"
                raise NotYetError(
                    f"W&B {have} of the {self.lines} rows of run {self.id} after {seconds:g} s: "
                    "they are asked about again, and kept in the journal until they are there."
                )
            pause = min(max(2 * pause, 0.25), 4.0)

    def _confirmed_or_unknown(self) -> int | None:
        try:
            return self.confirmed_lines()
        except Exception as error:
            if type(getattr(error, "exc", error)).__name__ == "RunNotFoundError":
                raise LookupError(f"W&B no longer has run {self.id}") from error
            _log.debug("W&B did not say what it has of run %s", self.id, exc_info=True)
            return None

    def confirmed_lines(self) -> int:
        """How many rows the service has; the same number by which a client resumes."""
        limit = self._opening.timeout_seconds
        found = bounded(self._loaded, limit + _GRACE_SECONDS, "say what it has")
        self._confirmed = int(found.history_line_count or 0)
        return self._confirmed

    def _loaded(self) -> Any:
        import wandb

        if self._api_run is None:
            api = wandb.Api(timeout=max(1, round(self._opening.timeout_seconds)))
            entity = f"{self._run.entity}/" if self._run.entity else ""
            self._api_run = api.run(f"{entity}{self._opening.project}/{self.id}")
        else:
            self._api_run.load(force=True)
        return self._api_run

    def stored_rows(self, first_number: int) -> list[Mapping[str, object]]:
        """The rows that the service has from that `_step` on."""
        end = self.lowest  # pages are ranges of steps: one page for all

        def read() -> list[Mapping[str, object]]:
            page = max(1000, end - first_number + 1)
            return list(self._loaded().scan_history(min_step=first_number, max_step=end, page_size=page))

        return bounded(read, 4 * self._opening.timeout_seconds, "give back its newest rows")

    # -- the end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Hand over everything, files and config included. Raises TimeoutError, BackendUnavailableError."""
        bounded(lambda: self._run.finish(0), _FINISH_SECONDS + _GRACE_SECONDS, "take what it was given")
        self._is_finished = True

    def abandon(self) -> None:
        """Let go of a run that may never get rid of what it holds; its process is to be ended next."""
        finishing = threading.Thread(
            target=_quietly, args=(lambda: self._run.finish(0),), name="nodetrack-wandb-end", daemon=True
        )
        finishing.start()  # this also ends the threads that wandb has started for the run
        finishing.join(_HASTY_SECONDS)


def _init(opening: Opening, run_id: str, resume: Resume, rewind_to: int | None, *, marks: bool) -> wandb.Run:
    import wandb

    chosen: dict[str, object] = {
        "console": "off",
        "disable_code": True,
        "disable_git": True,
        "finish_timeout": _FINISH_SECONDS,
        "finish_timeout_raises": True,
        "program": "nodetrack",
        "init_timeout": opening.timeout_seconds,
        "silent": True,
        "x_disable_machine_info": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_disable_viewer": True,
        "x_file_stream_transmit_interval": float(_KEEP_SECONDS),
        "x_save_requirements": False,
        "x_skip_transaction_log": not opening.offline,
        "x_transaction_log_flush_interval": 1.0,
        "x_update_finish_state": marks,
    }
    known = {name: value for name, value in chosen.items() if name in wandb.Settings.model_fields}
    place: dict[str, Any] = (
        {"id": run_id, "resume": resume}
        if rewind_to is None
        else {"resume_from": f"{run_id}?_step={rewind_to}"}
    )

    def init() -> wandb.Run:
        return wandb.init(
            project=opening.project,
            entity=opening.entity,
            dir=str(opening.directory),
            mode="offline" if opening.offline else "online",
            reinit="create_new",
            settings=wandb.Settings.model_validate(known),
            **place,
            **opening.labels,
        )

    # The limit of wandb itself holds for the run; what it asks before has limits of its own.
    return bounded(init, 2 * opening.timeout_seconds + _GRACE_SECONDS, "open the run")


# ---------------------------------------------------------------------------------------------------
# W&B's process


class Core:
    """`wandb-core`, which all backends of this process share: the last one to let go of it ends it."""

    _users: int = 0
    _lock = threading.Lock()

    @classmethod
    def hold(cls) -> None:
        """Somebody uses it."""
        with cls._lock:
            if cls._users == 0:
                # Ours must not be the one of a trainer that uses wandb itself and started this process.
                os.environ.pop("WANDB_SERVICE", None)
            cls._users += 1

    @classmethod
    def release(cls, *, healthy: bool) -> None:
        """Let go of it. Not `healthy`: it may hold what it can never send, and is ended the hard way."""
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                cls._end(healthy)

    @classmethod
    def renew(cls) -> None:
        """End it, so that the next session has a fresh one; sessions of others begin anew after an error."""
        with cls._lock:
            cls._end(healthy=False)

    @staticmethod
    def _end(healthy: bool) -> None:
        import wandb

        ending = threading.Thread(
            target=_quietly, args=(wandb.teardown,), name="nodetrack-wandb-end", daemon=True
        )
        ending.start()
        ending.join(_GRACE_SECONDS if healthy else _HASTY_SECONDS)
        if ending.is_alive() or _cores():
            for core in _cores():
                with contextlib.suppress(psutil.Error):
                    core.kill()
            ending.join(_GRACE_SECONDS)
            for core in _cores():  # it was dead already, and its end was not waited for
                with contextlib.suppress(psutil.Error):
                    core.wait(_GRACE_SECONDS)


def _quietly(call: Callable[[], None]) -> None:
    """For the end of a process that may be broken, where W&B raises what nobody can act on."""
    try:
        call()
    except Exception:
        _log.debug("W&B's process did not end by itself", exc_info=True)


def _cores() -> list[psutil.Process]:
    """The processes of W&B that this one has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "wandb-core":
                found.append(child)
    return found
