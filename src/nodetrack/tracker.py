"""`init`: which run this process continues, under which version, and everything opened for it."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from nodetrack.active import set_active
from nodetrack.attempt import Attempt, Labels
from nodetrack.backends.base import Backend
from nodetrack.backends.factory import backend_class, build_backend, parse_backends
from nodetrack.identity.id_file import (
    Fingerprint,
    RunIdFile,
    RunIdRecord,
    file_name_part,
    folder_text,
    id_path,
    new_run_id,
    now_text,
)
from nodetrack.identity.take_up import TakenUp, take_up
from nodetrack.identity.verdict import JournalVerifier, Verifier
from nodetrack.journal.recover import Node, Recovered, recover
from nodetrack.live_run import Run
from nodetrack.machine import (
    Rank,
    describe_process,
    encodable,
    find_rank,
    git_state,
    process_created_at,
    process_start_ticks,
    this_host,
    working_folder,
)
from nodetrack.plain import plain_config
from nodetrack.records import JsonValue
from nodetrack.run_state import Identity, logger
from nodetrack.settings import Settings, resolve
from nodetrack.version import UNKNOWN_VERSION, FoundVersion, find_version
from nodetrack.voice import speak_up

#: Arguments of `wandb.init` that have no meaning here; code that is moved over may keep them.
_WANDB_ONLY: Final = frozenset(
    {
        "allow_val_change",
        "anonymous",
        "config_exclude_keys",
        "config_include_keys",
        "force",
        "fork_from",
        "magic",
    }
    | {"monitor_gym", "reinit", "resume_from", "save_code", "settings", "sync_tensorboard"}
)
#: Whoever cannot look at the process takes a node for gone after so many heartbeats, or seconds if more.
_LOCK_HEARTBEATS: Final = 4
_SHORTEST_LOCK_SECONDS: Final = 60.0
_BESIDES_SECONDS: Final = 0.5
_open_runs: dict[tuple[int, Path], Run] = {}
#: Held from the look for an open run to its start, so that threads that start one node get one run.
#: Re-entrant: a config that calls init when it is read must not stand in its own way.
_starting = threading.RLock()


def _forget_other_threads() -> None:
    """A forked child has none of the threads that may have held the lock."""
    global _starting  # what nobody will release can only be replaced
    _starting = threading.RLock()


os.register_at_fork(after_in_child=_forget_other_threads)


def init(
    project: str | None = None,
    name: str | None = None,
    *,
    role: str | None = None,
    uid: str | int | None = None,
    environment: str | None = None,
    group: str | None = None,
    job_type: str | None = None,
    tags: Iterable[str] | str | None = None,
    notes: str | None = None,
    config: object = None,
    version: str | None = None,
    id: str | None = None,  # noqa: A002 - wandb's word
    resume: str | bool | None = None,
    backends: Iterable[str | Mapping[str, object]] | str | None = None,
    mode: str | None = None,
    dir: str | Path | None = None,  # noqa: A002 - wandb's word
    entity: str | None = None,
    verifier: Verifier | None = None,
    **settings: object,
) -> Run:
    """Start an attempt of this node's run and make it the active one.

    The node is (`project`, `role`, `uid`). Its run id is kept in a file below `dir` and taken up at every
    start, so that one node has one history; `id` names another run, `resume="never"` begins a new one,
    `"must"` insists on an existing one. `config` is a mapping, namespace, dataclass or pydantic model.
    `verifier` answers whether a persisted run still exists; by default the journals on disk are asked.
    Every further keyword is a setting of `nodetrack.settings.Settings`; whatever is not given comes from
    `NODETRACK_*`, a `.env` file, `nodetrack.toml` or `[tool.nodetrack]`, or the default.

    On ranks other than 0 the run has the whole surface and records nothing, unless `ranks="all"`. A second
    call for a node whose run is open in this process returns that run.

    Backends are waited for until `init_timeout` after the call; one that is not there then is sent its rows
    later.

    Raises SettingsError, UnknownBackendError, MissingExtraError, IdentityInUseError (another live process is
    this node), RunNotFoundError, RunExistsError and UsageError, and BackendRefusedError if a service answers
    that it does not let us in; never for the disk or the network.
    """
    called_at = time.monotonic()
    arguments = {
        "project": project,
        "name": name,
        "role": role,
        "uid": uid,
        "environment": environment,
        "group": group,
        "job_type": job_type,
        "tags": (tags,) if isinstance(tags, str) else None if tags is None else tuple(tags),
        "notes": notes,
        "version": version,
        "id": id,
        "resume": _resume(resume),
        "mode": mode,
        "dir": dir,
        "entity": entity,
        "backends": backends if backends is None or isinstance(backends, str) else tuple(backends),
        **_without_wandb_only(settings),
    }
    speak_up()
    chosen, origins = resolve(arguments)
    rank = find_rank(chosen.rank)
    if chosen.ranks == "all":
        chosen = _as_own_run(chosen, rank)
    elif rank.rank:
        chosen = chosen.model_copy(update={"mode": "disabled"})
    values = _config_values(config)
    with _starting:
        run = _already_open(chosen) or _start(
            chosen, rank, values, verifier, origins["version"], called_at + _patience(chosen.init_timeout)
        )
        set_active(run)
    return run


def _patience(init_timeout: float) -> float:
    """How long the backends may take: the first use of this package is a part of `init`'s time as well."""
    return max(init_timeout / 2, init_timeout - _BESIDES_SECONDS)


