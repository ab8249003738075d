"""From what the user wrote to backends: a name, or a mapping with a `kind` and options.

Ours are listed here; those of other packages are found by the entry-point group `nodetrack.backends`, whose
names are kinds and whose objects are `Backend` subclasses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError

from nodetrack.backends.base import Backend, BackendConfig
from nodetrack.errors import BackendError, MissingExtraError, SettingsError, UnknownBackendError
from nodetrack.invalid import nearest, reason, shown
from nodetrack.redact import MASK, redact_text
from nodetrack.settings import Backends, Written, environment

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ENTRY_POINTS: Final = "nodetrack.backends"
#: kind → module and class. The module is imported when the kind is asked for, its SDK when it is opened.
_OURS: Final[Mapping[str, tuple[str, str]]] = {
    "aim": ("nodetrack.backends.aim", "AimBackend"),
    "influxdb": ("nodetrack.backends.influxdb", "InfluxdbBackend"),
    "log": ("nodetrack.backends.log", "LogBackend"),
    "memory": ("nodetrack.backends.memory", "MemoryBackend"),
    "mlflow": ("nodetrack.backends.mlflow", "MlflowBackend"),
    "null": ("nodetrack.backends.null", "NullBackend"),
    "tensorboard": ("nodetrack.backends.tensorboard", "TensorboardBackend"),
    "wandb": ("nodetrack.backends.wandb", "WandbBackend"),
}


class Entry(NamedTuple):
    """One backend as it was written; `origin` is where, "" if nobody knows."""

    kind: str
    options: Mapping[str, object]
    origin: str


def parse_backends(backends: Iterable[Written]) -> dict[str, BackendConfig]:
    """The configs by kind. Raises UnknownBackendError for a kind that is not known, SettingsError for a wrong
    option or a kind named twice, MissingExtraError where the SDK is not installed.

    A config is validated with the context `variables`: the environment of the delivery process. It may refuse
    what lacks something there. Backends that are not in use are validated without a context.
    """
    in_use = backends.in_use if isinstance(backends, Backends) else True
    context = {"variables": environment()} if in_use else None
    return {entry.kind: _parse(entry, context) for entry in entries_of(backends)}


def entries_of(backends: Iterable[Written]) -> Iterator[Entry]:
    """Each backend with its kind, whatever its options are and whether or not its SDK is there. Raises
    UnknownBackendError, and SettingsError for a backend without a kind or one that is named twice.
    """
    backends = backends if isinstance(backends, Backends) else Backends(backends)
    seen = set()
    for written, origin in zip(backends, backends.origins, strict=True):
        options = {"kind": written} if isinstance(written, str) else written
        kind = options.get("kind")
        if not isinstance(kind, str):
            raise SettingsError(
                f"A backend with the options ({', '.join(map(str, options))}){_from(origin)} has no kind "
                f"that is a name: add `kind`, one of {', '.join(known_kinds())}."
            )
        if kind not in _OURS and kind not in _plug_ins():
            raise UnknownBackendError(kind, known_kinds(), _place(origin))
        if kind in seen:
            raise SettingsError(f"The backend {kind!r} is named twice{_from(origin)}: name it once.")
        seen.add(kind)
        yield Entry(kind, options, origin)


def build_backend(config: BackendConfig) -> Backend[Any]:
    """The backend for a config that `parse_backends` made, not opened yet."""
    return backend_class(kind_of(config))(config)


def kind_of(config: BackendConfig) -> str:
    """The literal `kind` of a config."""
    return str(config.model_dump(include={"kind"})["kind"])


def known_kinds() -> tuple[str, ...]:
    """Every kind that can be asked for, ours and those of installed plug-ins."""
    return tuple(sorted({*_OURS, *_plug_ins()}))


def backend_class(kind: str) -> type[Backend[Any]]:
    """The class of a kind. Raises UnknownBackendError, or BackendError for a plug-in that cannot be used."""
    if kind in _OURS:
        module, name = _OURS[kind]
        ours: type[Backend[Any]] = getattr(import_module(module), name)
        return ours
    entry_point = _plug_ins().get(kind)
    if entry_point is None:
        raise UnknownBackendError(kind, known_kinds())
    try:
        found = entry_point.load()
    except Exception as error:  # whatever somebody else's module does when it is imported
        raise BackendError(
            f"The backend {kind!r} of {_origin(entry_point)} cannot be loaded "
            f"({type(error).__name__}: {error})."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend) and hasattr(found, "config_class")):
        raise BackendError(
            f"The backend {kind!r} of {_origin(entry_point)} is no subclass of "
            "nodetrack.backends.base.Backend with a config_class."
        )
    return found


def require_sdk(kind: str) -> None:
    """Raises MissingExtraError unless the SDK of the kind is installed; it is not imported."""
    sdk = backend_class(kind).sdk
    if sdk is not None and not _is_installed(sdk.module):
        raise MissingExtraError(sdk.module, sdk.extra, f"The backend {kind!r}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the parent package is missing, or was replaced by a test
        return False


@functools.cache
def _plug_ins() -> Mapping[str, metadata.EntryPoint]:
    """Looked up once: it reads the metadata of every installed package."""
    return {found.name: found for found in metadata.entry_points(group=ENTRY_POINTS)}


def _origin(entry_point: metadata.EntryPoint) -> str:
    package = entry_point.dist.name if entry_point.dist is not None else "an installed package"
    return f"{package} ({entry_point.value})"


def _parse(entry: Entry, context: Mapping[str, object] | None) -> BackendConfig:
    config_class = backend_class(entry.kind).config_class
    require_sdk(entry.kind)
    try:
        return config_class.model_validate(entry.options, context=context)
    except ValidationError as error:
        raise SettingsError(_refusal(entry, config_class, error.errors()[0])) from None


def _refusal(entry: Entry, config_class: type[BackendConfig], error: ErrorDetails) -> str:
    """What is wrong with an option, in a sentence. Its value may be a secret, under a misspelt name too."""
    backend, place = f"The backend {entry.kind!r}", ".".join(map(str, error["loc"]))
    origin = _from(entry.origin)
    if error["type"] == "missing":
        field = config_class.model_fields.get(place)
        meaning = f": {field.description}" if field is not None and field.description else ""
        return f"{backend} needs the option {place!r}{origin}{meaning}."
    if error["type"] == "extra_forbidden":
        near = nearest(place, config_class.model_fields)
        question = f" Did you mean {near!r}?" if near else ""
        known = ", ".join(config_class.model_fields)
        return f"{backend} has no option {place!r}{origin}; it has {known}.{question}"
    if not place:
        return f"{backend} cannot be used like this{origin}: {reason(error)}."
    value, words = shown(error["input"], place), reason(error)
    if not secret_options(config_class).isdisjoint(map(str, error["loc"])):
        value, words = MASK, words.replace(str(error["input"]) or MASK, MASK)
    return redact_text(f"{backend} cannot take {place}={value}{origin}: {words}.")


def secret_options(config_class: type[BackendConfig]) -> set[str]:
    """The options that hold secrets, whatever they are called."""
    return {name for name, field in config_class.model_fields.items() if "SecretStr" in str(field.annotation)}


def _from(origin: str) -> str:
    return f" (from {origin})" if origin else ""


def _place(origin: str) -> str:
    return f"the {origin} backends" if origin == "argument" else origin
