"""A real `mlflow server` on loopback, with its database in a folder of its own.

`tests/conftest.py` gives all tests the fixture `mlflow_server`,
which is started once a session: each test takes an experiment of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pytest
from tests.servers.process import free_port

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

_START_SECONDS = 90


class MlflowServer:
    """Serves on one port while it is entered; `stop` and `start` in between are a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it answers."""
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            output = (self.folder / "server.log").read_text(errors="replace")
            assert self._process.poll() is None, output
            assert time.monotonic() < deadline, output
            time.sleep(0.1)

    def stop(self) -> None:
        """End it and its workers, at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    # -- what it holds, read with MLflow's own client -------------------------------------------------

    @property
    def client(self) -> MlflowClient:
        from mlflow.tracking import MlflowClient

        return MlflowClient(self.url)

    def runs(self, experiment: str) -> list[Run]:
        """The runs of an experiment that are not deleted, oldest first."""
        found = self.client.get_experiment_by_name(experiment)
        assert found is not None, experiment
        return list(self.client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"]))

    def run(self, experiment: str) -> Run:
        """The only run of an experiment."""
        [run] = self.runs(experiment)
        return self.client.get_run(run.info.run_id)

    def history(self, experiment: str, key: str) -> list[Metric]:
        """Every point of one metric of the only run, by step and time."""
        points = self.client.get_metric_history(self.run(experiment).info.run_id, key)
        return sorted(points, key=lambda point: (point.step, point.timestamp))


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """The server of this session. Whoever stops it starts it again."""
    with MlflowServer(tmp_path_factory.mktemp("mlflow")) as server:
        yield server
