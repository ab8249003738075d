"""The backend that writes each row as one line to the process's Python logger."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar, Literal

from nodetrack.backends.base import Backend, BackendConfig, Batch
from nodetrack.records import Row, StoredValue


class LogConfig(BackendConfig):
    """The logger's name and the level of its lines."""

    kind: Literal["log"] = "log"
    logger: str = "nodetrack.rows"
    level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"


class LogBackend(Backend[LogConfig]):
    """Writes `step 5 (stage=train): loss=0.25 lr=0.001`; typed values are named, not printed."""

    config_class = LogConfig
    in_process: ClassVar = True  # next to the other lines of the trainer's own logging

    def __init__(self, config: LogConfig) -> None:
        super().__init__(config)
        self._logger = logging.getLogger(config.logger)
        self._level = logging.getLevelNamesMapping()[config.level]

    def write(self, batch: Batch) -> None:
        """See Backend."""
        if self._logger.isEnabledFor(self._level):
            for row in batch.rows:
                self._logger.log(self._level, "%s", line(row))


def line(row: Row) -> str:
    """A row as one line of text."""
    context = " ".join(f"{key}={value}" for key, value in row.context.items())
    values = " ".join(f"{name}={_shown(value)}" for name, value in row.items())
    return f"step {row.step} ({context}): {values}" if context else f"step {row.step}: {values}"


def _shown(value: StoredValue) -> str:
    if isinstance(value, Mapping):
        return f"<{value['type']}>"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
