"""Every setting, in one place, and where each value came from.

    argument > NODETRACK_<NAME> > .env > nodetrack.toml or [tool.nodetrack] in pyproject.toml > default

`NODETRACK_BACKENDS` alone also wins over its argument, so that whoever launches a job can say where its
rows go without touching the code. The TOML file is the nearest one at or above the working directory.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nodetrack.errors import SettingsError

PREFIX: Final = "NODETRACK_"
#: Variables with our prefix that are not settings: hyper-parameters, and what only our tests read.
_OTHER_PREFIXES: Final = ("NODETRACK_HPARAMS__", "NODETRACK_TEST_")

logger = logging.getLogger("nodetrack")


def _split(value: object) -> object:
    """A list may be written `a,b` or as JSON; `none` and the empty text are the empty list."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    return [] if text in ("", "none") else [part.strip() for part in text.split(",")]


StringList = Annotated[tuple[str, ...], BeforeValidator(_split)]
BackendList = Annotated[tuple[str | dict[str, object], ...], BeforeValidator(_split)]
PathPart = Annotated[str, Field(min_length=1, max_length=128)]


class Settings(BaseModel):
    """All settings with their defaults; `resolve` fills one from its layers."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    dir: Path = Field(Path(".nodetrack"), description="folder of the journals and run-id files")
    project: PathPart = Field("default", description="name under which runs are compared")
    role: PathPart = Field("trainer", description="what the node does: miner, validator, trainer, …")
    uid: PathPart = Field("0", description="the node's number or name within its role")
    environment: PathPart = Field("prod", description="prod, or another word for trial runs")
    entity: str | None = Field(None, description="team or account at services that have them")
    group: str | None = Field(None, description="name shared by runs that belong together")
    job_type: str | None = Field(None, description="kind of job, as in wandb")
    name: str | None = Field(None, description="display name of the run")
    name_fields: StringList = Field((), description="config fields that make the name when none is given")
    tags: StringList = Field((), description="tags of the run")
    notes: str | None = Field(None, description="free text about the run")
    version: str | None = Field(None, description="version of the code; found by itself when not set")
    package: str | None = Field(None, description="package whose version is the code's version")
    id: str | None = Field(None, description="run id to take up instead of the persisted one")
    resume: Literal["allow", "must", "never", "auto"] = Field(
        "allow", description="take up the persisted run if there is one, only if there is one, or never"
    )
    on_conflict: Literal["error", "new"] = Field(
        "error", description="when another live process is this node: refuse, or log to a new run"
    )
    mode: Literal["online", "offline", "disabled"] = Field(
        "online", description="deliver to the backends, only journal, or do nothing at all"
    )
    backends: BackendList = Field((), description="where rows end up besides the journal")
    rank: int | None = Field(
        None, ge=0, description="this process's rank; found from the launcher when not set"
    )
    ranks: Literal["main", "all"] = Field(
        "main", description="which ranks log: rank 0, or each as its own run"
    )
    init_timeout: float = Field(
        5.0, gt=0, description="seconds that init waits for the backends' first answers"
    )
    finish_timeout: float = Field(
        30.0, gt=0, description="seconds that finish may take, and that delivery goes on after a kill"
    )
    heartbeat_seconds: float = Field(15.0, gt=0, description="seconds between two signs of life")
    stale_after_seconds: float = Field(
        300.0, gt=0, description="seconds without a sign of life until a run is stale"
    )
    segment_bytes: int = Field(
        64 * 1024 * 1024, ge=4096, description="bytes at which a journal segment is rotated"
    )
    backlog_records: int = Field(10_000, ge=0, description="records kept in memory while the disk refuses")
    keep_bytes: int | None = Field(
        None, gt=0, description="bytes of a run's journal above which delivered segments are removed"
    )
    max_bytes: int | None = Field(
        None, gt=0, description="bytes of a run's journal above which undelivered ones are removed too"
    )
    system_seconds: float = Field(
        15.0, ge=0, description="seconds between two samples of the machine and its GPUs; 0 takes none"
    )
    console: bool = Field(True, description="keep the lines of standard output and error in the journal")
    quiet: bool = Field(False, description="say nothing at the start of a run but warnings")
    redact: StringList = Field((), description="further key patterns whose values are masked in the config")


class Resolved(NamedTuple):
    """The settings and, for each, the layer that its value came from."""

    settings: Settings
    origins: Mapping[str, str]


class _Given(NamedTuple):
    value: object
    origin: str


def resolve(arguments: Mapping[str, object] | None = None, start: Path | None = None) -> Resolved:
    """The settings for a process that was started in `start` (default: the working directory).

    An argument that is None counts as not given. Raises SettingsError naming the setting, its value and
    where the value came from.
    """
    start = start or _working_folder()
    given: dict[str, _Given] = {}
    if start is not None:
        given.update(_from_toml(start))
        given.update(_from_dotenv(start))
    given.update(_from_variables(os.environ, "the environment"))
    backends = given.get("backends")
    given.update(_from_arguments(arguments or {}))
    if backends is not None and backends.origin.startswith(PREFIX):
        given["backends"] = backends
    settings = _validated(given)
    origins = {name: given[name].origin if name in given else "default" for name in Settings.model_fields}
    return Resolved(settings, origins)


def _working_folder() -> Path | None:
    """The working folder; None if it was removed, and its files with it."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _is_file(path: Path) -> bool:
    """Whether there is such a file. Where we may not look there is none."""
    try:
        return path.is_file()
    except OSError as error:
        logger.debug("%s is not looked for: %s.", path.parent, error)
        return False


