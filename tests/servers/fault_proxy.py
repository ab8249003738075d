"""A loopback HTTP proxy that stands before a real server and misbehaves as a test says.

    with FaultProxy(server.url) as proxy:      # no upstream: every request is answered 204
        proxy.answer(503, times=2, retry_after=1)
        proxy.lose_answer(on="/api/v2/write")
        client = Client(proxy.url)             # http://127.0.0.1:PORT, the same port for the proxy's life
        ...
        proxy.heal()                           # what is planned and did not happen yet is called off

What can be planned, each for the next `times` requests (None: until `heal`) whose path holds `on`:

| call                                   | what the client sees                                       |
|----------------------------------------|------------------------------------------------------------|
| `answer(status, retry_after=, body=)`  | that answer; the server sees nothing                       |
| `hang()`                               | a connection that is taken and never answered              |
| `cut_request()`                        | a reset while it sends its body; the server sees nothing   |
| `cut_answer()`                         | half an answer and a reset; the server has the request     |
| `lose_answer()`                        | a reset instead of the answer; the server has the request  |
| `delay(seconds)`                       | the server's answer, late                                  |
| `drip(on_body=)`                       | an answer without an end, a byte at a time; no server      |
| `flood(status)`                        | an answer of 256 MB in one chunk after another; no server  |
| `go_away()` … `come_back()`            | connection refused, open connections reset                 |

Plans are used up in the order in which they were made. `requests` holds every request that was read whole
(`method`, `path`, `headers`, `body`, `fault`, `status`, `at`, in seconds of `time.monotonic`),
`wait_for(count)` waits until there are so many. `FaultProxy(..., away=True)` begins refusing connections.
All methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

#: A client that hangs longer than this has no time-out: the test then fails by its own limit.
LONGEST_HANG_SECONDS = 300.0
_DRIP_SECONDS = 0.05
_FLOOD_CHUNKS, _FLOOD_CHUNK = 4096, b"x" * 65_536
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "expect", "te"}


@dataclass
class Request:
    """One request that reached the proxy whole, or as far as it was let through."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    fault: str = ""
    status: int = 0
    at: float = field(default_factory=time.monotonic)
    #: Of a flood, how much the client let in; known once the proxy is closed.
    flooded_bytes: int = 0