def _start(
    settings: Settings,
    rank: Rank,
    config: Mapping[str, object],
    verifier: Verifier | None,
    version_origin: str,
    deadline: float,
) -> Run:
    backends, delivered = _backends(settings)
    folder = _folder(settings)
    version = find_version(settings.version, settings.package, None)
    if settings.version is not None:
        version = msgspec.structs.replace(version, origin=version_origin)
    disabled = settings.mode == "disabled"
    taken = _nothing_taken(settings) if disabled else _take_up(settings, folder, verifier)
    with _released_on_failure(taken, backends) as opened:
        identity, recovered = _identity(settings, folder, version, taken.run_id, taken.previous_run)
        attempt = Attempt(
            identity,
            recovered,
            settings,
            labels=_labels(settings, config, recovered),
            config=config,
            facts={} if disabled else _facts(settings, rank, taken),
            lock=taken.lock,
            backends=backends,
            delivered=delivered,
            retry=taken.retry,
            rebase=lambda run_id: _rebase(settings, folder, version, run_id),
        )
        opened.append(attempt)
        attempt.state.warnings.extend(taken.warnings)
        attempt.start(deadline)
        run = Run(attempt)
        if not disabled:
            _announce(run, settings, version)
            _open_runs[os.getpid(), _id_path(settings, folder)] = run
    return run


def _backends(settings: Settings) -> tuple[dict[str, Backend[Any]], list[str | dict[str, object]]]:
    """Those that this process calls itself, and those that it has delivered to, as given."""
    parsed = parse_backends(settings.backends)
    if settings.mode != "online":
        return {}, []
    given = dict(zip(parsed, settings.backends, strict=True))  # a kind is named once
    own = [kind for kind in parsed if backend_class(kind).in_process]
    return {kind: build_backend(parsed[kind]) for kind in own}, [
        options for kind, options in given.items() if kind not in own
    ]


@contextlib.contextmanager
def _released_on_failure(taken: TakenUp, backends: Mapping[str, Backend[Any]]) -> Iterator[list[Attempt]]:
    """Gives back what a start has opened if it does not come to its end, be it by Ctrl-C.

    Else the lock would keep out the next start, which may be in this very process.
    """
    opened: list[Attempt] = []
    try:
        yield opened
    except BaseException as error:
        for attempt in opened:
            attempt.finish_after(error)
        for backend in backends.values() if not opened else ():
            with contextlib.suppress(Exception):  # the error that is on its way says more
                backend.close()
        if taken.lock is not None:
            taken.lock.release()
        raise


