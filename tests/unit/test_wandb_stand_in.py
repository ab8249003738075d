"""The run that stands in for W&B's: the same surface, and everything in the journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodetrack import tracker
from nodetrack.wandb_stand_in import StandIn

wandb = pytest.importorskip("wandb")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StandIn]:
    stand_in = StandIn(tracker.init("demo", "miner-3", dir=tmp_path, version="0.1.0"), lambda: None)
    yield stand_in
    stand_in.finish()


def test_every_public_name_of_a_wandb_run_can_be_used(run: StandIn) -> None:
    for name in dir(wandb.Run):
        if not name.startswith("_"):
            getattr(run, name)


def test_a_name_that_no_wandb_run_has_is_an_error(run: StandIn) -> None:
    with pytest.raises(AttributeError, match="lgo"):
        run.lgo({"a": 1})


def test_what_needs_the_service_does_nothing_and_says_so_once(
    run: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert run.log_artifact("model.pt", type="model") is None
    assert [message for message in caplog.messages if "log_artifact" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_what_is_set_on_it_is_set_on_the_journals_run(run: StandIn) -> None:
    run.tags = ("a", "b")
    run.name = "another"
    run.mine = 5
    assert run.nodetrack_run.tags == ("a", "b")
    assert run.nodetrack_run.name == "another"
    assert run.mine == 5


def test_the_module_wandb_is_lent_and_given_back(run: StandIn) -> None:
    before = wandb.log
    run.become_active()
    assert wandb.run is run
    wandb.log({"a": 1})
    wandb.finish()
    assert wandb.run is None
    assert wandb.log is before
    assert run.nodetrack_run.health().logged == 1


def test_a_run_of_someone_else_stays_the_active_one(run: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    other = object()
    monkeypatch.setattr(wandb, "run", other)
    run.become_active()
    assert wandb.run is other
    run.finish()
    assert wandb.run is other


def test_a_block_that_raises_ends_it_as_crashed(tmp_path: Path) -> None:
    ended = []
    stand_in = StandIn(tracker.init("demo", dir=tmp_path), lambda: ended.append(True))
    with pytest.raises(ValueError, match="boom"), stand_in:
        raise ValueError("boom")
    assert stand_in.nodetrack_run.finished
    assert ended == [True]
