"""Bad days of the servers that rows are sent to: training goes on through them, and every row arrives."""

from __future__ import annotations

from typing import Any

import pytest
from tests.bad_days.conftest import NewNode
from tests.bad_days.destinations import Influx, Lines, Mlflow, Tensorboard, Victoria
from tests.bad_days.node import BOUND_SECONDS, Destination, Node, assert_arrived, until
from tests.servers.fault_proxy import FaultProxy

Remote = Victoria | Influx | Mlflow


def health_of(node: Node, destination: Destination) -> dict[str, Any]:
    """What the trainer knows of the backend."""
    health: dict[str, Any] = node.health()["backends"][destination.config["kind"]]
    return health


@pytest.mark.parametrize("remote", ["victoria", "mlflow"], indirect=True)
@pytest.mark.case("C020")
def test_a_server_that_is_absent_at_the_start_and_comes_later(
    new_node: NewNode, remote: Remote, proxy: FaultProxy
) -> None:
    proxy.go_away()
    node = new_node(remote.config)
    assert node.start()["seconds"] < BOUND_SECONDS
    node.wait_for_rows(50)
    until(lambda: health_of(node, remote)["state"] == "down", "the news that there is no server")
    health = health_of(node, remote)
    assert health["delivered"] == 0
    assert health["last_error"]
    proxy.come_back()
    node.wait_for_rows(20)
    node.finish()
    node.wait_until_alone()
    assert_arrived(node, remote)


@pytest.mark.parametrize(("remote", "status"), [("victoria", 401), ("mlflow", 403)], indirect=["remote"])
def test_a_server_that_refuses_us_is_named_by_init_and_nothing_is_left(
    new_node: NewNode, remote: Remote, proxy: FaultProxy, status: int
) -> None:
    proxy.answer(status, times=None, body=b"who are you?", headers={"Content-Type": "text/plain"})
    node = new_node(remote.config, init_timeout=60)  # a client that takes long to import is waited for
    printed = node.start_in_vain()
    assert "BackendRefusedError" in printed
    assert f"{status}" in printed
    node.wait_until_alone()
    proxy.heal()
    node.start()  # the node's lock is free
    node.wait_for_rows(20)
    node.finish()
    assert_arrived(node, remote)


def test_a_wrong_token_is_told_by_init(new_node: NewNode, lines: Lines) -> None:
    node = new_node({**lines.config, "needs_token": True, "token": "wrong"})
    assert "jsonlines does not know this token" in node.start_in_vain()
    node.wait_until_alone()
    node.environment["JSONLINES_TOKEN"] = "let-me-in"
    node.settings["backends"] = [{**lines.config, "needs_token": True}]
    node.start()
    node.wait_for_rows(20)
    node.finish()
    assert_arrived(node, lines)


@pytest.mark.parametrize("remote", ["victoria", "mlflow"], indirect=True)
@pytest.mark.case("C020")
@pytest.mark.case("C024")
def test_a_server_that_takes_connections_and_says_nothing(
    new_node: NewNode, remote: Remote, proxy: FaultProxy
) -> None:
    proxy.hang(times=None)
    node = new_node(remote.config, finish_timeout=2, init_timeout=1)
    assert node.start()["seconds"] < BOUND_SECONDS
    node.wait_for_rows(50)
    assert node.finish() < BOUND_SECONDS
    node.wait_until_alone()
    assert "nodetrack sync" in node.errors(), "what is left is named, with the command that sends it"
    proxy.heal()
    node.sync()
    assert_arrived(node, remote)


def test_a_plug_in_that_hangs_for_good_holds_up_no_other(
    new_node: NewNode, lines: Lines, tensorboard: Tensorboard
) -> None:
    """Its call cannot be ended, so its process is."""
    lines.file.spoil("write hang")
    node = new_node(lines.config, tensorboard.config, finish_timeout=3)
    node.start()
    node.wait_for_rows(50)
    assert node.finish() < BOUND_SECONDS
    node.wait_until_alone()
    assert_arrived(node, tensorboard)
    assert not lines.rows(node.run_id)
    lines.file.mend()
    node.sync()
    assert_arrived(node, lines, tensorboard)


@pytest.mark.parametrize(("remote", "status"), [("influx", 500), ("mlflow", 503)], indirect=["remote"])
def test_a_server_that_fails_for_a_while(
    new_node: NewNode, remote: Remote, proxy: FaultProxy, status: int
) -> None:
    node = new_node(remote.config)
    node.start()
    node.wait_for_rows(30)
    proxy.answer(status, times=3)
    until(lambda: sum(request.fault == "answer" for request in proxy.requests) == 3, "three failures")
    node.wait_for_rows(30)
    node.finish()
    assert_arrived(node, remote)


