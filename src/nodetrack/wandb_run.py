"""`initialize_wandb`: a node's W&B run, taken up again at every start, with a journal of our own beside it.

    run = initialize_wandb("miner-", uid, config, group="miners", job_type="training")
    run.log({"loss": 0.1}, step=7)      # the journal first, then W&B: v0.1.0/loss, latest/loss, v0.1.0/step

The id lives in `wandb/wandb_run_id_<run_prefix><uid>.txt`, where nodes without nodetrack have it already. It
is given up only if the service says that the run is gone (promise P6). Where W&B cannot be had, the run
that is returned journals all the same and has wandb's surface (see `wandb_stand_in`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

from nodetrack import tracker
from nodetrack.backends._wandb_rows import union, version_history
from nodetrack.identity.id_file import (
    Fingerprint,
    RunIdRecord,
    TextRunIdFile,
    file_name_part,
    new_run_id,
    now_text,
)
from nodetrack.identity.take_up import OnConflict, TakenUp, take_up
from nodetrack.identity.verdict import RunFacts, Verdict, Verification, Verifier
from nodetrack.identity.wandb_verifier import check_reachable, was_deleted
from nodetrack.journal.recover import attempt_folders, read_header
from nodetrack.journal.segment import segment_paths
from nodetrack.live_run import Run
from nodetrack.naming import join, latest
from nodetrack.plain import plain_config
from nodetrack.redact import redact
from nodetrack.settings import Settings, resolve
from nodetrack.version import find_version
from nodetrack.wandb_hooks import Ending, install, journal_of, pid_of
from nodetrack.wandb_service import Mode, chosen_mode, described, require_wandb, verifier_for
from nodetrack.wandb_stand_in import StandIn

if TYPE_CHECKING:
    import wandb

DEFAULT_INIT_TIMEOUT_SECONDS: Final = 15.0

_log = logging.getLogger("nodetrack")
_open_runs: dict[Path, wandb.Run] = {}


def initialize_wandb(
    run_prefix: str,
    uid: str | int,
    config: object,
    group: str | None = None,
    job_type: str | None = None,
    *,
    version: str | None = None,
    is_private: bool = False,
    entity: str | None = None,
    role: str | None = None,
    tags: Iterable[str] = (),
    notes: str | None = None,
    dir: str | Path | None = None,  # noqa: A002 - wandb's word
    mode: Mode | None = None,
    on_conflict: OnConflict | None = None,
    init_timeout: float = DEFAULT_INIT_TIMEOUT_SECONDS,
    verifier: Verifier | None = None,
) -> wandb.Run:
    """The W&B run `<run_prefix><uid>` of the project `config.project`, continued from the last start.

    `config` is a namespace, mapping, dataclass or pydantic model; secrets in it are masked. `version` (found
    by itself when not given) names the rows, is added to the tags as `v<version>`, and is kept in the run's
    config as `current_version` and at the end of `version_history`. The entity comes from the settings; it
    is none if `is_private`. `role` is what the node is called in the journal, by default the prefix without
    its separator. `dir` holds the folders `wandb` and `.nodetrack`; by default they are in the working
    directory and where nodetrack's settings say. `mode` falls back to WANDB_MODE. On ranks other than 0 the
    run has the whole surface and records nothing.

    The run's `log` takes wandb's whole signature, as does `wandb.log`, and loses no row to W&B's rising step.
    Its attribute `nodetrack_run` is the journal's run, and `run.nodetrack_run.step` the step to go on with.
    If W&B cannot be had (network, credentials), one warning says why and the run journals only.

    Raises IdentityInUseError (another live process is this node), MissingExtraError (no wandb) and
    SettingsError; never for the network.
    """
    require_wandb()
    arguments = {
        "project": _field(config, "project"),
        "uid": uid,
        "role": role or _role_from(run_prefix),
        "entity": entity,
        "version": version,
        "on_conflict": on_conflict,
        "dir": Path(dir) / ".nodetrack" if dir else None,
    }
    settings = resolve(arguments).settings
    mode = chosen_mode(mode, settings)
    wandb_dir = Path(dir) if dir else Path.cwd()
    start = _Start(
        settings=settings,
        mode=mode,
        prefix=run_prefix,
        id_file=TextRunIdFile(
            wandb_dir / "wandb" / f"wandb_run_id_{file_name_part(f'{run_prefix}{uid}')}.txt"
        ),
        entity=None if is_private else settings.entity,
        version=find_version(settings.version, settings.package, None).version,
        values=redact(plain_config(config), settings.redact),
        labels=_Labels(group, job_type, notes, tuple(tags)),
        wandb_dir=wandb_dir,
        init_timeout=init_timeout,
        verifier=verifier or verifier_for(mode, settings, init_timeout),
    )
    return start.again() or start.run()


class _Config(Protocol):
    """The part of `wandb.Config`, which has no types, that is used."""

    def update(self, values: Mapping[str, object], *, allow_val_change: bool) -> None: ...


@dataclass(frozen=True)
class _Labels:
    group: str | None
    job_type: str | None
    notes: str | None
    tags: tuple[str, ...]


@dataclass
class _Start:
    """One call of `initialize_wandb`: what was asked for, and the way from there to a run."""

    settings: Settings
    mode: Mode
    prefix: str
    id_file: TextRunIdFile
    entity: str | None
    version: str
    values: Mapping[str, object]
    labels: _Labels
    wandb_dir: Path
    init_timeout: float
    verifier: Verifier

    def again(self) -> wandb.Run | None:
        """The run of the same node that this process has open already: as with wandb, twice is one run."""
        run = _open_runs.get(self.id_file.path.absolute())
        if run is None or journal_of(run).finished or os.getpid() != pid_of(run):
            return None
        _log.warning("Run %s is open in this process already and is returned as it is.", run.id)
        return run

    def run(self) -> wandb.Run:
        """Takes the node's run up and opens its journal, then W&B."""
        if self.mode == "disabled":
            return self._disabled()
        taken = self._take_up()
        ending = Ending(taken.lock, self.settings.heartbeat_seconds)
        try:
            journal = self._journal(taken)
        except BaseException:
            ending.end()
            raise
        try:
            run, journal = self._connected(taken, journal, ending)
        except Exception as error:  # W&B's troubles have many classes, and none may cost the node its start
            run = self._without_wandb(journal, ending, described(error))
        _open_runs[self.id_file.path.absolute()] = run
        return run

    # -- the parts of a start ------------------------------------------------------------------------

    def _take_up(self) -> TakenUp:
        return take_up(
            self.id_file,
            self._fingerprint(),
            self.verifier,
            folder=self.settings.dir.absolute(),
            entity=self.entity,
            on_conflict=self.settings.on_conflict,
        )

    def _fingerprint(self) -> Fingerprint:
        return Fingerprint.here(self.settings.project, self.settings.role, self.settings.uid)

    def _journal(self, taken: TakenUp) -> Run:
        """The run of our own, under the same id; what it needs is on this machine."""
        facts = _facts(taken)
        config = {**self.values, **self._versions(taken.run_id, facts)}
        return tracker.init(
            project=self.settings.project,
            name=self._name(),
            role=self.settings.role,
            uid=self.settings.uid,
            group=self.labels.group,
            job_type=self.labels.job_type,
            notes=self.labels.notes,
            tags=union(facts.tags, self.labels.tags, [f"v{self.version}"]),
            config=config,
            version=self.version,
            id=taken.run_id,
            resume="allow",
            backends=[],
            mode="disabled" if self.mode == "disabled" else "online",
            dir=self.settings.dir,
            entity=self.entity,
            on_conflict=self.settings.on_conflict,
        )

    def _connected(self, taken: TakenUp, journal: Run, ending: Ending) -> tuple[wandb.Run, Run]:
        """The W&B run with our `log` in it. Raises whatever `wandb` raises."""
        if self.mode == "online":
            check_reachable()
        try:
            run = self._wandb_init(journal, _resume_policy(taken), _facts(taken))
        except Exception as error:
            if not taken.resumed:
                raise
            run, journal = self._second_try(taken, journal, error)
        install(run, journal, ending)
        self._define_steps(run)
        return run, journal

    def _second_try(self, taken: TakenUp, journal: Run, error: Exception) -> tuple[wandb.Run, Run]:
        """The verifier and `wandb.init` may disagree: a run was deleted in between, or has never logged."""
        import wandb

        if was_deleted(error):
            taken = self._give_up(taken, described(error))
            journal.finish()
            journal = self._journal(taken)
            return self._wandb_init(journal, "never", RunFacts()), journal
        if not isinstance(error, wandb.errors.UsageError) or _resume_policy(taken) != "must":
            raise error
        wandb.teardown()  # else the id counts as in use in this process
        return self._wandb_init(journal, "allow", _facts(taken)), journal

    def _give_up(self, taken: TakenUp, reason: str) -> TakenUp:
        """A new id in the place of one that W&B will not have back."""
        record = RunIdRecord(
            id=new_run_id(),
            fingerprint=self._fingerprint(),
            folder=str(self.settings.dir.absolute()),
            previous_run=taken.run_id,
            created_at=now_text(),
        )
        with contextlib.suppress(OSError):  # take_up has warned of a folder that cannot be written
            self.id_file.archive(taken.run_id)
            self.id_file.write(record)
        _log.warning("Run %s is gone (%s): this node goes on as run %s.", taken.run_id, reason, record.id)
        verification = Verification(Verdict.GONE, reason, looked=True)
        return TakenUp(record.id, False, taken.run_id, (), verification, taken.lock)

    def _wandb_init(
        self, journal: Run, resume: Literal["must", "never", "allow"], facts: RunFacts
    ) -> wandb.Run:
        import wandb

        self.wandb_dir.mkdir(parents=True, exist_ok=True)
        # Older releases have no finish_timeout, and ignore it here.
        limits = {"init_timeout": self.init_timeout, "finish_timeout": self.settings.finish_timeout}
        known = {name: value for name, value in limits.items() if name in wandb.Settings.model_fields}
        run = wandb.init(
            project=self.settings.project,
            entity=self.entity,
            name=self._name(),
            id=journal.id,
            resume=resume,
            tags=union(facts.tags, journal.tags),
            group=self.labels.group,
            job_type=self.labels.job_type,
            notes=self.labels.notes,
            config=dict(self.values),
            dir=str(self.wandb_dir),
            mode=self.mode,
            reinit="create_new" if wandb.run is not None else None,
            settings=wandb.Settings.model_validate(known),
        )
        versions = self._versions(journal.id, facts)
        cast("_Config", run.config).update(versions, allow_val_change=True)
        return run

    def _versions(self, run_id: str, facts: RunFacts) -> dict[str, object]:
        """`version_history` and `current_version` for the run's config."""
        folder = self.settings.dir / file_name_part(self.settings.project) / "runs" / run_id
        history = version_history(facts.config, _journalled_versions(folder), self.version)
        return {"version_history": history, "current_version": self.version}

    def _define_steps(self, run: wandb.Run) -> None:
        """Charts of our names have our step as their x axis, not W&B's. A resumed run has forgotten those of
        its earlier versions.
        """
        versions = cast("Mapping[str, list[str]]", run.config)["version_history"]
        axes = {join(version, "*"): join(version, "step") for version in versions}
        for pattern, step in {**axes, latest("*"): latest("step")}.items():
            # Each row has the step already; W&B's own copy takes the dots of the version for nesting.
            run.define_metric(pattern, step_metric=step, step_sync=False)

    def _without_wandb(self, journal: Run, ending: Ending, reason: str) -> wandb.Run:
        _log.warning(
            "W&B run %s of project %s could not be opened (%s): this node goes on, and its rows are kept "
            "in the journal in %s.",
            journal.id,
            journal.project,
            reason,
            journal.folder,
        )
        stand_in = StandIn(journal, ending.end)
        stand_in.become_active()
        return cast("wandb.Run", stand_in)  # it has wandb's surface, see the class

    def _disabled(self) -> wandb.Run:
        """The whole surface and no effect: another rank logs, or nobody wants to."""
        import wandb

        journal = tracker.init(project=self.settings.project, mode="disabled", version=self.version)
        run = wandb.init(project=self.settings.project, name=self._name(), mode="disabled")
        vars(run)["nodetrack_run"] = journal
        return run

    def _name(self) -> str:
        return f"{self.prefix}{self.settings.uid}"


def _resume_policy(taken: TakenUp) -> Literal["must", "never", "allow"]:
    """`must` with a verified id, `never` without one, `allow` where nobody could say which is right."""
    if not taken.resumed:
        return "never"
    known = taken.verification is not None and taken.verification.verdict is Verdict.EXISTS
    return "must" if known else "allow"


def _facts(taken: TakenUp) -> RunFacts:
    return (taken.verification.facts if taken.verification else None) or RunFacts()


def _journalled_versions(run_folder: Path) -> list[str]:
    """The version of each attempt, first to last, repeats in a row left out."""
    versions: list[str] = []
    for attempt in attempt_folders(run_folder):
        header = next(filter(None, map(read_header, segment_paths(attempt))), None)
        if header is not None and header.version != (versions[-1] if versions else None):
            versions.append(header.version)
    return versions


def _role_from(run_prefix: str) -> str:
    return run_prefix.rstrip("-_. ") or "trainer"


def _field(config: object, name: str) -> object:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
