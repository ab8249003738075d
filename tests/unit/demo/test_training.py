"""Miners and a validator in one process: what they exchange, what they remember, whom they do not trust."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch

import nodetrack
from nodetrack.demo.checkpoint import Checkpoint
from nodetrack.demo.compression import SparseTensor, decompress
from nodetrack.demo.defaults import DemoHparams
from nodetrack.demo.exchange import Contribution, Exchange
from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.life_line import LifeLine
from nodetrack.demo.miner import Miner
from nodetrack.demo.torch_files import load_tensors, save_atomically
from nodetrack.demo.validator import Validator
from nodetrack.hparams.namespace import create_namespace
from nodetrack.journal.folder import TrackingFolder
from nodetrack.journal.views import ViewRow, current_rows

TINY = {
    "inner_steps": 5,
    "batch_size": 2,
    "sequence_length": 16,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "validator": {"eval_batches": 2, "gather_timeout_seconds": 0.1},
}


def read_contribution(path: Path) -> Contribution:
    return cast("Contribution", load_tensors(path))


@dataclass
class Network:
    """Nodes that share a folder. A node that is asked for again is one that was restarted."""

    path: Path
    life_line: LifeLine

    def __post_init__(self) -> None:
        self.folder = DemoFolder(self.path)
        self.exchange = Exchange(self.folder.exchange)
        self.hparams = create_namespace({**DemoHparams().model_dump(), **TINY})

    def start(self, role: str, uid: int) -> tuple[nodetrack.Run, Path]:
        run = nodetrack.init(project="demo", role=role, uid=uid, version="0.1.1", dir=self.folder.journals)
        return run, self.folder.checkpoint(f"{role}-{uid}")

    def miner(self, uid: int) -> Miner:
        run, checkpoint = self.start("miner", uid)
        return Miner(run, self.hparams, self.exchange, Checkpoint(checkpoint))

    def validator(self) -> Validator:
        run, checkpoint = self.start("validator", 0)
        miners = ["miner-0", "miner-1"]
        return Validator(run, self.hparams, self.exchange, Checkpoint(checkpoint), miners)

    def run_window(self, validator: Validator, *miners: Miner) -> None:
        """One window, the miners one after another."""
        window = validator.next_window
        self.exchange.open_window(window, validator.parameters)
        for miner in miners:
            miner.work(window + 1, self.life_line)
        self.exchange.join("miner-1", "0.1.1")
        validator.work(window + 1, self.life_line)

    def sent(self, miner: str, window: int) -> dict[str, SparseTensor]:
        path = self.exchange.folder / f"window-{window:06d}" / f"{miner}.pt"
        return read_contribution(path)["pseudo_gradient"]

    def contribution(self, miner: str, window: int) -> dict[str, torch.Tensor]:
        return {name: tensor["values"] for name, tensor in self.sent(miner, window).items()}

    def rows(self, node: str) -> list[ViewRow]:
        return current_rows(TrackingFolder(self.folder.journals).find(node, "demo"))


@pytest.fixture
def life_line() -> Iterator[LifeLine]:
    reading, writing = os.pipe()
    yield LifeLine(reading)
    os.close(reading)
    os.close(writing)


@pytest.fixture
def network(tmp_path: Path, life_line: LifeLine) -> Network:
    return Network(tmp_path / "one", life_line)


def restart(node: Miner | Validator) -> None:
    node.run.finish()


def test_a_window_moves_the_parameters_and_scores_each_miner(network: Network) -> None:
    validator = network.validator()
    before = validator.parameters
    network.run_window(validator, network.miner(0), network.miner(1))
    assert validator.next_window == 1
    assert not torch.equal(before["bytes.weight"], validator.parameters["bytes.weight"])
    rows = network.rows("validator-0")
    assert {row.context["miner"] for row in rows if row.context} == {"miner-0", "miner-1"}
    [window] = [row.values for row in rows if not row.context]
    assert window["gather/contributions"] == 2
    loss, bits = window["eval/loss"], window["eval/bits_per_byte"]
    assert isinstance(loss, float)
    assert bits == pytest.approx(loss / math.log(2))


def test_every_inner_step_is_a_row_at_its_own_step(network: Network) -> None:
    validator, miner = network.validator(), network.miner(0)
    network.run_window(validator, miner)
    network.run_window(validator, miner)
    rows = [row for row in network.rows("miner-0") if "train/loss" in row.values]
    assert [row.step for row in rows] == list(range(10))
    assert [row.values["window"] for row in rows] == [0] * 5 + [1] * 5


def test_the_same_seed_makes_the_same_contribution(tmp_path: Path, life_line: LifeLine) -> None:
    sent = []
    for name in ("first", "second"):
        network = Network(tmp_path / name, life_line)
        network.run_window(network.validator(), network.miner(0))
        sent.append(network.contribution("miner-0", 0))
    assert all(torch.equal(sent[0][name], sent[1][name]) for name in sent[0])


def test_a_miner_that_was_killed_in_a_window_takes_it_again_to_the_same_end(
    tmp_path: Path, life_line: LifeLine
) -> None:
    """It comes back from its checkpoint: optimizer, what was not sent, and the place of its tracking."""
    unbroken, broken = Network(tmp_path / "unbroken", life_line), Network(tmp_path / "broken", life_line)
    for network in (unbroken, broken):
        validator, miner = network.validator(), network.miner(0)
        network.run_window(validator, miner)
        if network is broken:
            network.exchange.open_window(1, validator.parameters)
            miner._step(1, 5, next(miner._batches(1)))
            restart(miner)
            miner = network.miner(0)
            assert (miner.next_window, miner.run.step) == (1, 5)
        network.run_window(validator, miner)
    first, second = unbroken.contribution("miner-0", 1), broken.contribution("miner-0", 1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [row.step for row in broken.rows("miner-0")] == [row.step for row in unbroken.rows("miner-0")]


def test_a_restarted_validator_goes_on_where_it_was(network: Network) -> None:
    validator = network.validator()
    network.run_window(validator, network.miner(0))
    restart(validator)
    again = network.validator()
    assert again.next_window == 1
    for name, parameter in validator.parameters.items():
        assert torch.equal(again.parameters[name], parameter)
        assert torch.equal(again.outer.momentum[name], validator.outer.momentum[name])


def test_a_miner_leaves_a_window_that_was_closed_while_it_was_away(network: Network) -> None:
    network.exchange.open_window(0, network.validator().parameters)
    network.exchange.close_window(0)
    miner = network.miner(0)
    miner.work(1, network.life_line)
    assert miner.next_window == 1
    assert network.exchange.contributors(0) == set()


def test_nothing_that_a_miner_learned_is_lost_between_windows(network: Network) -> None:
    """What it sends and what it keeps is what it changed, with what it had kept before."""
    validator, miner = network.validator(), network.miner(0)
    network.run_window(validator, miner)
    before, kept_before = validator.parameters, miner.not_sent
    network.run_window(validator, miner)
    sent = decompress(network.sent("miner-0", 1))
    for name, after in miner.model.named_parameters():
        expected = before[name] - after.detach() + kept_before[name]
        assert torch.allclose(sent[name] + miner.not_sent[name], expected, atol=1e-7)
        assert kept_before[name].any()


@pytest.mark.parametrize("spoil", ["nan", "shape", "garbage"])
def test_a_contribution_that_would_spoil_the_average_is_left_out(network: Network, spoil: str) -> None:
    validator = network.validator()
    network.exchange.open_window(0, validator.parameters)
    for uid in (0, 1):
        network.miner(uid).work(1, network.life_line)
    spoil_file(network.exchange.folder / "window-000000" / "miner-1.pt", spoil)
    validator.work(1, network.life_line)
    [window] = [row.values for row in network.rows("validator-0") if not row.context]
    assert window["gather/contributions"] == 1
    assert all(parameter.isfinite().all() for parameter in validator.parameters.values())


def spoil_file(path: Path, how: str) -> None:
    if how == "garbage":
        path.write_bytes(b"this is no file of tensors")
        return
    contribution = read_contribution(path)
    tensor = contribution["pseudo_gradient"]["norm.weight"]
    if how == "nan":
        tensor["values"][0] = math.nan
    else:
        tensor["shape"] = [99]
    save_atomically(contribution, path)


def test_a_window_without_contributions_moves_nothing(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodetrack.demo.exchange.EMPTY_WINDOW_SECONDS", 0.1)
    monkeypatch.setattr("nodetrack.demo.validator.START_UP_SECONDS", 0.1)
    validator = network.validator()
    before = validator.parameters
    validator.work(1, network.life_line)
    assert validator.parameters is before
    assert validator.next_window == 1


def test_the_learning_rate_warms_up_once_and_over_windows(network: Network) -> None:
    network.hparams.warmup_steps, network.hparams.learning_rate = 8, 0.8
    validator, miner = network.validator(), network.miner(0)
    network.run_window(validator, miner)
    network.run_window(validator, miner)
    rates = [row.values["train/learning_rate"] for row in network.rows("miner-0")]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8])
