"""How `initialize_wandb` starts when there is a service, when there is none, and when the run is gone.

The service is a fake on the loopback: it answers what the real wandb client needs to start, log and finish.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("wandb")

VIEWER = {"id": "1", "entity": "team", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
EMPTY_PROJECT = {
    "internalId": "1",
    "runCount": 0,
    "readOnly": False,
    "runs": {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}},
}


@dataclass
class Service:
    """What the fake knows: runs by id, each with its config and tags, and the ids that were deleted."""

    url: str = ""
    runs: dict[str, dict[str, object]] = field(default_factory=dict)
    rows: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    refuses_all: int | None = None
    cannot_verify: bool = False
    never_started: bool = False

    def reply(self, query: str, variables: dict[str, str]) -> tuple[int, dict[str, object]]:
        if self.refuses_all:
            return self.refuses_all, {"errors": [{"message": "permission denied"}]}
        if "upsertBucket" in query:
            return self._upsert(variables)
        if "historyTail" in query:
            return 200, {
                "data": {
                    "model": {
                        "id": "p",
                        "name": "demo",
                        "entity": VIEWER,
                        "bucket": self._standing(variables),
                    }
                }
            }
        if "query Runs(" in query:
            return 200, {"data": {"project": EMPTY_PROJECT}}
        if "query Run(" in query:
            if self.cannot_verify:
                return 403, {"errors": [{"message": "permission denied"}]}
            return 200, {"data": {"project": {"run": self.runs.get(variables["name"])}}}
        if "viewer" in query:
            return 200, {"data": {"viewer": VIEWER}}
        return 200, {"data": {}, "errors": [{"message": "not done here"}]}

    def _upsert(self, variables: dict[str, str]) -> tuple[int, dict[str, object]]:
        run_id = variables.get("name") or next(iter(self.runs))
        if run_id in self.deleted:
            return 410, {
                "errors": [
                    {"message": f"run {run_id} was previously created and deleted; try a new run name"}
                ]
            }
        known = self.runs.get(run_id) or _new_run(run_id)
        self.runs[run_id] = known
        if variables.get("config"):
            known["config"] = variables["config"]
        if variables.get("tags") is not None:
            known["tags"] = variables["tags"]
        if variables.get("displayName"):
            known["displayName"] = variables["displayName"]
        bucket = {"id": run_id, "name": run_id, "project": {"name": "demo", "entity": {"name": "team"}}}
        return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}

    def _standing(self, variables: dict[str, str]) -> dict[str, object] | None:
        run = self.runs.get(variables["name"])
        if run is None:
            return None
        rows = [json.dumps(row) for row in self.rows.get(variables["name"], [])]
        return {
            **run,
            "entity": {"name": "team"},
            "logLineCount": 0,
            "historyLineCount": len(rows),
            "eventsLineCount": 0,
            "historyTail": json.dumps(rows[-1:]),
            "eventsTail": "[]",
            "notes": None,
            "wandbConfig": None if self.never_started else json.dumps({"t": {"value": 1}}),
        }


def _new_run(run_id: str) -> dict[str, object]:
    return {
        "projectId": "1",
        "id": f"storage-{run_id}",
        "name": run_id,
        "displayName": run_id,
        "state": "running",
        "config": "{}",
        "tags": [],
        "summaryMetrics": "{}",
        "systemMetrics": "{}",
        "historyKeys": {},
        "user": {"name": "me", "username": "me"},
        "createdAt": "2026-01-01T00:00:00Z",
        "historyLineCount": 0,
    }


@pytest.fixture
def service(node) -> Iterator[Service]:
    """The fake, with the node's environment pointed at it."""
    fake = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            if self.path == "/graphql":
                status, answer = fake.reply(asked["query"], asked.get("variables") or {})
            else:
                status, answer = 200, {}
                _keep_rows(fake, self.path, asked)
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Nothing: the test's output is for the test."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    node.environment = {"WANDB_BASE_URL": fake.url, "WANDB_API_KEY": "k" * 40}
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


def _keep_rows(fake: Service, path: str, sent: dict[str, object]) -> None:
    """`/files/<entity>/<project>/<run>/file_stream`: rows come with the number of the first one."""
    history = sent.get("files", {}).get("wandb-history.jsonl")
    if history is not None:
        rows = fake.rows.setdefault(path.split("/")[4], [])
        rows[history["offset"] :] = [json.loads(line) for line in history["content"]]


LOG_ONE = """
    run = start(entity="team", version="VERSION")
    run.log({"loss": 1.0}, step=STEP)
    print(run.id, run.nodetrack_run.id)
    run.finish()
"""


def log_one(node, version: str = "0.1.0", step: int = 5) -> tuple[str, str]:
    """Starts the node for one row; the run's id, and the warnings."""
    printed = node.run(LOG_ONE.replace("VERSION", version).replace("STEP", str(step))).splitlines()
    [ids] = [line for line in printed if not line.startswith("LOG")]
    run_id, journalled = ids.split()
    assert run_id == journalled
    return run_id, "\n".join(line for line in printed if line.startswith("LOG"))


def config_of(service: Service, run_id: str) -> dict[str, object]:
    entries = json.loads(service.runs[run_id]["config"])
    return {name: entry["value"] for name, entry in entries.items() if name != "_wandb"}


