"""What `nodetrack sync` brings in by hand: in any order, any number of times, from wherever the folder is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.bad_days.conftest import NewNode
from tests.bad_days.destinations import Influx, Lines, Mlflow, Tensorboard
from tests.bad_days.node import Destination, Node, assert_arrived, encoded


@pytest.fixture
def everywhere(lines: Lines, influx: Influx, tensorboard: Tensorboard, mlflow: Mlflow) -> list[Destination]:
    """One destination of each kind."""
    return [lines, influx, tensorboard, mlflow]


def offline_node(new_node: NewNode, attempts: int) -> Node:
    node = new_node(mode="offline")
    for _ in range(attempts):
        node.start()
        node.wait_for_rows(25)
        node.finish()
    return node


@pytest.mark.case("C032")
@pytest.mark.case("C033")
def test_four_offline_attempts_in_another_order_and_each_twice(
    new_node: NewNode, everywhere: list[Destination]
) -> None:
    node = offline_node(new_node, 4)
    backends = encoded([destination.config for destination in everywhere])
    twice = [attempt for attempt in ("3", "1", "4", "2") for _ in range(2)]
    node.sync(*(["--attempt", attempt, "--backends", backends] for attempt in twice))
    assert_arrived(node, *everywhere)
    for destination in everywhere:
        assert max(destination.rows(node.run_id).values()) == 1, "what was sent is not sent again"


def test_a_folder_that_was_copied_to_another_machine_is_synced_there(
    new_node: NewNode, everywhere: list[Destination], tmp_path: Path
) -> None:
    """Another home, another working folder, and the place where it was logged is gone."""
    node = offline_node(new_node, 2)
    elsewhere, home = tmp_path / "elsewhere", tmp_path / "home"
    elsewhere.mkdir()
    home.mkdir()
    shutil.copytree(node.tracking, elsewhere / "copied")
    node.tracking.rename(tmp_path / "gone")
    backends = encoded([destination.config for destination in everywhere])
    node.sync(["--dir", "copied", "--backends", backends], cwd=elsewhere, HOME=str(home))
    assert_arrived(node, *everywhere)


def test_two_machines_with_a_copy_each_send_all_of_it(
    new_node: NewNode, everywhere: list[Destination], tmp_path: Path
) -> None:
    """The second has no cursor, so it sends everything again, in another order."""
    node = offline_node(new_node, 3)
    shutil.copytree(node.tracking, tmp_path / "copied")
    to_all = ["--backends", encoded([destination.config for destination in everywhere])]
    there = ["--dir", str(tmp_path / "copied"), *to_all]
    node.sync(to_all, [*there, "--attempt", "3"], there)
    assert_arrived(node, *everywhere)
