"""Faults at random, all at once: afterwards both servers have every row, and once."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator

import pytest
from tests.bad_days.conftest import NewNode
from tests.bad_days.destinations import Influx, Lines, Mlflow, Tensorboard
from tests.bad_days.node import assert_arrived, until
from tests.servers.fault_proxy import FaultProxy

CHAOS_SECONDS = 15.0
KILLS = 3


@contextlib.contextmanager
def before(url: str) -> Iterator[FaultProxy]:
    with FaultProxy(url) as proxy:
        yield proxy


def go_away_and_come_back(proxy: FaultProxy) -> None:
    proxy.go_away()
    time.sleep(0.3)
    proxy.come_back()


FAULTS: list[Callable[[FaultProxy], None]] = [
    lambda proxy: proxy.answer(500, times=2),
    lambda proxy: proxy.answer(503, retry_after=1),
    lambda proxy: proxy.answer(502, body=b"<html>bad gateway</html>", headers={"Content-Type": "text/html"}),
    lambda proxy: proxy.hang(),
    lambda proxy: proxy.cut_request(times=2),
    lambda proxy: proxy.cut_answer(),
    lambda proxy: proxy.lose_answer(times=2),
    lambda proxy: proxy.delay(0.3, times=3),
    go_away_and_come_back,
]
SPOILT = ["write fail", "write lose", "write unavailable 0.2", "open fail", ""]


@pytest.mark.slow
def test_a_network_that_does_everything_wrong(
    new_node: NewNode, influx: Influx, mlflow: Mlflow, tensorboard: Tensorboard, lines: Lines
) -> None:
    chance = random.Random(5)
    with before(influx.own_url) as one, before(mlflow.own_url) as other:
        destinations = (Influx(influx.server, one.url), Mlflow(mlflow.server, other.url), tensorboard, lines)
        node = new_node(*(destination.config for destination in destinations), finish_timeout=60)
        node.start()
        end = time.monotonic() + CHAOS_SECONDS
        kill_at = sorted(end - chance.uniform(1, CHAOS_SECONDS - 1) for _ in range(KILLS))
        while time.monotonic() < end:
            proxy = chance.choice((one, other))
            proxy.heal()  # what was planned and has not happened
            chance.choice(FAULTS)(proxy)
            lines.file.spoil(chance.choice(SPOILT))
            time.sleep(chance.uniform(0.1, 0.4))
            if kill_at and time.monotonic() > kill_at[0]:
                kill_at.pop(0)
                node.kill_delivery()
        for proxy in (one, other):
            proxy.heal()
        lines.file.mend()
        until(node.delivery_processes, "a delivery process")
        node.finish()
        node.wait_until_alone()
        assert_arrived(node, *destinations)
        met = {request.fault for request in [*one.requests, *other.requests]}
        assert len(met - {""}) >= 3, f"a quiet day, of {met}"
