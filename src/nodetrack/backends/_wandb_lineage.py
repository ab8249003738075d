"""The W&B runs of one node, one after another, and what is known of the rows in them.

Usually it is one, under the node's run id. The n-th, after a deleted run or when rows are rotated, is
`<run id>-<n>`, so that a crash at any moment finds the same one again.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
from pydantic import Field, SecretStr

from nodetrack.backends._wandb_rows import Line, Sent, SentLine, union, version_history
from nodetrack.backends._wandb_session import Core, NotYetError, Opening, Resume, Session
from nodetrack.backends.base import BackendConfig, RunInfo
from nodetrack.errors import BackendUnavailableError
from nodetrack.identity.verdict import RunFacts, Verdict, Verification
from nodetrack.identity.wandb_verifier import WandbVerifier, was_deleted
from nodetrack.records import JsonValue

_HOSTED: Final = "https://api.wandb.ai"
_MOST_DELETED: Final = 5  # ids in a row that W&B does not give out again
_LONGEST_LABEL: Final = 128

_log = logging.getLogger("nodetrack")


class WandbConfig(BackendConfig):
    """Where the rows go is what `wandb` is set up for, unless it is said here."""

    kind: Literal["wandb"] = "wandb"
    entity: str | None = Field(None, description="default: the run's, else the account's own")
    project: str | None = Field(None, description="default: the run's")
    base_url: str | None = Field(None, description="default: WANDB_BASE_URL, else the hosted service")
    api_key: SecretStr | None = Field(
        None, description="default: WANDB_API_KEY, else what `wandb login` kept"
    )
    mode: Literal["online", "offline"] | None = Field(None, description="default: WANDB_MODE, else online")
    dir: Path | None = Field(
        None, description="offline: where the folder `wandb` is; default: WANDB_DIR, else here"
    )
    rewind: bool = Field(
        False, description="a step back removes later rows from W&B, where the service has that"
    )
    rotate_rows: int | None = Field(None, ge=1, description="rows after which a new, linked W&B run begins")
    timeout_seconds: float = Field(4.0, gt=0, description="how long one question to the service may take")
    confirm_seconds: float = Field(30.0, gt=0, description="how long to wait until the service has a batch")
    #: Each batch costs the service a few requests; wandb itself sends every 15 s.
    batch_seconds: float = Field(15.0, gt=0, description="seconds that a row waits for others, at most")

    @property
    def offline(self) -> bool:
        """Whether W&B's own files are written, and nothing is sent."""
        return (self.mode or os.environ.get("WANDB_MODE")) in ("offline", "dryrun")

    @property
    def folder(self) -> Path:
        """Where offline runs go."""
        return (self.dir or Path(os.environ.get("WANDB_DIR") or ".")).absolute()

    def destination(self) -> str:
        """See BackendConfig."""
        if self.offline:
            return f"offline in {self.folder / 'wandb'}"
        url = self.base_url or os.environ.get("WANDB_BASE_URL") or _HOSTED
        return "/".join([url.rstrip("/"), self.entity or "", self.project or ""]).rstrip("/")

    def public(self) -> dict[str, JsonValue]:
        """See BackendConfig. That it is offline as well where the environment said so: `nodetrack sync` from
        another shell must not upload what the node was told to keep.
        """
        offline: dict[str, JsonValue] = {"mode": "offline", "dir": str(self.folder)} if self.offline else {}
        return {**super().public(), **offline}


class Metric(msgspec.Struct, frozen=True):
    """How a metric is drawn, under the names that W&B knows."""

    name: str
    step_metric: str | None = None
    summary: str | None = None


class Standing(msgspec.Struct):
    """What the backend remembers: as of the last acknowledged batch, it is what the cursor keeps."""

    #: Which W&B run of this node is written to, from 1, and the ids before it.
    number: int = 1
    previous: list[str] = []
    #: Rows in it that are accounted for, and the first `_step` behind them.
    lines: int = 0
    lowest: int = 0
    #: Rows that it has although nobody has asked to send them since: recognised when they come.
    early: list[SentLine] = []
    console: int = 0
    #: Whether a row ever got another `_step` than its step.
    shifted: bool = False
    #: The newest attempt whose config and labels were set, and the versions by attempt.
    newest: int = 0
    versions: dict[str, str] = {}
    exit_code: int | None = None
    #: The client forgets these from one session to the next.
    metrics: list[Metric] = []
    summary: dict[str, object] = {}


