"""A real VictoriaMetrics, which speaks InfluxDB's protocol for writing.

    with victoria_metrics(tmp_path) as server:
        ...                         # write to server.url
        server.export('{uid="7"}')  # every series, with labels, values and times in milliseconds

It takes any token, organisation and bucket, keeps milliseconds, makes `<measurement>_<field>` of a name, and
0 of a text. What was written can be read at once after `flush`.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import program, running


@dataclass(frozen=True)
class Series:
    """One series as it was exported."""

    name: str
    labels: dict[str, str]
    values: list[float]
    times_ms: list[int]


@dataclass(frozen=True)
class VictoriaMetrics:
    """A running server."""

    url: str

    def flush(self) -> None:
        """Make all that was written readable."""
        self._get("/internal/force_flush")

    def export(self, match: str = '{__name__!=""}') -> list[Series]:
        """All points of the series that match."""
        self.flush()
        lines = self._get("/api/v1/export", {"match[]": match}).splitlines()
        return [_series(json.loads(line)) for line in lines]

    def _get(self, path: str, query: dict[str, str] | None = None) -> str:
        url = f"{self.url}{path}?{urllib.parse.urlencode(query or {})}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            text: str = answer.read().decode()
            return text


@contextlib.contextmanager
def victoria_metrics(folder: Path) -> Iterator[VictoriaMetrics]:
    """A server of its own that keeps its data in `folder`; skips the test where it is not installed."""
    binary = program("victoria-metrics", "victoria-metrics")

    def command(port: int) -> list[str]:
        data = folder / "data"
        return [
            binary,
            f"-httpListenAddr=127.0.0.1:{port}",
            f"-storageDataPath={data}",
            "-retentionPeriod=100y",
            "-memory.allowedBytes=256MB",
        ]

    with running(command, folder, "/ping") as port:
        yield VictoriaMetrics(f"http://127.0.0.1:{port}")


def _series(exported: dict[str, object]) -> Series:
    labels = dict(exported["metric"])  # type: ignore[call-overload]
    return Series(labels.pop("__name__"), labels, exported["values"], exported["timestamps"])  # type: ignore[arg-type]
