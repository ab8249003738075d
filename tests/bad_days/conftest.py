"""A node for each test, of which nothing is left running, and the destinations of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.bad_days.destinations import Influx, Lines, Mlflow, Tensorboard, Victoria
from tests.bad_days.node import Node
from tests.servers.fault_proxy import FaultProxy
from tests.servers.influxdb1 import influxdb1
from tests.servers.mlflow_server import MlflowServer
from tests.servers.plugin import Jsonlines
from tests.servers.victoria_metrics import victoria_metrics

NewNode = Callable[..., Node]


@pytest.fixture
def new_node(tmp_path: Path) -> Iterator[NewNode]:
    """Makes nodes with the given backends and settings."""
    made: list[Node] = []

    def make(*backends: Mapping[str, object], **settings: object) -> Node:
        made.append(Node(tmp_path / f"{len(made) + 1}", backends, **settings))
        return made[-1]

    yield make
    for node in made:
        node.close()


# -- destinations: the servers run once, and tell the tests' runs apart by their ids ---------------------


@pytest.fixture
def lines(jsonlines: Jsonlines) -> Lines:
    """The example plug-in, whose calls fail as a file says."""
    return Lines(jsonlines)


@pytest.fixture
def tensorboard(tmp_path: Path) -> Tensorboard:
    """A folder for TensorBoard."""
    return Tensorboard(tmp_path / "tensorboard")


@pytest.fixture(scope="session")
def victoria(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victoria]:
    """A real VictoriaMetrics."""
    with victoria_metrics(tmp_path_factory.mktemp("victoria")) as server:
        yield Victoria(server)


@pytest.fixture(scope="session")
def influx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Influx]:
    """A real InfluxDB."""
    with influxdb1(tmp_path_factory.mktemp("influx")) as server:
        yield Influx(server)


@pytest.fixture(scope="session")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    """A real MLflow server."""
    with MlflowServer(tmp_path_factory.mktemp("mlflow")) as server:
        yield Mlflow(server)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """Stands before `remote`'s server."""
    with FaultProxy() as proxy:
        yield proxy


@pytest.fixture
def remote(request: pytest.FixtureRequest, proxy: FaultProxy) -> Victoria | Influx | Mlflow:
    """The server that a test names, reached through `proxy`."""
    direct: Victoria | Influx | Mlflow = request.getfixturevalue(request.param)
    proxy.upstream = direct.own_url
    return type(direct)(direct.server, proxy.url)  # type: ignore[arg-type]  # its own kind of server
