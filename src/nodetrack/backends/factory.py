"""From what the user wrote to backends: a name, or a mapping with a `kind` and options.

Ours are listed here; those of other packages are found by the entry-point group `nodetrack.backends`, whose
names are kinds and whose objects are `Backend` subclasses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Final

from pydantic import ValidationError

from nodetrack.backends.base import Backend, BackendConfig
from nodetrack.errors import BackendError, MissingExtraError, SettingsError, UnknownBackendError

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


def parse_backends(backends: Iterable[str | Mapping[str, object]]) -> dict[str, BackendConfig]:
    """The configs by kind. Raises UnknownBackendError for a kind that is not known, SettingsError for a wrong
    option or a kind named twice, MissingExtraError where the SDK is not installed.
    """
    configs: dict[str, BackendConfig] = {}
    for written in backends:
        options = {"kind": written} if isinstance(written, str) else dict(written)
        kind = options.get("kind")
        if not isinstance(kind, str):
            raise UnknownBackendError(str(kind), known_kinds())
        if kind in configs:
            raise SettingsError(f"The backend {kind!r} is named twice in backends: name it once.")
        configs[kind] = _parse(kind, options)
    return configs


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


def _parse(kind: str, options: Mapping[str, object]) -> BackendConfig:
    config_class = backend_class(kind).config_class
    require_sdk(kind)
    try:
        return config_class.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "options"
        if first["type"] == "extra_forbidden":  # its value may be a secret under a misspelt name
            known = ", ".join(config_class.model_fields)
            raise SettingsError(f"The backend {kind!r} has no option {place!r}; it has {known}.") from None
        shown = "***" if place in _secret_fields(config_class) else repr(first["input"])
        raise SettingsError(f"The backend {kind!r} cannot take {place}={shown}: {first['msg']}.") from None


def _secret_fields(config_class: type[BackendConfig]) -> set[str]:
    return {name for name, field in config_class.model_fields.items() if "SecretStr" in str(field.annotation)}