def test_a_restarted_node_resumes_its_verified_run(node, service: Service) -> None:
    run_id, warnings = log_one(node)
    assert warnings == ""
    assert log_one(node, "0.1.1", 6) == (run_id, "")
    assert list(service.runs) == [run_id]
    assert service.runs[run_id]["tags"] == ["v0.1.0", "v0.1.1"]
    assert config_of(service, run_id)["version_history"] == ["0.1.0", "0.1.1"]
    assert config_of(service, run_id)["current_version"] == "0.1.1"
    assert service.runs[run_id]["displayName"] == "miner-3"
    assert [(row["latest/loss"], row["_step"]) for row in service.rows[run_id]] == [(1.0, 5), (1.0, 6)]


def test_what_the_service_knows_of_a_run_is_kept(node, service: Service) -> None:
    """The node moved to a machine without its journal: tags and version history come from the service."""
    service.runs["abc12345"] = _new_run("abc12345") | {
        "tags": ["by-hand", "v0.0.9"],
        "config": json.dumps(
            {"version_history": {"value": ["0.0.8", "0.0.9"]}, "current_version": {"value": "0.0.9"}}
        ),
    }
    service.rows["abc12345"] = [{"loss": 1.0, "_step": 40}]
    node.id_file.parent.mkdir()
    node.id_file.write_text("abc12345")
    assert log_one(node) == ("abc12345", "")
    assert service.runs["abc12345"]["tags"] == ["by-hand", "v0.0.9", "v0.1.0"]
    assert config_of(service, "abc12345")["version_history"] == ["0.0.8", "0.0.9", "0.1.0"]
    added = service.rows["abc12345"][-1]
    assert (added["v0.1.0/step"], added["_step"]) == (5, 41), "W&B would have dropped its row 5"


@pytest.mark.case("C003")
@pytest.mark.parametrize("verified", [True, False])
def test_a_deleted_run_is_replaced_at_once(node, service: Service, verified: bool) -> None:
    """Also when the verifier could not tell, and the service says so only when the run is opened."""
    first, _ = log_one(node)
    del service.runs[first]
    service.deleted.add(first)
    service.cannot_verify = not verified
    second, warnings = log_one(node)
    assert second != first
    assert node.id_file.read_text() == second
    [kept] = node.id_file.parent.glob("*.bak")
    assert kept.read_text() == first
    assert json.loads(node.id_file.with_suffix(".json").read_text())["previous_run"] == first
    assert first in warnings
    assert second in warnings
    assert [row["latest/loss"] for row in service.rows[second]] == [1.0]


def test_a_run_that_exists_and_has_never_logged_is_begun(node, service: Service) -> None:
    """W&B refuses to resume it with "must", although its API finds it."""
    service.runs["abc12345"] = _new_run("abc12345")
    service.never_started = True
    node.id_file.parent.mkdir()
    node.id_file.write_text("abc12345")
    assert log_one(node)[0] == "abc12345"
    assert [row["latest/loss"] for row in service.rows["abc12345"]] == [1.0]


@pytest.mark.case("C005")
def test_refused_credentials_cost_neither_the_id_nor_a_row(node, service: Service) -> None:
    first, _ = log_one(node)
    before = node.id_file.read_bytes()
    service.refuses_all = 403
    second, warnings = log_one(node, step=6)
    assert second == first
    assert node.id_file.read_bytes() == before
    assert "permission denied" in warnings
    service.refuses_all = None
    assert log_one(node, step=7) == (first, "")
    assert [row.step for row in node.journal_rows()] == [5, 6, 7]
    assert [row["v0.1.0/step"] for row in service.rows[first]] == [5, 7]


SURFACE = """
    run = start()
    run.log({"a": 1}, None, False)
    wandb.log({"b": 2}, step=4, commit=True)
    wandb.run.log({"c": 3})
    run.log_artifact("x")
    run.watch(None)
    run.summary["best"] = 1
    run.config.update({"more": 1}, allow_val_change=True)
    run.tags += ("later",)
    run.define_metric("a", step_metric="b", hidden=True)
    run.alert("title", text="text", level="INFO")
    assert wandb.run is run and wandb.config is run.config and run.name == "miner-3"
    wandb.finish()
    assert wandb.run is None
    print("trained to the end")
"""


def check_journalled_only(node, printed: str) -> None:
    assert "trained to the end" in printed
    assert [(row.step, row.values) for row in node.journal_rows()] == [
        (0, {"a": 1}),
        (4, {"b": 2}),
        (0, {"c": 3}),
    ]
    assert printed.count("could not be opened") == 1
    finish = node.journal.attempts[-1].finish_record()
    assert finish is not None
    assert finish.state == "finished"
    assert not node.id_file.with_suffix(".lock").exists()


@pytest.mark.case("C028")
def test_without_a_key_nobody_is_asked_and_the_node_journals(node) -> None:
    node.environment = {}
    printed = node.run(SURFACE)
    check_journalled_only(node, printed)
    assert "WANDB_API_KEY" in printed


def test_a_service_that_is_not_there_leaves_a_node_that_journals(node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    node.environment = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "k" * 40}
    printed = node.run(SURFACE)
    check_journalled_only(node, printed)
    assert "WANDB_BASE_URL" in printed


def test_a_service_that_breaks_at_the_start_leaves_a_node_that_journals(node, service: Service) -> None:
    service.refuses_all = 500
    check_journalled_only(node, node.run(SURFACE.replace("start()", "start(init_timeout=2.0)")))
