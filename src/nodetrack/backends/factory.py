"""From what the user wrote to backends: a name, or a mapping with a `kind` and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Final

from pydantic import ValidationError

from nodetrack.backends.base import Backend, BackendConfig
from nodetrack.errors import SettingsError, UnknownBackendError

#: kind → module, config class, backend class. The module is imported when the kind is asked for.
_KINDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "log": ("nodetrack.backends.log", "LogConfig", "LogBackend"),
    "null": ("nodetrack.backends.null", "NullConfig", "NullBackend"),
}


def parse_backends(backends: Iterable[str | Mapping[str, object]]) -> dict[str, BackendConfig]:
    """The configs by kind. Raises UnknownBackendError for a kind that is not known, SettingsError for a wrong
    option or a kind named twice.
    """
    configs: dict[str, BackendConfig] = {}
    for written in backends:
        options = {"kind": written} if isinstance(written, str) else dict(written)
        kind = options.get("kind")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise UnknownBackendError(str(kind), tuple(sorted(_KINDS)))
        if kind in configs:
            raise SettingsError(f"The backend {kind!r} is named twice in backends: name it once.")
        configs[kind] = _parse(kind, options)
    return configs


def build_backend(kind: str, config: BackendConfig) -> Backend:
    """The backend for a config that `parse_backends` made."""
    module, _, class_name = _KINDS[kind]
    backend: Backend = getattr(import_module(module), class_name)(config)
    return backend


def _parse(kind: str, options: Mapping[str, object]) -> BackendConfig:
    module, config_name, _ = _KINDS[kind]
    config_class: type[BackendConfig] = getattr(import_module(module), config_name)
    try:
        return config_class.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "options"
        raise SettingsError(
            f"The backend {kind!r} cannot take {place}={first['input']!r}: {first['msg']}."
        ) from None
