"""The backends that need no service, and the example plug-in, keep the contract.

Each of the others has a file of its own here, `test_<kind>.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers.plugin import Jsonlines

from nodetrack.backends.base import BackendConfig
from nodetrack.backends.factory import parse_backends
from nodetrack.backends.log import LogConfig
from nodetrack.backends.memory import MemoryBackend, MemoryConfig
from nodetrack.backends.null import NullConfig
from nodetrack.testing import BackendContract, Point


class TestNull(BackendContract):
    readable = False

    def config(self, tmp_path: Path) -> NullConfig:
        return NullConfig()


class TestLog(BackendContract):
    """Its lines are for people: its own tests read them."""

    readable = False

    def config(self, tmp_path: Path) -> LogConfig:
        return LogConfig()


class TestMemory(BackendContract):
    repeats_are_harmless = False

    def config(self, tmp_path: Path) -> MemoryConfig:
        return MemoryConfig()

    def read_back(self, run: str, tmp_path: Path) -> Iterator[Point]:
        for batch in MemoryBackend.of(run):
            for row in batch.rows:
                context = tuple(sorted(row.context.items()))
                for name, value in row.items():
                    number = value if isinstance(value, int | float) else None
                    yield Point(name, row.step, number, batch.run.version, batch.run.attempt, context)


class TestJsonlines(BackendContract):
    """The plug-in of another package."""

    repeats_are_harmless = False

    @pytest.fixture(autouse=True)
    def _installed(self, jsonlines: Jsonlines) -> None:
        self.jsonlines = jsonlines

    def config(self, tmp_path: Path) -> BackendConfig:
        return parse_backends([self.jsonlines.config])["jsonlines"]

    def read_back(self, run: str, tmp_path: Path) -> Iterator[Point]:
        for line in self.jsonlines.lines():
            if line["record"] == "Row" and line["run"] == run:
                for name, value in zip(line["names"], line["values"], strict=True):
                    context = tuple(sorted(line["context"].items()))
                    number = value if isinstance(value, int | float) else None
                    yield Point(name, line["step"], number, line["version"], line["attempt"], context)

    def refused_config(self, tmp_path: Path) -> BackendConfig:
        options = {**self.jsonlines.config, "needs_token": True, "token": "wrong"}
        return parse_backends([options])["jsonlines"]

    def unreachable_config(self, tmp_path: Path) -> BackendConfig:
        self.jsonlines.spoil("open fail")
        return self.config(tmp_path)

    @contextmanager
    def unavailable(self, tmp_path: Path) -> Iterator[None]:
        self.jsonlines.spoil("write lose")
        yield
        self.jsonlines.mend()
