"""Every setting, in one place, and where each value came from.

    argument > NODETRACK_<NAME> > .env > nodetrack.toml or [tool.nodetrack] in pyproject.toml > default

`NODETRACK_BACKENDS` alone also wins over its argument, so that whoever launches a job can say where its
rows go without touching the code. A backend that is only named has the options that the next layer with
options for it gives. The TOML file is the nearest one at or above the working directory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nodetrack.dotenv_file import MOST_BYTES, read_dotenv
from nodetrack.errors import SettingsError
from nodetrack.invalid import nearest, reason, shown

PREFIX: Final = "NODETRACK_"
#: Variables with our prefix that are not settings: hyper-parameters, and what only our tests read.
_OTHER_PREFIXES: Final = ("NODETRACK_HPARAMS__", "NODETRACK_TEST_")

_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15}(?=\s*[KMGT]))?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

logger = logging.getLogger("nodetrack")

#: A backend as it is written: its name, or a mapping with its kind and options.
Written = str | Mapping[str, object]


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
        except json.JSONDecodeError as error:
            raise ValueError(f"it begins as JSON and goes wrong at character {error.pos + 1}") from None
    return [] if text in ("", "none") else [part.strip() for part in text.split(",")]


def _split_backends(value: object) -> object:
    """As `_split`; one object alone is a list of one."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = f"[{value}]"
    entries = _split(value)
    for entry in entries if isinstance(entries, list | tuple) else ():
        if not isinstance(entry, str | dict):
            raise ValueError("each entry is a name, or a mapping with a kind and options")  # noqa: TRY004
    return entries


def _byte_count(value: object) -> object:
    """`500 MB`, `1.5GiB` or a number of bytes as text."""
    if not isinstance(value, str):
        return value
    size = _SIZE.fullmatch(value.strip())
    if size is None:
        raise ValueError("a number of bytes is needed, such as 500000000, 500 MB or 2 GiB")
    number, prefix, binary = size.groups()
    power = " KMGT".index(prefix.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power) if power else int(number)


StringList = Annotated[tuple[str, ...], BeforeValidator(_split)]
BackendList = Annotated[tuple[str | dict[str, object], ...], BeforeValidator(_split_backends)]
ByteCount = Annotated[int, BeforeValidator(_byte_count)]
MaybeByteCount = Annotated[int | None, BeforeValidator(_byte_count)]
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
    segment_bytes: ByteCount = Field(
        64 * 1024 * 1024, ge=4096, description="bytes at which a journal segment is rotated"
    )
    backlog_records: int = Field(10_000, ge=0, description="records kept in memory while the disk refuses")
    keep_bytes: MaybeByteCount = Field(
        None, gt=0, description="bytes of a run's journal above which delivered segments are removed"
    )
    max_bytes: MaybeByteCount = Field(
        None, gt=0, description="bytes of a run's journal above which undelivered ones are removed too"
    )
    system_seconds: float = Field(
        15.0, ge=0, description="seconds between two samples of the machine and its GPUs; 0 takes none"
    )
    console: bool = Field(True, description="keep the lines of standard output and error in the journal")
    quiet: bool = Field(False, description="say nothing at the start of a run but warnings")
    redact: StringList = Field((), description="further key patterns whose values are masked in the config")


class Backends(tuple[Written, ...]):
    """Backends as they were written, in their order, and where each of them was."""

    origins: tuple[str, ...]
    #: Whether this process has rows sent to them. If not, what its environment lacks is no fault.
    in_use: bool

    def __new__(
        cls, entries: Iterable[Written] = (), origins: str | Sequence[str] = "", *, in_use: bool = True
    ) -> Self:
        made = super().__new__(cls, entries)
        made.origins = (origins,) * len(made) if isinstance(origins, str) else tuple(origins)
        made.in_use = in_use
        return made


class Resolved(NamedTuple):
    """The settings and, for each, the layer that its value came from."""

    settings: Settings
    origins: Mapping[str, str]


class _Given(NamedTuple):
    value: object
    origin: str


class _Layers(NamedTuple):
    """What each place gives, by the setting's name."""

    arguments: Mapping[str, _Given]
    variables: Mapping[str, _Given]
    dotenv: Mapping[str, _Given]
    toml: Mapping[str, _Given]

    def merged(self) -> dict[str, _Given]:
        """For each setting the value that wins."""
        given = {**self.toml, **self.dotenv, **self.variables, **self.arguments}
        if "backends" in given:
            given["backends"] = self.backends()[0]
        return given

    def backends(self) -> list[_Given]:
        """All that is written about backends, the one that wins first."""
        layers = (self.variables, self.dotenv, self.arguments, self.toml)
        return [layer["backends"] for layer in layers if "backends" in layer]


