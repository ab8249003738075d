"""The fault proxy does to a client what its table says."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.servers.fault_proxy import FaultProxy


@pytest.fixture
def server() -> Iterator[FaultProxy]:
    """A proxy without upstream answers 204: the server behind the proxy that is tried."""
    with FaultProxy() as server:
        yield server


@pytest.fixture
def proxy(server: FaultProxy) -> Iterator[FaultProxy]:
    with FaultProxy(server.url) as proxy:
        yield proxy


def post(proxy: FaultProxy, body: bytes = b"0123456789", path: str = "/write", timeout: float = 30) -> int:
    """The status of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)
    try:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def test_without_a_plan_everything_passes(proxy: FaultProxy, server: FaultProxy) -> None:
    assert post(proxy, b"abc") == 204
    assert [(request.method, request.path, request.body) for request in server.requests] == [
        ("POST", "/write", b"abc")
    ]


def test_an_answer_is_given_as_often_as_planned(proxy: FaultProxy, server: FaultProxy) -> None:
    proxy.answer(503, times=2, retry_after=7, on="/write")
    assert [post(proxy, path="/ping"), post(proxy), post(proxy), post(proxy)] == [204, 503, 503, 204]
    assert len(server.requests) == 2
    assert [request.fault for request in proxy.requests_on("/write")] == ["answer", "answer", ""]


@pytest.mark.parametrize(
    ("fault", "arrived"), [("cut_request", 0), ("cut_answer", 1), ("lose_answer", 1), ("hang", 0)]
)
def test_a_broken_exchange_leaves_at_the_server_what_the_table_says(
    proxy: FaultProxy, server: FaultProxy, fault: str, arrived: int
) -> None:
    getattr(proxy, fault)()
    with pytest.raises((OSError, http.client.HTTPException)):
        post(proxy, b"x" * 5_000_000, timeout=1 if fault == "hang" else 30)
    assert len(server.requests) == arrived
    assert post(proxy) == 204


def test_a_request_that_hangs_ends_when_the_proxy_heals(proxy: FaultProxy) -> None:
    proxy.hang(times=None)
    errors: list[Exception] = []

    def send() -> None:
        try:
            post(proxy)
        except (OSError, http.client.HTTPException) as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    proxy.wait_for(1)
    proxy.heal()
    thread.join(30)
    assert errors
    assert post(proxy) == 204


def test_away_it_refuses_connections_and_comes_back_on_the_same_port(server: FaultProxy) -> None:
    with FaultProxy(server.url, away=True) as proxy:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                post(proxy)
            proxy.come_back()
            assert post(proxy) == 204
            proxy.go_away()


def test_going_away_resets_open_connections(proxy: FaultProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 204")
        proxy.go_away()
        with pytest.raises(ConnectionResetError):
            client.recv(1000)
