"""Each test begins in an empty folder, without our variables, and leaves nothing open behind it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Fixtures for all tests: the example plug-in, installed.
pytest_plugins = ["tests.servers.mlflow_server", "tests.servers.plugin"]

#: Variables that change what nodetrack or wandb do, or what rank a process believes to have.
_PREFIXES = ("NODETRACK_", "WANDB_", "INFLUXDB_", "MLFLOW_", "AIM_", "SLURM_", "OMPI_")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
#: A test that has no backends starts no process, and its own output is not journalled.
_QUIET = {"NODETRACK_SYSTEM_SECONDS": "0", "NODETRACK_CONSOLE": "false"}


@pytest.fixture(autouse=True)
def _own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The environment and the working directory are a test's own, and are put back after it."""
    variables, folder = dict(os.environ), Path.cwd()
    for name in variables:
        if name.startswith(_PREFIXES) or name in _NAMES:
            del os.environ[name]
    os.environ.update(_QUIET)
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)


@pytest.fixture(autouse=True)
def _no_open_runs(_own_environment: None) -> Iterator[None]:
    """A run that a test left open is finished, so that the next test starts without one."""
    yield
    tracker = sys.modules.get("nodetrack.tracker")
    if tracker is not None:  # tests that never call init do not import it for this
        for run in list(tracker._open_runs.values()):
            run.finish()
    active = sys.modules.get("nodetrack.active")
    if active is not None:
        active.set_active(None)
