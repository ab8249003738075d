"""The MLflow backend keeps the contract, against a real server, read with MLflow's own client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.servers.fault_proxy import FaultProxy

from nodetrack.backends._mlflow_names import INFINITE, original
from nodetrack.backends.mlflow import RUN_TAG, MlflowConfig
from nodetrack.naming import split
from nodetrack.testing import BackendContract, Point

if TYPE_CHECKING:
    from tests.servers.mlflow_server import MlflowServer


class TestMlflow(BackendContract):
    keeps = frozenset({"version"})  # a context becomes a part of the name
    kept_types = frozenset()
    large_batch_rows = 600  # SQLite takes about 2 000 points a second

    @pytest.fixture(autouse=True)
    def _served(self, mlflow_server: MlflowServer) -> Iterator[None]:
        self.server = mlflow_server
        with FaultProxy(mlflow_server.url) as self.proxy:
            yield

    def config(self, tmp_path: Path) -> MlflowConfig:
        return MlflowConfig(tracking_uri=self.proxy.url)

    def read_back(self, run: str, tmp_path: Path) -> Iterator[Point]:
        client = self.server.client
        [found] = [each for each in self.server.runs("contract") if each.data.tags[RUN_TAG] == run]
        for key in found.data.metrics:
            name = split(original(key, found.data.tags))
            if name.view != "version" or key.endswith(INFINITE):
                continue
            signs = {point.step: point.value for point in self._history(client, found, key + INFINITE)}
            for point in self._history(client, found, key):
                value = signs[point.step] * math.inf if point.step in signs else point.value
                yield Point(name.metric, point.step, value, name.version)

    @staticmethod
    def _history(client, run, key):  # of MLflow's own types
        return client.get_metric_history(run.info.run_id, key) if key in run.data.metrics else []

    def refused_config(self, tmp_path: Path) -> MlflowConfig:
        self.proxy.answer(401, times=None, body=b"You are not authenticated.")
        return self.config(tmp_path)

    def unreachable_config(self, tmp_path: Path) -> MlflowConfig:
        self.proxy.go_away()
        return self.config(tmp_path)

    @contextmanager
    def unavailable(self, tmp_path: Path) -> Iterator[None]:
        self.proxy.answer(503, times=None)
        yield
        self.proxy.heal()