@dataclass
class _Plan:
    fault: str
    on: str = ""
    times: int | None = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class FaultProxy:
    """See the module."""

    def __init__(self, upstream: str | None = None, *, away: bool = False) -> None:
        self.upstream = upstream
        self.requests: list[Request] = []
        self._plans: list[_Plan] = []
        self._changed = threading.Condition()
        self._healed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._server: _Server | None = None
        # Bound and never listening: it keeps the port ours while the proxy is away.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port: int = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if not away:
            self.come_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the port; no thread is left."""
        self.heal()
        self.go_away()
        self._reserved.close()

    # -- what may be planned -------------------------------------------------------------------------

    def answer(
        self,
        status: int,
        *,
        times: int | None = 1,
        on: str = "",
        retry_after: object = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer so instead of the server. `retry_after`: seconds or a date."""
        given = dict(headers or {})
        if retry_after is not None:
            given["Retry-After"] = str(retry_after)
        self._plan(_Plan("answer", on, times, status, given, body))

    def hang(self, *, times: int | None = 1, on: str = "") -> None:
        """Read the request and say nothing, until `heal` or the end, when the connection is reset."""
        self._plan(_Plan("hang", on, times))

    def cut_request(self, *, times: int | None = 1, on: str = "") -> None:
        """Reset the connection when half of the request's body is read."""
        self._plan(_Plan("cut_request", on, times))

    def cut_answer(self, *, times: int | None = 1, on: str = "") -> None:
        """Pass the request on, give half of the answer back, reset."""
        self._plan(_Plan("cut_answer", on, times))

    def lose_answer(self, *, times: int | None = 1, on: str = "") -> None:
        """Pass the request on and reset the connection: whoever sends again sends twice."""
        self._plan(_Plan("lose_answer", on, times))

    def delay(self, seconds: float, *, times: int | None = 1, on: str = "") -> None:
        """Wait before the request is passed on."""
        self._plan(_Plan("delay", on, times, seconds=seconds))

    def drip(self, *, on_body: bool = False, times: int | None = 1, on: str = "") -> None:
        """Answer by a byte at a time, in the headers or in the body, until `heal` or the end."""
        self._plan(_Plan("drip", on, times, 503 if on_body else 204))

    def flood(self, status: int, *, times: int | None = 1, on: str = "") -> None:
        """Answer with more than anybody should read."""
        self._plan(_Plan("flood", on, times, status))

    def heal(self) -> None:
        """Call off all plans and end what hangs."""
        with self._changed:
            self._plans.clear()
            self._healed.set()
            self._healed = threading.Event()

    def go_away(self) -> None:
        """Refuse connections from now on and reset those that are open."""
        server, self._server = self._server, None
        if server is None:
            return
        with self._changed:
            self._healed.set()
            self._healed = threading.Event()
        server.shutdown()
        server.socket.close()
        for connection in list(self._connections):
            reset(connection)
        server.server_close()

    def come_back(self) -> None:
        """Take connections again, on the same port."""
        if self._server is None:
            self._server = _Server(self)
            threading.Thread(target=self._server.serve_forever, args=(0.02,), name="fault-proxy").start()

    # -- what happened -------------------------------------------------------------------------------

    def wait_for(self, count: int = 1, *, on: str = "", seconds: float = 30.0) -> list[Request]:
        """The requests so far whose path holds `on`, once there are `count`; fails after `seconds`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.requests_on(on)) >= count, seconds):
                found = len(self.requests_on(on))
                raise AssertionError(f"{found} requests on {on!r} after {seconds} s, not {count}")
            return self.requests_on(on)

    def requests_on(self, on: str) -> list[Request]:
        """The requests so far whose path holds `on`."""
        return [request for request in list(self.requests) if on in request.path]

    # -- for the handler -----------------------------------------------------------------------------

    def _plan(self, plan: _Plan) -> None:
        with self._changed:
            self._plans.append(plan)

    def _take(self, path: str) -> _Plan | None:
        """The plan for a request on `path`, used up by one."""
        with self._changed:
            plan = next((plan for plan in self._plans if plan.on in path), None)
            if plan is not None and plan.times is not None:
                plan.times -= 1
                if plan.times <= 0:
                    self._plans.remove(plan)
            return plan

    def _note(self, request: Request) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def _forward(self, request: Request) -> _Answer:
        if self.upstream is None:
            return _Answer(204, [], b"")
        target = urlsplit(self.upstream)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        try:
            connection.request(request.method, target.path + request.path, request.body or None, headers)
            answer = connection.getresponse()
            return _Answer(answer.status, answer.getheaders(), answer.read())
        except (OSError, http.client.HTTPException) as error:
            return _Answer(502, [], f"upstream: {error}".encode())
        finally:
            connection.close()


def reset(connection: socket.socket) -> None:
    """Let it end so that the other side sees a reset, as when something on the way loses the connection."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it, and that one closes it


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # server_close joins them
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", proxy.port), _Handler)

    def shutdown_request(self, request: Any) -> None:
        """Without the orderly end that the base class sends first: it would hide a reset."""
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is what this proxy is about: no traceback."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.proxy._connections.add(self.connection)

    def finish(self) -> None:
        self.server.proxy._connections.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""

    def _handle(self) -> None:
        proxy = self.server.proxy
        plan = proxy._take(self.path)
        fault = plan.fault if plan is not None else ""
        body = self._read_body(half=fault == "cut_request")
        request = Request(self.command, self.path, dict(self.headers.items()), body, fault)
        healed = proxy._healed
        try:
            if fault == "delay" and plan is not None:
                healed.wait(plan.seconds)
            answer = None
            if fault == "answer" and plan is not None:
                answer = _Answer(plan.status, list(plan.headers.items()), plan.body)
            elif fault not in ("hang", "cut_request", "drip", "flood"):
                answer = proxy._forward(request)
            request.status = answer.status if answer is not None else 0
        finally:
            proxy._note(request)
        if plan is not None and fault in ("drip", "flood"):
            with contextlib.suppress(OSError):  # the client has had enough
                self._drip(plan.status, healed) if fault == "drip" else self._flood(plan.status, request)
            self._reset()
        elif answer is None or fault == "lose_answer":
            if fault == "hang":
                healed.wait(LONGEST_HANG_SECONDS)
            self._reset()
        else:
            self._send(answer, half=fault == "cut_answer")

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _handle  # noqa: N815

    def _read_body(self, *, half: bool) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return self._read_chunks(half=half)
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length // 2 if half else length)

    def _read_chunks(self, *, half: bool) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
            if half:
                return body
        while self.rfile.readline().strip():
            pass
        return body

    def _send(self, answer: _Answer, *, half: bool) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        if answer.status >= 200 and answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        if half:
            # Half of the head too: an answer without a body can be cut as well.
            head = b"".join(self._headers_buffer)
            self.wfile.write((head + b"\r\n" + answer.body)[: (len(head) + len(answer.body)) // 2])
            self._reset()
            return
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _drip(self, status: int, healed: threading.Event) -> None:
        self.send_response_only(status)
        if status != 204:
            self.send_header("Connection", "close")
            self.end_headers()
        else:
            self.flush_headers()
            self.wfile.write(b"X-Long: ")
        while not healed.wait(_DRIP_SECONDS):
            self.wfile.write(b"x")

    def _flood(self, status: int, request: Request) -> None:
        self.send_response_only(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(_FLOOD_CHUNKS):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(_FLOOD_CHUNK), _FLOOD_CHUNK))
            request.flooded_bytes += len(_FLOOD_CHUNK)
        self.wfile.write(b"0\r\n\r\n")

    def _reset(self) -> None:
        self.close_connection = True
        reset(self.connection)