def _validated(given: Mapping[str, _Given]) -> Settings:
    values = {name: item.value if name == "dir" else _encodable(item.value) for name, item in given.items()}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        item = given[name]
        raise SettingsError(
            f"The setting {name!r} cannot be {item.value!r} (from {item.origin}): {first['msg']}."
        ) from None  # pydantic's own account of it says the same at length


def _encodable(value: object) -> object:
    """Bytes of the environment that are no text as escapes: no journal could hold them as they are."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


def _from_arguments(arguments: Mapping[str, object]) -> dict[str, _Given]:
    unknown = [name for name in arguments if name not in Settings.model_fields]
    if unknown:
        raise SettingsError(f"There is no setting {unknown[0]!r}{_hint(unknown[0])}")
    return {name: _Given(value, "argument") for name, value in arguments.items() if value is not None}


def _from_variables(variables: Mapping[str, str | None], place: str) -> dict[str, _Given]:
    found = {}
    for variable, value in variables.items():
        if not variable.startswith(PREFIX) or variable.startswith(_OTHER_PREFIXES) or value is None:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in Settings.model_fields:
            found[name] = _Given(value, variable if place == "the environment" else f"{variable} in {place}")
        else:
            logger.warning(
                "%s (in %s) is not a setting and is ignored%s", variable, place, _variable_hint(name)
            )
    return found


def _from_dotenv(start: Path) -> dict[str, _Given]:
    path = start / ".env"
    if not _is_file(path):
        return {}
    from dotenv import dotenv_values

    try:
        return _from_variables(dotenv_values(path), str(path))
    except (OSError, ValueError) as error:  # it may be another program's; ValueError: it is no UTF-8
        logger.debug("%s is passed over: %s.", path, error)
        return {}


def _from_toml(start: Path) -> dict[str, _Given]:
    for folder in (start, *start.parents):
        for path, keys in (
            (folder / "nodetrack.toml", ()),
            (folder / "pyproject.toml", ("tool", "nodetrack")),
        ):
            table = _toml_table(path, keys)
            if table is not None:
                return _known(table, path)
    return {}


def _toml_table(path: Path, keys: tuple[str, ...]) -> Mapping[str, object] | None:
    if not _is_file(path):
        return None
    try:
        table: object = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        if keys:  # somebody else's pyproject.toml is not ours to judge
            return None
        raise SettingsError(f"{path} cannot be read: {error}.") from error
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else None


def _known(table: Mapping[str, object], path: Path) -> dict[str, _Given]:
    for name in table:
        if name not in Settings.model_fields:
            raise SettingsError(f"{path} sets {name!r}, which is not a setting{_hint(name)}")
    given = {name: _Given(value, str(path)) for name, value in table.items()}
    if isinstance(table.get("dir"), str):  # the folder of a project, from wherever in it a node is started
        given["dir"] = _Given(path.parent / str(table["dir"]), str(path))
    return given


def _hint(name: str) -> str:
    near = _nearest(name)
    return f"; did you mean {near!r}?" if near else "."


def _variable_hint(name: str) -> str:
    if name.startswith("hparams_"):
        return f"; did you mean {PREFIX}HPARAMS__ with two underscores?"
    near = _nearest(name)
    return f"; did you mean {PREFIX}{near.upper()}?" if near else "."


def _nearest(name: str) -> str:
    return next(iter(difflib.get_close_matches(name, Settings.model_fields, n=1)), "")
