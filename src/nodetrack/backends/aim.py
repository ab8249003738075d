"""The backend for a local Aim repository, through Aim's own `Run`.

The version of the code and the context of a row become Aim's context. Aim keeps one value for each name,
context and step: a batch that is sent twice is there once, and a step that is logged again replaces what
stood there. Aim's own watching of the machine, the terminal and the environment is off.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from pydantic import Field, field_validator

from nodetrack.backends.base import Backend, BackendConfig, Batch, RunInfo, Sdk
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    JsonValue,
    Record,
    Row,
    RunEdited,
    StoredValue,
    SummarySet,
    SystemRow,
)

#: Before the run's id, in the Aim tag by which the Aim run is found again.
RUN_TAG: Final = "nodetrack:"
#: Most bins that Aim takes in a distribution.
MOST_BINS: Final = 512

_NS_A_SECOND: Final = 1_000_000_000
#: Keys that we add to a context. The user's own of these names get an underscore more in front.
_OURS: Final = re.compile(r"_*(version|writer)")

# Aim's own annotations are partial, and wrong where they matter to us.
_Repo: TypeAlias = Any
_Run: TypeAlias = Any

_log = logging.getLogger("nodetrack.delivery")


class AimConfig(BackendConfig):
    """Where the Aim repository is: the folder that holds, or will hold, `.aim`."""

    kind: Literal["aim"] = "aim"
    repo: str = Field(description="the folder of the Aim repository; made if it does not exist")

    @field_validator("repo")
    @classmethod
    def _absolute(cls, repo: str) -> str:
        """The same folder wherever the delivery process and `nodetrack sync` are started."""
        return repo if "://" in repo else str(Path(repo).expanduser().absolute())

    def destination(self) -> str:
        """See BackendConfig."""
        return re.sub(r"(?<=://)[^/@]*@", "", self.repo)


class AimBackend(Backend[AimConfig]):
    """Writes to one Aim run."""

    config_class = AimConfig
    sdk = Sdk("aim", "aim")

    def __init__(self, config: AimConfig) -> None:
        super().__init__(config)
        self._repo: _Repo | None = None
        self._run: _Run | None = None

    # -- opening -------------------------------------------------------------------------------------

    def open(self, run: RunInfo) -> None:
        """See Backend."""
        if "://" in self.config.repo:
            raise BackendRefusedError(
                f"The aim backend writes to folders, not to {self.config.destination()}: give it the path of "
                "an Aim repository, because Aim's client of a remote server that hangs never ends."
            )
        from aim.sdk.repo import Repo

        folder = Path(self.config.repo)
        with _told(folder):
            self._repo = Repo.from_path(str(folder), init=not (folder / ".aim").exists())
            self._take_up(run)

    def close(self) -> None:
        """See Backend. Aim's readers find the run afterwards, without Aim's page or an index command."""
        run, repo = self._run, self._repo
        self._run = self._repo = None
        if run is None or repo is None:
            return
        try:
            run.close()
            from aim.sdk.index_manager import RepoIndexManager

            index: Any = RepoIndexManager(repo)
            index.index(run.hash)
        except Exception as error:  # Aim's page holds the index and will fill it itself
            _log.info("Aim run %s was not indexed: %s", run.hash, error)

    def _take_up(self, run: RunInfo) -> None:
        repo = self._open_repo
        known, gone = self._find(repo, run)
        self._run = self._opened(repo, known)
        self.memory["aim_run"] = self._run.hash
        if known is None:
            self._run.experiment = run.project
            self._run.add_tag(RUN_TAG + run.run)
            facts = {"run": run.run, "project": run.project, "role": run.role, "uid": run.uid}
            more = {"environment": run.environment, "previous_run": run.previous_run, "continues": gone}
            self._run["nodetrack"] = {**facts, **{key: value for key, value in more.items() if value}}
            self._run.name = run.name or "-".join(part for part in (run.role, run.uid) if part) or run.run

    @staticmethod
    def _opened(repo: _Repo, known: str | None) -> _Run:
        from aim.sdk.run import Run

        return Run(
            run_hash=known,
            repo=repo,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )

    def _find(self, repo: _Repo, run: RunInfo) -> tuple[str | None, str | None]:
        """The hash of our Aim run, from the cursor or by its tag, else that of the one that was deleted."""
        remembered = cast("str | None", self.memory.get("aim_run"))
        tags = repo.structured_db.search_tags(RUN_TAG + run.run)
        tagged = [found.hash for tag in tags if tag.name == RUN_TAG + run.run for found in tag.runs]
        known = next((each for each in (remembered, *tagged) if each and repo.run_exists(each)), None)
        return known, None if known else remembered

    @property
    def _open_repo(self) -> _Repo:
        if self._repo is None:
            raise BackendUnavailableError("The aim backend is not open.")
        return self._repo

    @property
    def _open_run(self) -> _Run:
        if self._run is None:
            raise BackendUnavailableError("The aim backend is not open.")
        return self._run

    # -- writing -------------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        """See Backend."""
        ours = {"version": batch.run.version} | ({"writer": str(batch.writer)} if batch.writer != 1 else {})
        with _told(Path(self.config.repo)):
            for record in batch.records:
                self._write_record(record, batch, ours)

    def _write_record(self, record: Record, batch: Batch, ours: Mapping[str, str]) -> None:
        """Console lines and events are not for Aim; everything else is."""
        if isinstance(record, Row):
            context = {**_renamed(record.context), **ours}
            self._track(record.items(), record.time_ns, record.step, context)
        elif isinstance(record, SystemRow):
            values = zip(record.names, record.values, strict=True)
            self._track(values, record.time_ns, record.time_ns // _NS_A_SECOND, {})
        elif isinstance(record, ConfigSet):
            self._set("config", _storable(record.config), record.time_ns)
        elif isinstance(record, SummarySet):
            for name, value in record.summary.items():
                self._set(("summary", name or " "), _storable(value), record.time_ns)
        elif isinstance(record, RunEdited):
            self._edit(record)
        elif isinstance(record, AttemptStarted):
            self._set(("nodetrack", "attempt"), batch.run.attempt, record.time_ns)
            self._set(("nodetrack", "version"), batch.run.version, record.time_ns)
            self._set(("nodetrack", "state"), "running", record.time_ns)
        elif isinstance(record, AttemptFinished):
            self._set(("nodetrack", "state"), record.state, record.time_ns)

    def _track(
        self,
        values: Iterator[tuple[str, StoredValue]],
        time_ns: int,
        step: int,
        context: Mapping[str, str],
    ) -> None:
        # Aim's own `Run.track` stamps the time at which it is called, which is not when the row was logged.
        track = self._open_run._tracker._track  # noqa: SLF001
        for name, stored in values:
            value = self._value(stored)
            if value is None:
                continue
            try:
                track(value, time_ns / _NS_A_SECOND, name, step, None, context=context)
            except ValueError as error:  # one name cannot hold a number and a text
                raise BatchRejectedError(f"Aim refuses {name!r}: {error}") from error

    def _value(self, stored: StoredValue) -> object:
        """The value as Aim keeps it, or None if it has no place for it."""
        if not isinstance(stored, Mapping):
            return float(stored)
        make = _TYPED.get(str(stored["type"]))
        if make is None:
            self.leave_out(f"Aim has no place for a {stored['type']}")
            return None
        try:
            return make(stored)
        except (OSError, ValueError) as error:  # such as an image that its library cannot read
            self.leave_out(f"Aim cannot hold this {stored['type']} ({type(error).__name__})")
            return None

    def _set(self, key: str | tuple[str, ...], value: object, time_ns: int) -> None:
        """Set a param of the Aim run, unless what is known is newer; None removes it."""
        if not self._is_newest("/".join(key) if isinstance(key, tuple) else key, time_ns):
            return
        run = self._open_run
        if value is not None:
            run[key] = value
        elif run.get(key) is not None:
            del run[key]

    def _edit(self, record: RunEdited) -> None:
        run, fields = self._open_run, record.fields
        if isinstance(name := fields.get("name"), str) and name and self._is_newest("name", record.time_ns):
            run.name = name
        if isinstance(notes := fields.get("notes"), str) and self._is_newest("notes", record.time_ns):
            run.description = notes
        for label in ("group", "job_type"):
            if isinstance(fields.get(label), str):
                self._set(("nodetrack", label), fields[label], record.time_ns)
        tags = fields.get("tags")
        if (
            isinstance(tags, Sequence)
            and not isinstance(tags, str)
            and self._is_newest("tags", record.time_ns)
        ):
            self._set_tags({str(tag) for tag in tags if tag})

    def _set_tags(self, wanted: set[str]) -> None:
        """Add what is missing, and take away what we had added; tags that people gave in Aim stay."""
        run = self._open_run
        added = set(cast("list[str]", self.memory.get("tags", [])))
        there = set(run.tags)
        for tag in wanted - there:
            run.add_tag(tag)
        for tag in (added - wanted) & there:
            run.remove_tag(tag)
        self.memory["tags"] = sorted((added | (wanted - there)) & wanted)

    def _is_newest(self, what: str, time_ns: int) -> bool:
        """False if something later has been set already: attempts may be delivered in any order."""
        times = cast("dict[str, int]", self.memory.setdefault("times", {}))
        if time_ns < times.get(what, 0):
            return False
        times[what] = time_ns
        return True


# ---------------------------------------------------------------------------------------------------
# Values for Aim


def _renamed(context: Mapping[str, str]) -> dict[str, str]:
    return {f"_{key}" if _OURS.fullmatch(key) else key: value for key, value in context.items()}


def _storable(value: JsonValue) -> object:
    """What Aim can keep as a param: no integer beyond 64 bits, no empty key."""
    if isinstance(value, Mapping):
        return {key or " ": _storable(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_storable(part) for part in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value


def _aim() -> Any:
    return import_module("aim")


def _text(stored: Mapping[str, JsonValue]) -> object:
    return _aim().Text(str(stored["text"]))


def _image(stored: Mapping[str, JsonValue]) -> object:
    from PIL import Image as PillowImage

    with PillowImage.open(io.BytesIO(cast("Any", stored["data"]))) as picture:
        return _aim().Image(picture, caption=str(stored["caption"] or ""))


def _histogram(stored: Mapping[str, JsonValue]) -> object:
    """Aim knows bins of equal width only: counts in others are spread evenly over them."""
    import numpy as np

    counts = cast("list[float]", stored["counts"])
    edges = cast("list[float]", stored["edges"] or range(len(counts) + 1))
    bins = max(1, min(len(counts), MOST_BINS))
    at = np.linspace(edges[0], edges[-1], bins + 1)
    hist = np.diff(np.interp(at, edges, [0, *accumulate(counts)]))
    return _aim().Distribution(hist=hist, bin_range=(edges[0], edges[-1]))


_TYPED: Final[Mapping[str, Callable[[Mapping[str, JsonValue]], object]]] = {
    "text": _text,
    "image": _image,
    "histogram": _histogram,
}


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Aim's failures as ours, in one sentence. Its lock is the database's own, and ends with its process."""
    try:
        yield
    except (BackendUnavailableError, BatchRejectedError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise BackendUnavailableError(
            f"The Aim repository {folder} cannot be written ({type(error).__name__}: {text})."
        ) from error
