"""A loopback HTTP server that answers /graphql as a W&B service would. It is a fake: it knows one run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

VIEWER = {"id": "1", "entity": "team", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
RUN = {
    "projectId": "1",
    "id": "storage-1",
    "name": "abc123",
    "displayName": "M3",
    "state": "finished",
    "config": json.dumps({"version_history": {"value": ["0.1.0"]}}),
    "tags": ["v0.1.0", "mine"],
    "summaryMetrics": "{}",
    "systemMetrics": "{}",
    "user": {"name": "me", "username": "me"},
    "historyKeys": {},
    "createdAt": "2026-01-01T00:00:00Z",
    "historyLineCount": 1,
}
NO_RUNS = {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}
EMPTY_PROJECT = {"internalId": "1", "runCount": 0, "readOnly": False, "runs": NO_RUNS}


@dataclass
class FakeService:
    """What the server answers to the question for a run; `viewer_status` is for signing in."""

    url: str = ""
    status: int = 200
    body: bytes = b""
    viewer_status: int = 200
    hangs: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    paths: list[str] = field(default_factory=list)

    def answers(self, data: object, status: int = 200) -> None:
        self.status, self.body = status, json.dumps({"data": data}).encode()

    def refuses(self, status: int, message: str) -> None:
        self.status, self.body = status, json.dumps({"errors": [{"message": message}]}).encode()

    def reply(self, query: str) -> tuple[int, bytes]:
        if "viewer" in query:
            return self.viewer_status, json.dumps({"data": {"viewer": VIEWER}}).encode()
        if self.hangs:
            self.over.wait(60)
        if "query Runs(" in query and self.status == 200 and b'"run": null' in self.body:
            return 200, json.dumps({"data": {"project": EMPTY_PROJECT}}).encode()
        return self.status, self.body


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    """The fake, with `wandb` pointed at it by environment variables."""
    fake = FakeService()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.paths.append(self.path)
            status, body = fake.reply(asked["query"])
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Nothing: the test's output is for the test."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_arguments: object) -> None:
            """Clients that stopped waiting are part of the tests."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    fake.answers({"project": {"run": RUN}})
    point_wandb_at(monkeypatch, fake.url)
    yield fake
    fake.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def point_wandb_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
