"""The service that the backend of docs/plugins.md writes to: rows by their id, over HTTP, behind a token.

| request                 | answer                                                                          |
|-------------------------|---------------------------------------------------------------------------------|
| any                     | 401 without the token, 503 with `Retry-After` while it is away                  |
| `GET /runs/<run>`       | 204                                                                             |
| `PUT /runs/<run>/rows`  | 204: the rows of the JSON list are kept under their `id`, and replace older ones |

The fixture `service` starts one; `pytest -p tests.servers.rows_service` brings it to tests elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

TOKEN = "right"


class RowsService:
    """See the module."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, dict[str, Any]]] = {}
        self.is_away = False
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.service = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def rows(self, run: str) -> list[dict[str, Any]]:
        """What it has of a run."""
        return list(self._runs.get(run, {}).values())

    def keep(self, run: str, rows: list[dict[str, Any]]) -> None:
        self._runs.setdefault(run, {}).update({row["id"]: row for row in rows})

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Within it, it takes nothing."""
        self.is_away = True
        yield
        self.is_away = False

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    service: RowsService


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self._trouble() or 204)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if trouble := self._trouble():
            self._answer(trouble)
            return
        # Strict, as JSON is: NaN is none of it.
        rows = json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        self.server.service.keep(self.path.split("/")[2], rows)
        self._answer(204)

    def _trouble(self) -> int:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401
        return 503 if self.server.service.is_away else 0

    def _answer(self, status: int) -> None:
        words = {401: b"unknown token", 503: b"gone fishing"}.get(status, b"")
        self.send_response(status)
        if status == 503:
            self.send_header("Retry-After", "1")
        if status != 204:
            self.send_header("Content-Length", str(len(words)))
        self.end_headers()
        self.wfile.write(words)

    def log_message(self, *_: object) -> None:
        """Tests are told by what arrives."""


@pytest.fixture
def service() -> Iterator[RowsService]:
    service = RowsService()
    yield service
    service.close()
