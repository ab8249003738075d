"""The backend that takes everything and keeps nothing."""

from __future__ import annotations

from typing import ClassVar, Literal

from nodetrack.backends.base import Backend, BackendConfig, Batch


class NullConfig(BackendConfig):
    """`null` has no options."""

    kind: Literal["null"] = "null"


class NullBackend(Backend[NullConfig]):
    """Takes everything, keeps nothing: for tests, and to say "no backend" in a config that must name one."""

    config_class = NullConfig
    in_process: ClassVar = True

    def write(self, batch: Batch) -> None:
        """See Backend."""
