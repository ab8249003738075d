"""A W&B service on the loopback: enough of it for the real client to start, log, resume, rewind and read.

    with WandbService() as service:
        environment = service.environment      # WANDB_BASE_URL and a key
        ...
        service.runs["abc"].rows               # what the run's history holds, line by line

It stands for the hosted service, which no test may use; what it answers was measured with the real client.
Rows are kept by line, as the service does: a line that is sent again must be the same, and a gap is refused.
Faults of the network (down, slow, 429, a lost answer) are the business of `fault_proxy`; the service's own
refusals are attributes: `refuses`, `deleted`, `refuses_rewind`, `refuses_rows`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENTITY = "team"
KEY = "k" * 40
_VIEWER = {
    "id": "1",
    "entity": ENTITY,
    "username": "me",
    "email": "",
    "flags": "{}",
    "teams": {"edges": []},
}
_EMPTY_PAGE = {"endCursor": None, "hasNextPage": False}


class RefusedError(Exception):
    """An answer other than 200: `status` and the service's words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class StoredRun:
    """One run of the service. `lines` are the texts of its history, as they were sent."""

    id: str
    project: str = "demo"
    name: str = ""
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, dict[str, object]] = field(default_factory=dict)
    summary: dict[str, object] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    console: dict[int, str] = field(default_factory=dict)
    alerts: list[dict[str, object]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    #: How often the client said that it started the run.
    starts: int = 0
    state: str = "running"
    exit_code: int | None = None

    @property
    def rows(self) -> list[dict[str, object]]:
        """The history, NaN and infinities as floats."""
        return [json.loads(line) for line in self.lines]

    @property
    def values(self) -> dict[str, object]:
        """The config without what W&B wraps it in."""
        return {name: entry["value"] for name, entry in self.config.items() if name != "_wandb"}

    @property
    def metrics(self) -> list[dict[str, object]]:
        """The metrics that were defined: "1" is the name, "2" the glob, "5" the place of the step's."""
        return list(self.config.get("_wandb", {}).get("value", {}).get("m", []))

    def add(self, kind: str, offset: int, content: list[str]) -> None:
        """A part of `file_stream`. Raises RefusedError for a gap and for a line that is not what it was."""
        if kind == "wandb-summary.json":
            self.summary = json.loads(content[-1])
        elif kind == "output.log":
            self.console.update(enumerate(content, offset))
        else:
            lines = self.lines if kind == "wandb-history.jsonl" else self.events
            known = lines[offset : offset + len(content)]
            if offset > len(lines) or known != content[: len(known)]:
                raise RefusedError(409, f"lines {offset} and on are not what run {self.id} has")
            lines.extend(content[len(known) :])

    def describe(self) -> dict[str, object]:
        """What the queries about one run select, and more."""
        steps = [json.loads(line)["_step"] for line in self.lines]
        return {
            "id": f"storage-{self.id}",
            "projectId": "1",
            "name": self.id,
            "displayName": self.name or self.id,
            "description": "",
            "state": self.state,
            "tags": self.tags,
            "group": self.group,
            "jobType": self.job_type,
            "notes": self.notes,
            "config": json.dumps(self.config),
            "summaryMetrics": json.dumps(self.summary),
            "systemMetrics": "{}",
            "historyKeys": {"lastStep": max(steps, default=-1), "keys": {}},
            "historyLineCount": len(self.lines),
            "user": {"name": "me", "username": "me"},
            "createdAt": "2026-01-01T00:00:00Z",
            "project": {
                "id": "1",
                "name": self.project,
                "entity": {"id": "1", "name": ENTITY},
            },
        }

    def standing(self) -> dict[str, object]:
        """What a client needs to go on with the run."""
        return {
            **self.describe(),
            "entity": {"name": ENTITY},
            "logLineCount": len(self.console),
            "eventsLineCount": len(self.events),
            "historyTail": json.dumps(self.lines[-1:]),
            "eventsTail": json.dumps(self.events[-1:]),
            "wandbConfig": json.dumps({"t": {"value": 1}}) if self.starts else None,
        }


class WandbService:
    """See the module."""

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        #: Ids that the service does not give out again.
        self.deleted: set[str] = set()
        #: Status and words with which every GraphQL request is refused.
        self.refuses: tuple[int, str] | None = None
        self.refuses_rewind: tuple[int, str] | None = None
        #: The same for the question whether a run is there.
        self.refuses_looks: tuple[int, str] | None = None
        #: Status with which rows are refused, for so many requests: (status, times).
        self.refuses_rows: tuple[int, int] | None = None
        #: The names of the GraphQL operations and "file_stream", in the order in which they came.
        self.calls: list[str] = []
        self._lock = threading.RLock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="wandb-service")

    def __enter__(self) -> WandbService:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What points the real client here and keeps it quiet."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": KEY,
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
        }

    def answer(self, path: str, asked: dict[str, object]) -> dict[str, object]:
        """The answer to a POST. Raises RefusedError."""
        with self._lock:
            if path == "/graphql":
                return {"data": self._graphql(str(asked["query"]), asked.get("variables") or {})}
            if path.endswith("/file_stream"):
                return self._file_stream(path.split("/")[4], asked)
        return {}

    def upload(self, path: str, body: bytes) -> None:
        """A PUT to an address that `CreateRunFiles` gave."""
        _, run, name = path.split("/", 2)
        self.runs[run].files[name] = body

    # -- GraphQL -------------------------------------------------------------------------------------

    def _graphql(self, query: str, variables: Mapping[str, object]) -> dict[str, object]:
        if self.refuses is not None:
            raise RefusedError(*self.refuses)
        for field_name, resolve in _RESOLVERS.items():
            if re.search(rf"\b{field_name}\b", query):
                self.calls.append(field_name)
                return resolve(self, variables)
        raise RefusedError(200, "not done here")

    def _upsert(self, asked: Mapping[str, object]) -> dict[str, object]:
        name = asked.get("name") or str(asked.get("id") or "").removeprefix("storage-")
        run_id = str(name)
        if run_id in self.deleted:
            words = f"run {run_id} was previously created and deleted; try a new run name"
            raise RefusedError(409, words)
        inserted = run_id not in self.runs
        run = self.runs.setdefault(run_id, StoredRun(run_id, str(asked.get("project") or "demo")))
        if asked.get("program") is not None or asked.get("host") is not None or inserted:
            run.starts += 1
            run.state = "running"
        known = {"displayName": "name", "groupName": "group", "jobType": "job_type", "notes": "notes"}
        for theirs, ours in known.items():
            if asked.get(theirs) is not None:
                setattr(run, ours, asked[theirs])
        if asked.get("tags") is not None:
            run.tags = list(asked["tags"])
        if asked.get("config"):
            run.config = json.loads(str(asked["config"]))
        bucket = {**run.describe(), "historyLineCount": None, "sweepName": None}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _resume_status(self, asked: Mapping[str, object]) -> dict[str, object]:
        run = self.runs.get(str(asked["name"]))
        found = run.standing() if run is not None else None
        return {"model": {"id": "1", "name": "demo", "entity": {"id": "1", "name": ENTITY}, "bucket": found}}

    def _run(self, asked: Mapping[str, object]) -> dict[str, object]:
        if self.refuses_looks is not None:
            raise RefusedError(*self.refuses_looks)
        run = self.runs.get(str(asked["name"]))
        return {"project": {"run": run.describe() if run is not None else None}}

    def _runs(self, asked: Mapping[str, object]) -> dict[str, object]:
        wanted = json.loads(str(asked.get("filters") or "{}")).get("name")
        found = [run.describe() for run in self.runs.values() if wanted in (None, run.id)]
        edges = [{"node": node, "cursor": node["name"]} for node in found]
        page = {"edges": edges, "pageInfo": _EMPTY_PAGE}
        return {"project": {"internalId": "1", "runCount": len(found), "readOnly": False, "runs": page}}

    def _history_page(self, asked: Mapping[str, object]) -> dict[str, object]:
        run, first, end = self.runs[str(asked["run"])], int(asked["minStep"]), int(asked["maxStep"])
        lines = [line for line in run.lines if first <= json.loads(line)["_step"] < end]
        return {"project": {"run": {"history": lines}}}

    def _no_parquet(self, _asked: Mapping[str, object]) -> dict[str, object]:
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": []}}}}

    def _rewind(self, asked: Mapping[str, object]) -> dict[str, object]:
        if self.refuses_rewind is not None:
            raise RefusedError(*self.refuses_rewind)
        run = self.runs.get(str(asked["runName"]))
        if run is None:
            raise RefusedError(404, "run not found")
        last = int(asked["metricValue"])
        run.lines = [line for line in run.lines if json.loads(line)["_step"] <= last]
        return {"rewindRun": {"rewoundRun": run.standing()}}

    def _create_files(self, asked: Mapping[str, object]) -> dict[str, object]:
        run = str(asked["run"])
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{run}/{name}"} for name in asked["files"]]
        return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}

    def _alert(self, asked: Mapping[str, object]) -> dict[str, object]:
        self.runs[str(asked["runName"])].alerts.append(dict(asked))
        return {"notifyScriptableRunAlert": {"success": True}}

    # -- rows ----------------------------------------------------------------------------------------

    def _file_stream(self, run_id: str, sent: dict[str, object]) -> dict[str, object]:
        self.calls.append("file_stream")
        if self.refuses_rows is not None:
            status, times = self.refuses_rows
            self.refuses_rows = (status, times - 1) if times > 1 else None
            raise RefusedError(status, "rows are refused")
        run = self.runs[run_id]
        for kind, part in (sent.get("files") or {}).items():
            run.add(kind, part["offset"], part["content"])
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")
            run.state = "finished" if run.exit_code == 0 else "failed"
        return {}


#: By root field; the first that a query holds counts.
_RESOLVERS = {
    "upsertBucket": WandbService._upsert,
    "historyTail": WandbService._resume_status,
    "rewindRun": WandbService._rewind,
    "createRunFiles": WandbService._create_files,
    "notifyScriptableRunAlert": WandbService._alert,
    "parquetHistory": WandbService._no_parquet,
    r"history\(minStep": WandbService._history_page,
    r"runs\(": WandbService._runs,
    r"run\(name": WandbService._run,
    "viewer": lambda service, asked: {"viewer": _VIEWER},
    "serverInfo": lambda service, asked: {"serverInfo": {"features": []}},
}


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_request: object) -> None:
        """A client that was killed says no goodbye."""


def _handler(service: WandbService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self._body() or b"{}")
            try:
                self._reply(200, service.answer(self.path, asked))
            except RefusedError as refusal:
                self._reply(refusal.status, {"errors": [{"message": str(refusal)}], "data": None})

        def do_PUT(self) -> None:
            service.upload(self.path.removeprefix("/upload"), self._body())
            self._reply(200, {})

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _reply(self, status: int, answer: dict[str, object]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Nothing: the test's output is for the test."""

    return Handler