def _already_open(settings: Settings) -> Run | None:
    """The run of the same node that this process has open: as with wandb, `init` twice is one run."""
    for key in [key for key, run in _open_runs.items() if run.finished]:
        del _open_runs[key]
    run = _open_runs.get((os.getpid(), _id_path(settings, _folder(settings))))
    if run is None or settings.mode == "disabled" or settings.id not in (None, run.id):
        return None
    if settings.resume == "never" or settings.on_conflict == "new":
        return None
    logger.warning(
        "Run %s is open in this process already and is returned as it is: "
        "call finish() to start a new attempt.",
        run.id,
    )
    return run


def _announce(run: Run, settings: Settings, version: FoundVersion) -> None:
    """Say which run this is and where it lies: the wrong folder or version is noticed now or in weeks."""
    if version.version == UNKNOWN_VERSION:
        run._state.warn(  # noqa: SLF001 - init and Run are one thing in two files
            f"The version of the code is not known, so rows carry {UNKNOWN_VERSION}: pass version= to init, "
            "set NODETRACK_VERSION or __version__, or commit the code to git."
        )
    run._state.say()  # noqa: SLF001 - as above
    if not settings.quiet:
        begun = f"goes on at step {run.step}, attempt {run.attempt}" if run.resumed else "is new"
        logger.info(
            "Run %s (%s of project %s, version %s) %s; its journal is in %s.",
            run.id,
            run.name,
            run.project,
            run.version,
            begun,
            encodable(str(_folder(settings))),
        )


# -- the parts of a start -----------------------------------------------------------------------------


def _as_own_run(settings: Settings, rank: Rank) -> Settings:
    """Each rank is a node of its own, all in one group."""
    return settings.model_copy(
        update={
            "uid": f"{settings.uid}-rank{rank.rank}",
            "group": settings.group or f"{settings.role}-{settings.uid}",
        }
    )


def _folder(settings: Settings) -> Path:
    """The tracking folder. A relative one lies in the working folder, even if that was removed meanwhile."""
    return working_folder() / settings.dir


def _id_path(settings: Settings, folder: Path) -> Path:
    return id_path(folder, settings.project, settings.role, settings.uid)


def _take_up(settings: Settings, folder: Path, verifier: Verifier | None) -> TakenUp:
    return take_up(
        RunIdFile(_id_path(settings, folder)),
        Fingerprint.here(settings.project, settings.role, settings.uid),
        verifier or JournalVerifier(folder),
        folder=folder,
        explicit_id=settings.id,
        resume=settings.resume,
        entity=settings.entity,
        on_conflict=settings.on_conflict,
        stale_after_seconds=max(_SHORTEST_LOCK_SECONDS, _LOCK_HEARTBEATS * settings.heartbeat_seconds),
        begun=lambda run_id: _make_run_folder(settings, folder, run_id),
    )


def _make_run_folder(settings: Settings, folder: Path, run_id: str) -> None:
    """Before the id is written down: an id without a folder is what a deleted run looks like."""
    with contextlib.suppress(OSError):  # the journal tries again, and says what is wrong
        _run_folder(settings, folder, run_id).mkdir(parents=True, exist_ok=True)


def _run_folder(settings: Settings, folder: Path, run_id: str) -> Path:
    return folder / file_name_part(settings.project) / "runs" / run_id


def _nothing_taken(settings: Settings) -> TakenUp:
    return TakenUp(settings.id or new_run_id(), False, None, (), None, None)


def _identity(
    settings: Settings, folder: Path, version: FoundVersion, run_id: str, previous_run: str | None
) -> tuple[Identity, Recovered]:
    """Who the attempt is, and where its run stood."""
    run_folder = _run_folder(settings, folder, run_id)
    node = Node(settings.role, settings.uid)
    recovered = Recovered() if settings.mode == "disabled" else recover(run_folder, node)
    number = recovered.attempt_number + 1
    identity = Identity(
        project=settings.project,
        run=run_id,
        attempt=f"{number:04d}-{secrets.token_hex(2)}",
        attempt_number=number,
        role=settings.role,
        uid=settings.uid,
        environment=settings.environment,
        version=version.version,
        version_origin=version.origin,
        folder=run_folder,
        entity=settings.entity,
        group=settings.group or _text(recovered.labels.get("group")),
        job_type=settings.job_type or _text(recovered.labels.get("job_type")),
        previous_run=previous_run,
        previous_attempt=recovered.last_attempt or None,
    )
    return identity, recovered