class Lineage:
    """See the module. `standing` is changed as rows are sent; whoever acknowledges them keeps it."""

    def __init__(self, config: WandbConfig, run: RunInfo, memory: Mapping[str, JsonValue]) -> None:
        self.config = config
        self.run = run
        self.standing = msgspec.convert(memory, Standing)
        self.session: Session | None = None
        #: Rows that W&B's process has, or the service, and no cursor counts yet.
        self.sent = Sent(self.standing.early)
        #: What the user set, as far as this process has seen it.
        self.values: dict[str, object] = {}
        self._facts = RunFacts()
        self._temporary: Path | None = None

    # -- ids -----------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Of the W&B run that is written to."""
        return self._id_of(self.standing.number)

    def _id_of(self, number: int) -> str:
        return self.run.run if number == 1 else f"{self.run.run}-{number}"

    def _begin_next(self) -> None:
        standing = self.standing
        standing.previous = [*standing.previous, self.id]
        standing.number += 1
        standing.lines = standing.lowest = standing.console = 0
        standing.shifted = False

    def _give_up(self, reason: str) -> None:
        """The next id in the place of one that W&B will not have back (promise P6)."""
        gone = self.id
        self._begin_next()
        _log.warning("W&B run %s is gone (%s): this node goes on as W&B run %s.", gone, reason, self.id)

    # -- a session -----------------------------------------------------------------------------------

    def current(self) -> Session:
        """The session, begun if need be."""
        return self.session or self._start()

    def _start(self) -> Session:
        """The node's W&B run, opened; what it has beyond the cursor is known afterwards."""
        for _ in range(_MOST_DELETED):
            resume = self._look()
            try:
                session = self._open(resume)
            except Exception as error:
                if not was_deleted(error):
                    raise
                Core.renew()
                self._give_up(" ".join(str(error).split()))
                continue
            self.session = session
            self._recognise(session)
            self._prepare(session)
            return self._follow_rotation(session)
        raise BackendUnavailableError(f"W&B says of {_MOST_DELETED} run ids in a row that they were deleted.")

    def _look(self) -> Resume:
        """Ask whether the run exists. One that is gone is given up, if it is known to have been there."""
        self._facts = RunFacts()
        if self.config.offline:
            return "allow"
        verification = self._verify(self.id)
        if verification.verdict is Verdict.GONE and self.standing.lines:
            self._give_up(verification.reason)
            verification = self._verify(self.id)
        self._facts = verification.facts or RunFacts()
        return "must" if verification.verdict is Verdict.EXISTS else "allow"

    def _verify(self, run_id: str) -> Verification:
        return WandbVerifier(self.config.timeout_seconds).verify(run_id, self._project, self._entity)

    def _open(self, resume: Resume) -> Session:
        import wandb

        try:
            return Session.start(self._opening(), self.id, resume)
        except wandb.errors.UsageError:  # a run that was created and never started counts as missing
            if resume != "must":
                raise
        Core.renew()  # else the id counts as in use
        return Session.start(self._opening(), self.id)

    def _recognise(self, session: Session) -> None:
        """Read back what the service has beyond the cursor, so that it is not sent again."""
        standing = self.standing
        beyond = session.lines - standing.lines
        if self.config.offline:
            session.lowest, session.lines = standing.lowest, standing.lines
        elif 0 < beyond <= 2 * self.config.batch_rows:
            for stored in session.stored_rows(standing.lowest):
                self.sent.add_stored(stored)
        elif beyond > 0:
            _log.warning("W&B run %s has %d rows that did not come from this journal.", self.id, beyond)
        standing.lines, standing.lowest = session.lines, session.lowest

    def _follow_rotation(self, session: Session) -> Session:
        """After a crash the rows may have gone on in further W&B runs than the cursor says."""
        if (
            not self.is_full(session)
            or self._verify(self._id_of(self.standing.number + 1)).verdict is not Verdict.EXISTS
        ):
            return session
        self.settle()
        self._begin_next()
        return self._start()

    def _prepare(self, session: Session) -> None:
        """Say again what W&B's client forgets between two sessions, or what a new run has not heard."""
        for metric in self.standing.metrics:
            session.define(metric.name, metric.step_metric, metric.summary)
        session.set_summary(self.standing.summary)
        session.set_config({**self.values, **self._links(), **self._versions()})

    def _links(self) -> dict[str, object]:
        previous = self.standing.previous
        return {"previous_run": previous[-1], "nodetrack_run": self.run.run} if previous else {}

    def _versions(self) -> dict[str, object]:
        """`version_history` and `current_version`."""
        by_attempt = self.standing.versions
        if not by_attempt:
            return {}
        in_order = [by_attempt[number] for number in sorted(by_attempt, key=int)]
        history = version_history(self._facts.config, in_order, in_order[-1])
        return {"version_history": history, "current_version": in_order[-1]}

    def announce_versions(self) -> None:
        """The versions are known to have changed."""
        self.current().set_config(self._versions())

    def relabel(self, fields: Mapping[str, JsonValue]) -> None:
        """Name, tags, notes, group or job type as the user changed them; tags are only ever added to."""
        known = {
            name: value for name, value in fields.items() if name in ("name", "notes", "group", "job_type")
        }
        tags = fields.get("tags")
        if isinstance(tags, list | tuple):
            known["tags"] = tuple(map(str, tags))
        self.run = msgspec.structs.replace(self.run, **known)
        run = self.current().run
        run.tags = tuple(union(run.tags or (), self.run.tags))
        if "name" in known:
            run.name = str(self._opening().labels.get("name", ""))
        if "notes" in known:
            run.notes = self.run.notes or ""

    # -- how it is opened ----------------------------------------------------------------------------

    def _opening(self) -> Opening:
        run, suffix = self.run, self.id.removeprefix(self.run.run)
        group = run.group or (run.run if self.config.rotate_rows else None)
        labels = {
            "name": f"{run.name[: _LONGEST_LABEL - len(suffix)]}{suffix}" if run.name else None,
            "group": group[:_LONGEST_LABEL] if group else None,
            "job_type": run.job_type,
            "notes": run.notes,
            "tags": union(self._facts.tags, run.tags),
        }
        return Opening(
            project=self._project,
            entity=self._entity,
            directory=self._directory(),
            offline=self.config.offline,
            timeout_seconds=self.config.timeout_seconds,
            labels={name: value for name, value in labels.items() if value},
        )

    @property
    def _project(self) -> str:
        return self.config.project or self.run.project

    @property
    def _entity(self) -> str | None:
        return self.config.entity or self.run.entity or os.environ.get("WANDB_ENTITY")

    def _directory(self) -> Path:
        if self.config.offline:
            self.config.folder.mkdir(parents=True, exist_ok=True)
            return self.config.folder
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="nodetrack-wandb-"))
        return self._temporary

    # -- sending -------------------------------------------------------------------------------------

    def send(self, line: Line, row: Mapping[str, object]) -> None:
        """One row of W&B; a full run is left for the next one first."""
        session = self.current()
        if self.is_full(session):
            session = self._rotate(session)
        number = line.number(session.lowest)
        self.standing.shifted |= number != line.step
        session.log(row, number)
        self.sent.add(line)

    def is_full(self, session: Session) -> bool:
        """Whether rows go on in a new W&B run."""
        return self.config.rotate_rows is not None and session.lines >= self.config.rotate_rows

    def _rotate(self, session: Session) -> Session:
        own = {"previous_run", "next_run", "nodetrack_run"}
        self.values = {**session.config(), **self.values}
        self.values = {name: value for name, value in self.values.items() if name not in own}
        self.settle()
        following = self._id_of(self.standing.number + 1)
        self.mark(0, {"next_run": following, "nodetrack_run": self.run.run})
        self._begin_next()
        return self._start()

    def confirm(self) -> None:
        """Wait until the service has all rows. Raises NotYetError, and others if it never will."""
        if self.session is not None:
            if not self.config.offline:
                self.session.confirm(self.config.confirm_seconds)
            self._note(self.session)

    def settle(self) -> None:
        """End the session, so that W&B has config and files as well; the next row begins another."""
        session, self.session = self.session, None
        if session is not None:
            session.finish()
            if not self.config.offline:
                session.confirm(self.config.confirm_seconds)
            self._note(session)

    def _note(self, session: Session) -> None:
        self.standing.lines, self.standing.lowest = session.lines, session.lowest

    def mark(self, exit_code: int, config: Mapping[str, object] | None = None) -> None:
        """Say how the W&B run ended; it can be gone on with all the same."""
        Session.mark(self._opening(), self.id, exit_code, config or {})

    def rewind(self, step: int) -> str | None:
        """Let the service forget the rows behind `step`; the reason in words where it cannot."""
        session = self.current()
        if self.standing.shifted:
            return "W&B's steps are no longer ours"
        if not session.lines or step < 0:
            return "that is before the first row of the W&B run"
        self.settle()
        self.mark(0)  # W&B rewinds ended runs only
        try:
            self.session = Session.start(self._opening(), self.id, rewind_to=step)
        except Exception as error:
            Core.renew()
            return " ".join(str(error).split())
        self.sent.forget_behind(step)
        self._prepare(self.session)
        self._note(self.session)
        return None

    # -- the end -------------------------------------------------------------------------------------

    def fail(self, error: Exception, memory: Mapping[str, JsonValue]) -> None:
        """After a failure the session is only worth keeping if W&B's process may still send its rows."""
        if isinstance(error, NotYetError) and self.session is not None:
            return
        self.abandon()
        Core.renew()
        self.standing = msgspec.convert(memory, Standing)
        self.sent = Sent(self.standing.early)

    def abandon(self) -> None:
        """Give the session up, if there is one."""
        session, self.session = self.session, None
        if session is not None:
            session.abandon()

    def remove_files(self) -> None:
        """Delete what was only there to be sent."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
