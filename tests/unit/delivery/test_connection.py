"""Real errors of real clients, of servers that are not there, do not answer, or break off."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import requests
import urllib3

from nodetrack.delivery.connection import describe_failure
from nodetrack.errors import BackendUnavailableError


def with_urllib(url: str) -> object:
    return urllib.request.urlopen(url, timeout=0.2)


def with_urllib3(url: str) -> object:
    with urllib3.PoolManager() as pool:
        return pool.request("GET", url, timeout=0.2, retries=urllib3.Retry(1))


def with_requests(url: str) -> object:
    return requests.get(url, timeout=0.2)


def as_a_backend_of_ours(url: str) -> object:
    try:
        return requests.get(url, timeout=0.2)
    except requests.RequestException as error:
        raise BackendUnavailableError(f"The service cannot be had: {error}") from error


CLIENTS = [with_urllib, with_urllib3, with_requests, as_a_backend_of_ours]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A socket that listens; what comes of it is the test's affair."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def failure_of(client: Callable[[str], object], url: str) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the client raises
        client(f"{url}/write?secret=1")
    return describe_failure(caught.value, f"{url}, bucket nodes of us")


def url_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("client", CLIENTS)
def test_nobody_listens(client: Callable[[str], object], server: socket.socket) -> None:
    url = url_of(server)
    server.close()
    assert failure_of(client, url) == f"cannot be reached at {url}: connection refused"


@pytest.mark.parametrize("client", CLIENTS)
def test_nobody_answers(client: Callable[[str], object], server: socket.socket) -> None:
    url = url_of(server)
    assert failure_of(client, url) == f"cannot be reached at {url}: timed out"


@pytest.mark.parametrize("client", CLIENTS)
def test_the_server_breaks_off(client: Callable[[str], object], server: socket.socket) -> None:
    def break_off() -> None:
        for _ in range(2):  # one client tries twice
            try:
                server.accept()[0].close()
            except OSError:  # the test is over
                return

    server.settimeout(1)
    thread = threading.Thread(target=break_off)
    thread.start()
    url = url_of(server)
    assert failure_of(client, url) == f"cannot be reached at {url}: connection broken off"
    server.close()
    thread.join()


@pytest.mark.parametrize("client", CLIENTS)
def test_the_name_is_not_known(client: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver is a stand-in: a real one would be asked over the network."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    url = "http://metrics.invalid:8086"
    assert failure_of(client, url) == f"cannot be reached at {url}: name not known"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(113, "No route to host"), "cannot be reached at runs: no route to host"),
        (
            FileNotFoundError(2, "No such file", "/proc/x"),
            "FileNotFoundError: [Errno 2] No such file: '/proc/x'",
        ),
        (BackendUnavailableError("HTTP 503"), "HTTP 503"),
        (RuntimeError("odd"), "RuntimeError: odd"),
        (None, "NoneType: None"),
    ],
)
def test_other_errors_keep_their_words(error: Exception | None, words: str) -> None:
    assert describe_failure(error, "runs") == words


def test_a_service_that_names_a_time_has_answered() -> None:
    error = BackendUnavailableError("HTTP 429", retry_after_seconds=3.0)
    error.__cause__ = TimeoutError()
    assert describe_failure(error, "http://there") == "HTTP 429"


def test_errors_that_name_each_other_come_to_an_end() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert describe_failure(first, "http://there") == "RuntimeError: a"
