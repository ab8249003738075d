"""Where the rows of the bad days end up, each read back by its own reader."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray
from tests.bad_days.node import Row
from tests.servers.influxdb1 import BUCKET, InfluxDb1
from tests.servers.mlflow_server import MlflowServer
from tests.servers.plugin import Jsonlines
from tests.servers.victoria_metrics import VictoriaMetrics

#: Short, so that a server that hangs is given up within a test.
TIMEOUT_SECONDS = 2
#: `value` of version 1.0, where names are flat.
_METRIC = "v1.0/value"


@dataclass
class Lines:
    """The example plug-in's file. A repeated batch is in it twice."""

    file: Jsonlines
    idempotent = False
    readable_after_seconds = 0.0

    @property
    def config(self) -> dict[str, object]:
        """See Destination."""
        return self.file.config

    def rows(self, run: str) -> Counter[Row]:
        """See Destination."""
        return Counter(
            cast("Row", (line["step"], cast("list[float]", line["values"])[0]))
            for line in self.file.lines()
            if line["record"] == "Row" and line["run"] == run
        )


@dataclass
class Tensorboard:
    """A folder of event files, read with TensorBoard's own reader."""

    log_dir: Path
    idempotent = True
    readable_after_seconds = 0.0

    @property
    def config(self) -> dict[str, object]:
        """See Destination."""
        return {"kind": "tensorboard", "log_dir": str(self.log_dir)}

    def rows(self, run: str) -> Counter[Row]:
        """See Destination."""
        events = (
            event
            for path in self.log_dir.rglob("*tfevents*")
            if any(part.endswith(f"-{run}") for part in path.parts)
            for event in EventFileLoader(str(path)).Load()
        )
        return Counter(
            (event.step, make_ndarray(value.tensor).item())
            for event in events
            for value in event.summary.value
            if value.tag == _METRIC
        )


@dataclass
class Victoria:
    """VictoriaMetrics, which keeps what is sent twice twice."""

    server: VictoriaMetrics
    url: str = ""
    #: What all its writes have in their path.
    writes = "/write"
    idempotent = False
    readable_after_seconds = 30.0

    @property
    def config(self) -> dict[str, object]:
        """See Destination."""
        return _influxdb(self.url or self.server.url)

    @property
    def own_url(self) -> str:
        """The server's own address, which a proxy passes on to."""
        return self.server.url

    def rows(self, run: str) -> Counter[Row]:
        """See Destination."""
        found = {series.name: series for series in self.server.export(f'{{run="{run}"}}')}
        if "metrics_value" not in found:
            return Counter()
        steps, values = found["metrics_step"], found["metrics_value"]
        assert steps.times_ms == values.times_ms
        return Counter((int(step), value) for step, value in zip(steps.values, values.values, strict=True))


@dataclass
class Influx:
    """InfluxDB itself: the same point again overwrites itself."""

    server: InfluxDb1
    url: str = ""
    writes = "/write"
    idempotent = True
    readable_after_seconds = 0.0

    @property
    def config(self) -> dict[str, object]:
        """See Destination."""
        return _influxdb(self.url or self.server.url)

    @property
    def own_url(self) -> str:
        """The server's own address, which a proxy passes on to."""
        return self.server.url

    def rows(self, run: str) -> Counter[Row]:
        """See Destination."""
        points = [point for point in self.server.points("metrics") if point.tags["run"] == run]
        return Counter(
            (int(cast("float", point.fields["step"])), cast("float", point.fields["value"]))
            for point in points
        )


@dataclass
class Mlflow:
    """An MLflow server, which keeps a point once for each name, step, millisecond and value."""

    server: MlflowServer
    url: str = ""
    writes = "/log-batch"
    idempotent = True
    readable_after_seconds = 0.0

    @property
    def config(self) -> dict[str, object]:
        """See Destination."""
        url = self.url or self.server.url
        return {"kind": "mlflow", "tracking_uri": url, "timeout_seconds": TIMEOUT_SECONDS}

    @property
    def own_url(self) -> str:
        """The server's own address, which a proxy passes on to."""
        return self.server.url

    def rows(self, run: str) -> Counter[Row]:
        """See Destination."""
        client = self.server.client
        everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
        found = client.search_runs(everywhere, f"tags.`nodetrack.run` = '{run}'")
        assert len(found) <= 1, "one run of ours is one of MLflow's"
        points = [point for one in found for point in client.get_metric_history(one.info.run_id, _METRIC)]
        return Counter((point.step, point.value) for point in points)


def _influxdb(url: str) -> dict[str, object]:
    return {
        "kind": "influxdb",
        "url": url,
        "org": "tests",
        "bucket": BUCKET,
        "token": "any",
        "timeout_seconds": TIMEOUT_SECONDS,
    }
