"""The demo knows of its nodes what their journals say, while they write them."""

from __future__ import annotations

from pathlib import Path

import nodetrack
from nodetrack.demo.watch import JournalWatch


def start(folder: Path) -> nodetrack.Run:
    return nodetrack.init(project="demo", role="miner", uid=1, version="0.1.0", dir=folder)


def test_before_its_first_attempt_nothing_is_known_of_a_node(tmp_path: Path) -> None:
    watch = JournalWatch(tmp_path / "nowhere", "demo", "miner-1")
    assert watch.look() == []
    assert (watch.attempts, watch.step, watch.window) == (0, None, None)


def test_each_look_gives_what_is_new_while_the_node_runs(tmp_path: Path) -> None:
    watch = JournalWatch(tmp_path, "demo", "miner-1")
    run = start(tmp_path)
    run.log({"train/loss": 3.0, "window": 0}, step=4)
    assert [row.step for row in watch.look()] == [4]
    assert watch.look() == []
    run.log({"train/loss": 2.5, "window": 1}, step=5)
    assert [row.step for row in watch.look()] == [5]
    assert (watch.window, watch.step, watch.metric("train/loss")) == (1, 5, 2.5)
    run.finish()


def test_a_restarted_node_is_followed_into_its_next_attempt(tmp_path: Path) -> None:
    watch = JournalWatch(tmp_path, "demo", "miner-1")
    for step in (1, 2):
        run = start(tmp_path)
        run.log({"train/loss": 1.0}, step=step)
        run.finish()
        assert [row.step for row in watch.look()] == [step]
    assert watch.attempts == 2


def test_a_row_about_one_miner_is_not_taken_for_the_nodes_own(tmp_path: Path) -> None:
    watch = JournalWatch(tmp_path, "demo", "miner-1")
    run = start(tmp_path)
    run.log({"score": 1.0}, step=1)
    run.bind(miner="miner-0").log({"score": 9.0}, step=1)
    watch.look()
    assert watch.metric("score") == 1.0
    run.finish()
