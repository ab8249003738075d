"""A real InfluxDB 1.6, which judges types, names and overwriting, behind the paths of InfluxDB 2.

    with influxdb1(tmp_path) as server:
        ...                                       # write to server.url, bucket "nodetrack"
        server.points("metrics")                  # Point(time_ns, fields, tags), in the order of time
        server.field_types("metrics")             # {"loss": "float"}

The 1.6 of Debian has no `/api/v2/write` (it came with 1.8): a proxy maps it to `/write?db=…&precision=ns`,
and answers `/ping` and `/health` as InfluxDB 2 does.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.servers.process import free_port, program, running

BUCKET = "nodetrack"
_CONFIG = """
reporting-disabled = true
bind-address = "127.0.0.1:{backup_port}"
[meta]
  dir = "{folder}/meta"
[data]
  dir = "{folder}/data"
  wal-dir = "{folder}/wal"
[monitor]
  store-enabled = false
[http]
  bind-address = "127.0.0.1:{port}"
"""


@dataclass(frozen=True)
class Point:
    """What the server has of one time in one series."""

    time_ns: int
    fields: dict[str, Any]
    tags: dict[str, str]


@dataclass(frozen=True)
class InfluxDb1:
    """A running server: `url` speaks as InfluxDB 2, `own_url` is its own."""

    url: str
    own_url: str

    def query(self, statement: str) -> list[dict[str, Any]]:
        """The series of an InfluxQL statement: `name`, `tags`, `columns`, `values`."""
        query = urllib.parse.urlencode({"db": BUCKET, "q": statement, "epoch": "ns"})
        with urllib.request.urlopen(f"{self.own_url}/query", query.encode(), timeout=60) as answer:
            result = json.load(answer)["results"][0]
        assert "error" not in result, result
        series: list[dict[str, Any]] = result.get("series", [])
        return series

    def points(self, measurement: str, where: str = "") -> list[Point]:
        """Every point of a measurement, or those for which a condition holds."""
        condition = f" WHERE {where}" if where else ""
        points = []
        for series in self.query(f'SELECT * FROM "{measurement}"{condition} GROUP BY *'):
            tags = {name: value for name, value in series["tags"].items() if value}
            for time_ns, *values in series["values"]:
                columns = zip(series["columns"][1:], values, strict=True)
                fields = {name: value for name, value in columns if value is not None}
                points.append(Point(time_ns, fields, tags))
        return sorted(points, key=lambda point: point.time_ns)

    def field_types(self, measurement: str) -> dict[str, str]:
        """The type of each field."""
        series = self.query(f'SHOW FIELD KEYS FROM "{measurement}"')
        return {name: type_ for one in series for name, type_ in one["values"]}


@contextlib.contextmanager
def influxdb1(folder: Path) -> Iterator[InfluxDb1]:
    """A server of its own with an empty database `nodetrack`; skips the test where it is not installed."""
    binary = program("influxd", "influxdb")

    def command(port: int) -> list[str]:
        path = folder / "influxdb.conf"
        path.write_text(_CONFIG.format(folder=folder, port=port, backup_port=free_port()))
        return [binary, "run", "-config", str(path)]

    with running(command, folder, "/ping") as port, _Proxy(port) as proxy:
        server = InfluxDb1(f"http://127.0.0.1:{proxy.server_port}", f"http://127.0.0.1:{port}")
        server.query(f"CREATE DATABASE {BUCKET}")
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            proxy.shutdown()
            thread.join()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, influxd_port: int) -> None:
        self.influxd_port = influxd_port
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, b'{"name":"influxdb","message":"ready for queries and writes","status":"pass"}')
        elif self.path == "/ping":
            self._answer(204, b"")
        else:
            self._answer(404, b'{"code":"not found","message":"path not found"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        target = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(target.query))
        if target.path != "/api/v2/write":
            self._answer(404, b'{"code":"not found","message":"path not found"}')
            return
        mapped = urllib.parse.urlencode({"db": query.get("bucket", ""), "precision": query["precision"]})
        headers = {"Content-Encoding": self.headers.get("Content-Encoding", "identity")}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.influxd_port, timeout=60)
        try:
            connection.request("POST", f"/write?{mapped}", body, headers)
            answer = connection.getresponse()
            self._answer(answer.status, _as_version_2(answer.read()))
        finally:
            connection.close()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        if status != 204:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if status != 204 else b"")


def _as_version_2(body: bytes) -> bytes:
    """`{"error": …}` as `{"message": …}`."""
    try:
        return json.dumps({"message": json.loads(body)["error"]}).encode()
    except (ValueError, KeyError):
        return body
