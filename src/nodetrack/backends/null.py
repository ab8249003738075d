"""The backend that takes everything and keeps nothing."""

from __future__ import annotations

from typing import Literal

from nodetrack.backends.base import Backend, BackendConfig, Batch


class NullConfig(BackendConfig):
    """`null` has no options."""

    kind: Literal["null"] = "null"


class NullBackend(Backend):
    """Takes everything, keeps nothing: for tests, and to say "no backend" in a config that must name one."""

    def __init__(self, config: NullConfig) -> None:
        self.config = config

    def write(self, batch: Batch) -> None:
        """See Backend."""