def resolve(arguments: Mapping[str, object] | None = None, start: Path | None = None) -> Resolved:
    """The settings for a process that was started in `start` (default: the working directory).

    An argument that is None counts as not given. Raises SettingsError naming the setting, its value and
    where the value came from.
    """
    layers = _layers(arguments or {}, start)
    given = layers.merged()
    settings = _validated(given)
    if "backends" in given:
        backends = Backends(settings.backends, given["backends"].origin)
        backends = with_options(backends, _validated_backends(backends, layers.backends()[1:]))
        in_use = Backends(backends, backends.origins, in_use=settings.mode == "online")
        settings = settings.model_copy(update={"backends": in_use})
    origins = {name: given[name].origin if name in given else "default" for name in Settings.model_fields}
    return Resolved(settings, origins)


def resolve_backends(text: str, origin: str, start: Path | None = None) -> Backends:
    """What the option of a command says of backends, written as in `NODETRACK_BACKENDS`, with the options
    that the settings have for those that it only names. Raises SettingsError.
    """
    [named] = _validated_backends(None, [_Given(text, origin)])
    return with_options(named, _validated_backends(named, _layers({}, start).backends()))


def with_options(backends: Backends, others: Iterable[Backends]) -> Backends:
    """The backends; a bare name stands for the options of the first of the others that has any for it."""
    options: dict[str, tuple[Written, str]] = {}
    for other in others:
        for entry, origin in zip(other, other.origins, strict=True):
            if isinstance(entry, Mapping) and isinstance(kind := entry.get("kind"), str):
                options.setdefault(kind, (entry, f", with the options of {origin}" if origin else ""))
    entries: list[Written] = []
    origins: list[str] = []
    for entry, origin in zip(backends, backends.origins, strict=True):
        found, more = options.get(entry, (entry, "")) if isinstance(entry, str) else (entry, "")
        entries.append(found)
        origins.append(f"{origin}{more}")
    return Backends(entries, origins)


def _validated_backends(backends: Backends | None, given: Sequence[_Given]) -> list[Backends]:
    """The backends of other places, looked at only where `backends` has a bare name."""
    if backends is not None and not any(isinstance(entry, str) for entry in backends):
        return []
    return [Backends(_validated({"backends": each}).backends, each.origin) for each in given]


def _layers(arguments: Mapping[str, object], start: Path | None) -> _Layers:
    start = start or _working_folder()
    toml = _from_toml(start) if start is not None else {}
    dotenv = _from_dotenv(start) if start is not None else {}
    return _Layers(_from_arguments(arguments), _from_variables(os.environ, "the environment"), dotenv, toml)


def environment() -> dict[str, str]:
    """This environment, and what `.env` in the working folder adds to it, as a delivery process has it."""
    folder = _working_folder()
    return {**(_dotenv_values(folder / ".env") if folder is not None else {}), **os.environ}


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
            f"The setting {name!r} cannot be {shown(item.value, name)} (from {item.origin}): {reason(first)}."
        ) from None  # pydantic's own account of it says the same at length


def _encodable(value: object) -> object:
    """Bytes of the environment that are no text as escapes: no journal could hold them as they are."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


def _from_arguments(arguments: Mapping[str, object]) -> dict[str, _Given]:
    unknown = [name for name in arguments if name not in Settings.model_fields]
    if unknown:
        raise SettingsError(f"There is no setting {unknown[0]!r}{_hint(unknown[0])}")
    return {name: _Given(value, "argument") for name, value in arguments.items() if value is not None}


def _from_variables(variables: Mapping[str, str], place: str) -> dict[str, _Given]:
    found = {}
    for variable, value in variables.items():
        if not variable.startswith(PREFIX) or variable.startswith(_OTHER_PREFIXES):
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
    if _is_file(path) and path.stat().st_size > MOST_BYTES:
        logger.warning("%s is longer than %d KiB: the rest is not read.", path, MOST_BYTES // 1024)
    return _from_variables(_dotenv_values(path), str(path))


def _dotenv_values(path: Path) -> dict[str, str]:
    """For all who need one: a setting and a service's token come from the same `.env`."""
    return read_dotenv(path) if _is_file(path) else {}


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
    near = nearest(name, Settings.model_fields)
    return f"; did you mean {near!r}?" if near else "."


def _variable_hint(name: str) -> str:
    if name.startswith("hparams_"):
        return f"; did you mean {PREFIX}HPARAMS__ with two underscores?"
    near = nearest(name, Settings.model_fields)
    return f"; did you mean {PREFIX}{near.upper()}?" if near else "."
