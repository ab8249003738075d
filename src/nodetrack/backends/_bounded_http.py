"""Requests whose answers have an end: in time, in bytes, and in what they may repeat.

A client of urllib3 waits for each piece of an answer anew and reads whatever comes, so that a server, or what
stands before it, can hold it for ever by a byte a second, or fill the memory. `BoundedPool` stands where such
a client has its pool of connections.
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from nodetrack.errors import BackendUnavailableError

if TYPE_CHECKING:
    from urllib3 import HTTPResponse, PoolManager
    from urllib3.connectionpool import HTTPConnectionPool

#: What a person may want to read of an answer is at its beginning.
MOST_BYTES: Final = 65_536


class BoundedPool:
    """Makes each request through `pool`, and gives back the beginning of its answer, read and closed.

    `place` is the server in words, `seconds` is for a whole request, and `mask` takes out of a text what must
    not be repeated. For one thread. Raises BackendUnavailableError.
    """

    def __init__(self, pool: PoolManager, place: str, seconds: float, mask: Callable[[str], str]) -> None:
        self._pool = pool
        self._place = place
        self._seconds = seconds
        self._mask = mask
        self._watch = _Watch()
        kinds = pool.pool_classes_by_scheme
        pool.pool_classes_by_scheme = {name: _watched(kind, self._watch) for name, kind in kinds.items()}

    def request(self, method: str, url: str, **options: Any) -> HTTPResponse:
        """As PoolManager.request has it. No redirection is followed: the token is for this server."""
        from urllib3.exceptions import HTTPError

        options |= {"preload_content": False, "redirect": False}
        self._watch.begin(self._seconds)
        try:
            response = self._pool.request(method, url, **options)
            answer = self._copy(response, _beginning_of(response))  # type: ignore[arg-type]
        except (HTTPError, OSError, ValueError) as error:
            raise self._meaning(error) from (None if self._is_late(error) else error)
        finally:
            self._watch.end()
        if self._watch.is_over:  # what was read may be cut short
            raise self._too_late()
        return answer

    def clear(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def _copy(self, response: HTTPResponse, body: bytes) -> HTTPResponse:
        from urllib3 import HTTPResponse

        headers = {
            name: self._mask(value)
            for name, value in response.headers.items()
            if not name.lower().startswith(("content-", "transfer-"))  # they are about the body as it came
        }
        text = self._mask(body.decode("utf-8", "replace"))
        reason = self._mask(response.reason or "")
        return HTTPResponse(io.BytesIO(text.encode()), headers, response.status, reason=reason)

    def _is_late(self, error: Exception) -> bool:
        from urllib3.exceptions import ReadTimeoutError

        return self._watch.is_over or isinstance(error, ReadTimeoutError)

    def _meaning(self, error: Exception) -> BackendUnavailableError:
        if self._is_late(error):
            return self._too_late()
        inner = next((link for link in (error, *error.args) if isinstance(link, ssl.SSLError)), None)
        if inner is not None:
            words = getattr(inner, "verify_message", "") or inner.reason or inner
            return BackendUnavailableError(f"{self._place} gives no secure connection: {words}")
        return BackendUnavailableError(
            f"{self._place} gives no answer: {self._mask(f'{type(error).__name__}: {error}')}"
        )

    def _too_late(self) -> BackendUnavailableError:
        return BackendUnavailableError(f"{self._place} has not answered within {self._seconds:g} s.")


def _beginning_of(response: HTTPResponse) -> bytes:
    """As much of the body as we want; a connection on which more would come is closed."""
    # Not unpacked: a few bytes may become a gigabyte, and we asked for no packing.
    body = response.read(MOST_BYTES, decode_content=False)
    if not response.closed:
        response.close()
    response.release_conn()
    return body


class _Watch:
    """Ends what a request waits for when its time is over. Only another thread can: each byte that comes
    begins the socket's own time-out anew.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(0.0, self._expire)

    def begin(self, seconds: float) -> None:
        self.is_over, self._socket = False, None
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()
        self._timer.join()
        self._socket = None

    def take(self, connection: socket.socket | None) -> None:
        """From now on the request waits for this connection."""
        with self._lock:
            self._socket = connection
            if self.is_over:
                self._shut_down()

    def _expire(self) -> None:
        with self._lock:
            self.is_over = True
            self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Not that of a TLS socket, which would take the session away from under who reads from it.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def _watched(kind: type[HTTPConnectionPool], watch: _Watch) -> type[HTTPConnectionPool]:
    """This kind of pool, with connections that tell `watch` which socket a request uses."""
    base: Any = kind.ConnectionCls

    class Connection(base):  # type: ignore[misc]
        def connect(self) -> None:
            super().connect()
            watch.take(self.sock)

        def request(self, *args: Any, **options: Any) -> Any:
            watch.take(self.sock)  # that of an earlier request; None: it has to connect first
            return super().request(*args, **options)

    return type(kind.__name__, (kind,), {"ConnectionCls": Connection})