@pytest.mark.parametrize("remote", ["victoria"], indirect=True)
@pytest.mark.case("C054")
def test_a_server_that_asks_for_a_pause_gets_it(new_node: NewNode, remote: Remote, proxy: FaultProxy) -> None:
    """Not MLflow's: its client tells nobody what the answer's headers were."""
    node = new_node(remote.config)
    node.start()
    node.wait_for_rows(30)
    proxy.answer(429, retry_after=3, on=remote.writes)
    until(lambda: any(request.status == 429 for request in proxy.requests), "the refusal")
    node.wait_for_rows(30)
    node.finish()
    asked = next(number for number, request in enumerate(proxy.requests) if request.status == 429)
    pause = proxy.requests[asked + 1].at - proxy.requests[asked].at
    assert pause >= 2.9, f"it was asked again after {pause} s of the 3 that it had asked for"
    assert_arrived(node, remote)


@pytest.mark.parametrize(
    ("remote", "fault"),
    [
        ("victoria", "cut_request"),
        ("influx", "cut_answer"),
        ("influx", "lose_answer"),
        ("mlflow", "lose_answer"),
    ],
    indirect=["remote"],
)
def test_connections_that_break_in_the_middle(
    new_node: NewNode, remote: Remote, proxy: FaultProxy, fault: str
) -> None:
    """Where the server has the batch and its answer is lost, it comes twice."""
    node = new_node(remote.config)
    node.start()
    node.wait_for_rows(30)
    getattr(proxy, fault)(times=3, on=remote.writes)
    until(lambda: sum(request.fault == fault for request in proxy.requests) == 3, "three broken exchanges")
    node.wait_for_rows(30)
    node.finish()
    assert_arrived(node, remote)


@pytest.mark.parametrize("call", ["open", "close"])
def test_a_plug_in_that_hangs_at_its_beginning_or_its_end(new_node: NewNode, lines: Lines, call: str) -> None:
    lines.file.spoil(f"{call} hang")
    node = new_node(lines.config, finish_timeout=2, init_timeout=1)
    node.start()
    node.wait_for_rows(20)
    assert node.finish() < BOUND_SECONDS
    node.wait_until_alone()
    lines.file.mend()
    node.sync()
    assert_arrived(node, lines)


def test_a_plug_in_that_takes_its_process_down(
    new_node: NewNode, lines: Lines, tensorboard: Tensorboard
) -> None:
    """Its process is started again so many times and no more; training and the journal go on."""
    lines.file.spoil("write exit")
    node = new_node(lines.config, tensorboard.config)
    node.restart_pauses = [0.05, 0.05]
    node.start()
    until(lambda: "There is no delivery process" in node.errors(), "the warning")
    node.wait_for_rows(20)
    node.finish()
    node.wait_until_alone()
    lines.file.mend()
    node.sync()
    assert_arrived(node, lines, tensorboard)


@pytest.mark.parametrize("remote", ["influx"], indirect=True)
def test_a_server_that_takes_nothing_at_all_for_a_while(
    new_node: NewNode, remote: Remote, proxy: FaultProxy
) -> None:
    """It says of every row that it will never take it: then it is not the rows, and they are kept."""
    proxy.answer(400, times=None, body=b'{"message": "no"}', headers={"Content-Type": "application/json"})
    node = new_node(remote.config)
    node.start()
    node.wait_for_rows(50)
    until(lambda: health_of(node, remote)["state"] == "refused", "the news that it takes nothing")
    proxy.heal()
    node.finish()
    node.wait_until_alone()
    assert_arrived(node, remote)
    assert not (node.run.folder / "quarantine").exists()


def test_answers_that_a_plug_in_lost(new_node: NewNode, lines: Lines) -> None:
    node = new_node(lines.config)
    node.start()
    until(lambda: lines.file.rows(), "the first rows")
    lines.file.spoil("write lose")
    until(lambda: max(lines.rows(node.run_id).values()) > 1, "a batch that has come twice")
    lines.file.mend()
    node.finish()
    assert_arrived(node, lines)


@pytest.mark.parametrize("remote", ["victoria"], indirect=True)
def test_a_slow_line(new_node: NewNode, remote: Remote, proxy: FaultProxy) -> None:
    proxy.delay(0.3, times=None)
    node = new_node(remote.config)
    node.start()
    node.wait_for_rows(100)
    node.finish()
    assert_arrived(node, remote)
    assert len(proxy.requests_on(remote.writes)) < 100, "rows that wait go together"


@pytest.mark.case("C019")
def test_one_backend_down_and_two_fine(
    new_node: NewNode, lines: Lines, mlflow: Mlflow, victoria: Victoria, proxy: FaultProxy
) -> None:
    proxy.upstream = victoria.own_url
    proxy.answer(500, times=None)
    away = Victoria(victoria.server, proxy.url)
    node = new_node(away.config, lines.config, mlflow.config)
    node.start()
    node.wait_for_rows(50)
    node.stop_logging()
    for fine in (lines, mlflow):
        until(lambda fine=fine: set(fine.rows(node.run_id)) == node.acknowledged(), f"the rows at {fine}")
    backends = node.health()["backends"]
    assert {kind: health["state"] for kind, health in backends.items()} == {
        "influxdb": "down",
        "jsonlines": "ok",
        "mlflow": "ok",
    }
    assert not away.rows(node.run_id)
    proxy.heal()
    node.finish()
    assert_arrived(node, away, lines, mlflow)
