"""The influxdb backend keeps the contract, against a real InfluxDB 1.6, the strictest of these servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers.fault_proxy import FaultProxy
from tests.servers.influxdb1 import BUCKET, InfluxDb1, influxdb1

from nodetrack.backends.base import BackendConfig
from nodetrack.backends.influxdb import InfluxdbConfig
from nodetrack.testing import BackendContract, Point

STANDARD_TAGS = {"environment", "group", "job_type", "project", "role", "run", "uid", "version", "writer"}
ROW_FIELDS = {"attempt", "runtime_id", "step"}


@pytest.fixture(scope="module")
def influx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InfluxDb1]:
    with influxdb1(tmp_path_factory.mktemp("influxdb")) as server:
        yield server


class TestInfluxdb(BackendContract):
    kept_types = frozenset({"histogram", "text"})

    @pytest.fixture(autouse=True)
    def _server(self, influx: InfluxDb1) -> Iterator[None]:
        self.influx = influx
        with FaultProxy(influx.url) as self.proxy:
            yield

    def config(self, tmp_path: Path) -> InfluxdbConfig:
        return InfluxdbConfig(url=self.proxy.url, bucket=BUCKET)

    def refused_config(self, tmp_path: Path) -> BackendConfig:
        return InfluxdbConfig(url=self.proxy.url, bucket="nobody has made it")

    def unreachable_config(self, tmp_path: Path) -> BackendConfig:
        self.proxy.go_away()
        return self.config(tmp_path)

    @contextmanager
    def unavailable(self, tmp_path: Path) -> Iterator[None]:
        """The server takes the batch, and its answer is lost."""
        self.proxy.lose_answer(times=None)
        yield
        self.proxy.heal()

    def read_back(self, run: str, tmp_path: Path) -> Iterator[Point]:
        for point in self.influx.points("metrics", f"run='{run}'"):
            context = tuple(sorted(item for item in point.tags.items() if item[0] not in STANDARD_TAGS))
            told = (point.tags["version"], point.fields["runtime_id"], context)
            for field, value in point.fields.items():
                found = re.fullmatch(r"(.*)_(text|histogram|nonfinite)", field, re.DOTALL)
                if field in ROW_FIELDS or re.search(r"_histogram_\w+$", field):
                    continue
                metric = as_logged(found[1] if found else field)
                number = None if found and found[2] != "nonfinite" else float(value)
                yield Point(metric, point.fields["step"], number, *told)


def as_logged(field: str) -> str:
    """The metric that a field was, as docs/backends.md says."""
    name = field.removesuffix("_value") if field in ("step_value", "time_value") else field
    return re.sub(r"\\(?:n|t|x\w\w)", lambda found: found[0].encode().decode("unicode_escape"), name)
