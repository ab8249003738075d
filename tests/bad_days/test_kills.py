"""SIGKILL for the trainer, its delivery process, or both: no acknowledged row is lost, and nobody is left."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from tests.bad_days.conftest import NewNode
from tests.bad_days.destinations import Influx, Lines, Tensorboard, Victoria
from tests.bad_days.node import BOUND_SECONDS, Destination, assert_arrived, until
from tests.servers.fault_proxy import FaultProxy

BATCH_ROWS = 10


@pytest.fixture
def three(lines: Lines, influx: Influx, tensorboard: Tensorboard) -> list[Destination]:
    """Of three kinds."""
    return [lines, influx, tensorboard]


def configs(destinations: list[Destination]) -> list[dict[str, object]]:
    return [destination.config for destination in destinations]


@pytest.mark.case("C033")
def test_a_delivery_process_that_is_killed_again_and_again(
    new_node: NewNode, three: list[Destination], lines: Lines
) -> None:
    kills, moments = 4, random.Random(3)
    node = new_node(*({**config, "batch_rows": BATCH_ROWS} for config in configs(three)))
    node.start()
    for _ in range(kills):
        until(node.delivery_processes, "a delivery process")
        time.sleep(moments.uniform(0.0, 1.0))  # while it starts, opens, reads or sends
        assert node.kill_delivery()
    until(node.delivery_processes, "a delivery process")
    node.wait_for_rows(30)
    node.finish()
    node.wait_until_alone()
    assert_arrived(node, *three)
    stretches = repeats(lines, node.run_id)
    assert len(stretches) <= kills
    assert max(stretches, default=0) <= BATCH_ROWS, "a kill repeats one batch at most"


def repeats(lines: Lines, run: str) -> list[int]:
    """How many rows came again, by stretch."""
    rows = [
        (line["step"], *line["values"])  # type: ignore[misc]
        for line in lines.file.lines()
        if line["record"] == "Row" and line["run"] == run
    ]
    first = {row: place for place, row in reversed([*enumerate(rows)])}
    again = [first[row] < place for place, row in enumerate(rows)]
    return [len([*stretch]) for is_repeat, stretch in itertools.groupby(again) if is_repeat]


def test_past_the_bound_it_is_not_started_again_and_sync_sends_the_rest(
    new_node: NewNode, three: list[Destination]
) -> None:
    node = new_node(*configs(three))
    node.restart_pauses = [0.05]
    node.start()
    for _ in range(2):
        until(node.delivery_processes, "a delivery process")
        node.wait_for_rows(20)
        node.kill_delivery()
    until(lambda: "There is no delivery process" in node.errors(), "the warning")
    node.wait_for_rows(50)
    node.finish()
    node.wait_until_alone()
    node.sync()
    assert_arrived(node, *three)


@pytest.mark.case("C036")
@pytest.mark.parametrize("moment", [0.0, 0.15, 0.4])
def test_a_killed_trainer_whose_rows_are_sent_without_it(
    new_node: NewNode, three: list[Destination], moment: float
) -> None:
    node = new_node(*configs(three))
    node.start()
    node.wait_for_rows(1)
    time.sleep(moment)
    node.kill()
    node.wait_until_alone()
    assert_arrived(node, *three, kills=1)
    finish = node.run.attempts[-1].finish_record()
    assert finish is not None
    assert (finish.state, finish.exit_code) == ("crashed", -1)
    assert node.run.overview().state == "crashed"


def test_a_killed_trainer_whose_server_is_away_leaves_nobody_and_the_next_attempt_sends_it(
    new_node: NewNode, victoria: Victoria, proxy: FaultProxy
) -> None:
    proxy.upstream = victoria.own_url
    remote = Victoria(victoria.server, proxy.url)
    node = new_node(remote.config, finish_timeout=2)
    node.start()
    node.wait_for_rows(20)
    proxy.go_away()
    node.wait_for_rows(20)
    node.kill()
    node.wait_until_alone(BOUND_SECONDS)
    proxy.come_back()
    node.settings["finish_timeout"] = 30
    node.start()
    node.wait_for_rows(20)
    node.finish()
    assert_arrived(node, remote, kills=1)


def test_a_killed_trainer_whose_backend_hangs_leaves_nobody(new_node: NewNode, lines: Lines) -> None:
    lines.file.spoil("write hang")
    node = new_node(lines.config, finish_timeout=2)
    node.start()
    node.wait_for_rows(20)
    node.kill()
    node.wait_until_alone(BOUND_SECONDS)
    lines.file.mend()
    node.sync()
    assert_arrived(node, lines, kills=1)


def test_trainer_and_delivery_killed_and_restarted_again_and_again(
    new_node: NewNode, three: list[Destination]
) -> None:
    kills, moments = 5, random.Random(4)
    node = new_node(*configs(three), init_timeout=2)
    for number in range(kills):
        node.start()
        node.wait_for_rows(10)
        time.sleep(moments.uniform(0.0, 0.5))
        if number % 3 == 0:
            node.kill_delivery()
            node.kill()
        elif number % 3 == 1:
            node.kill()
            time.sleep(moments.uniform(0.0, 0.3))
            node.kill_delivery()
        else:
            node.begin_to_finish()
            time.sleep(moments.uniform(0.0, 0.3))
            node.kill()
    node.start()
    node.wait_for_rows(10)
    node.finish()
    node.wait_until_alone()
    assert_arrived(node, *three, kills=kills)
    assert len(node.run.attempts) == kills + 1
