"""The backend that keeps what it is given in this process: for tests of training code."""

from __future__ import annotations

from typing import ClassVar, Literal

from nodetrack.backends.base import Backend, BackendConfig, Batch


class MemoryConfig(BackendConfig):
    """`batches` keeps the newest so many."""

    kind: Literal["memory"] = "memory"
    batches: int = 100_000


class MemoryBackend(Backend[MemoryConfig]):
    """Keeps the newest batches of each run; `MemoryBackend.of(run.id)` gives them."""

    config_class = MemoryConfig
    in_process: ClassVar = True
    _kept: ClassVar[dict[str, list[Batch]]] = {}

    def write(self, batch: Batch) -> None:
        """See Backend."""
        kept = self._kept.setdefault(batch.run.run, [])
        kept.append(batch)
        del kept[: -self.config.batches]

    @classmethod
    def of(cls, run: str) -> list[Batch]:
        """What the run with that id has written in this process so far."""
        return list(cls._kept.get(run, ()))

    @classmethod
    def clear(cls) -> None:
        """Forget everything."""
        cls._kept.clear()