def _rebase(
    settings: Settings, folder: Path, version: FoundVersion, run_id: str
) -> tuple[Identity, Recovered]:
    """The identity under another run id, which becomes the node's own."""
    id_file = RunIdFile(_id_path(settings, folder))
    record = RunIdRecord(
        id=run_id,
        fingerprint=Fingerprint.here(settings.project, settings.role, settings.uid),
        folder=folder_text(folder),
        created_at=now_text(),
    )
    try:
        before = id_file.read().record
        if before is None or before.id != run_id:
            _make_run_folder(settings, folder, run_id)
            id_file.write(record)
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): the node's next start will not know run %s.",
            id_file.path,
            error,
            run_id,
        )
    return _identity(settings, folder, version, run_id, None)


def _labels(settings: Settings, config: Mapping[str, object], recovered: Recovered) -> Labels:
    """What is given now, else what the run had."""
    had = recovered.labels
    tags = cast("Iterable[str]", had.get("tags") or ())
    name = settings.name or _name_from(settings.name_fields, config) or _text(had.get("name"))
    return Labels(
        name=name or f"{settings.role}-{settings.uid}",
        tags=tuple(dict.fromkeys(map(str, [*tags, *settings.tags]))),
        notes=settings.notes or _text(had.get("notes")),
    )


def _name_from(fields: Iterable[str], config: Mapping[str, object]) -> str:
    """`lr=0.1-optimizer.name=adam` of the fields that the config has."""
    parts = []
    for field in fields:
        value: object = config
        for key in field.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            parts.append(f"{field}={value}")
    return "-".join(parts)


def _facts(settings: Settings, rank: Rank, taken: TakenUp) -> dict[str, JsonValue]:
    """What is known about the process and its machine, for the attempt's record."""
    host = this_host()
    git = git_state(_code_folder())
    return {
        "started_ns": time.time_ns(),
        "process": cast("JsonValue", dict(describe_process())),
        "process_created_at": _created_at(),
        "process_start_ticks": process_start_ticks(),
        "host": cast("JsonValue", msgspec.to_builtins(host)),
        "git": cast("JsonValue", msgspec.to_builtins(git)) if git else None,
        "rank": rank.rank,
        "world_size": rank.world_size,
        "resumed": taken.resumed,
        "verdict": taken.verification.verdict.value if taken.verification else None,
        "stale_after_seconds": settings.stale_after_seconds,
    }


def _created_at() -> float | None:
    try:
        return process_created_at()
    except OSError:  # no descriptor is free to look with
        return None


def _code_folder() -> Path:
    """Where the code that runs lies: the folder of the main script, else the working directory."""
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return Path(main_file).resolve().parent if main_file else working_folder()
    except OSError:  # a relative name, and the working folder was removed
        return working_folder()


def _config_values(config: object) -> Mapping[str, object]:
    """The config by name; a mapping as it is, so that `run.config` gives back what was given."""
    return config if isinstance(config, Mapping) else plain_config(config)


def _resume(resume: str | bool | None) -> str | None:
    """wandb also takes True for "auto" and False for nothing."""
    if isinstance(resume, bool):
        return "auto" if resume else None
    return resume


def _without_wandb_only(settings: Mapping[str, object]) -> dict[str, object]:
    ignored = sorted(_WANDB_ONLY.intersection(settings))
    if ignored:
        logger.warning("init ignores %s: wandb has them, nodetrack does not.", ", ".join(ignored))
    return {name: value for name, value in settings.items() if name not in _WANDB_ONLY}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
