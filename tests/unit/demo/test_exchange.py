"""The shared folder: whole files only, a deadline that a dead miner cannot move, and no looking back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nodetrack.demo.exchange import Contribution, Exchange
from nodetrack.demo.life_line import LifeLine

PARAMETERS = {"weight": torch.arange(4.0)}


@pytest.fixture
def exchange(tmp_path: Path) -> Exchange:
    return Exchange(tmp_path / "exchange")


@pytest.fixture
def life_line() -> Iterator[LifeLine]:
    """A life line that stays whole."""
    reading, writing = os.pipe()
    yield LifeLine(reading)
    os.close(reading)
    os.close(writing)


def contribution(miner: str, window: int) -> Contribution:
    return Contribution(miner=miner, window=window, version="0.1.0", pseudo_gradient={})


def gathered(exchange: Exchange, window: int, life_line: LifeLine, patience: float = 0.2) -> list[str]:
    miners = ["miner-0", "miner-1"]
    return [item["miner"] for item in exchange.gather(window, miners, patience, life_line)]


def test_an_opened_window_gives_its_parameters_to_everyone(exchange: Exchange) -> None:
    assert exchange.newest_window() is None
    exchange.open_window(3, PARAMETERS)
    assert exchange.newest_window() == 3
    assert torch.equal(exchange.parameters(3)["weight"], PARAMETERS["weight"])


def test_contributions_are_gathered_in_the_order_of_names(exchange: Exchange, life_line: LifeLine) -> None:
    exchange.open_window(0, PARAMETERS)
    assert exchange.contribute(contribution("miner-1", 0))
    assert exchange.contribute(contribution("miner-0", 0))
    assert gathered(exchange, 0, life_line, patience=60) == ["miner-0", "miner-1"]


def test_a_dead_miner_does_not_hold_up_the_window(exchange: Exchange, life_line: LifeLine) -> None:
    exchange.open_window(0, PARAMETERS)
    exchange.contribute(contribution("miner-0", 0))
    assert gathered(exchange, 0, life_line) == ["miner-0"]


def test_a_miner_within_the_deadline_is_waited_for(exchange: Exchange, life_line: LifeLine) -> None:
    exchange.open_window(0, PARAMETERS)
    exchange.contribute(contribution("miner-0", 0))
    other = threading.Timer(0.3, exchange.contribute, [contribution("miner-1", 0)])
    other.start()
    assert gathered(exchange, 0, life_line, patience=60) == ["miner-0", "miner-1"]
    other.join()


def test_a_window_that_nobody_contributes_to_is_gathered_empty(
    exchange: Exchange, life_line: LifeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodetrack.demo.exchange.EMPTY_WINDOW_SECONDS", 0.1)
    exchange.open_window(0, PARAMETERS)
    assert gathered(exchange, 0, life_line) == []


def test_a_contribution_to_a_closed_window_is_late_and_never_read(
    exchange: Exchange, life_line: LifeLine
) -> None:
    exchange.open_window(0, PARAMETERS)
    exchange.close_window(0)
    assert not exchange.contribute(contribution("miner-0", 0))
    exchange.open_window(1, PARAMETERS)
    exchange.contribute(contribution("miner-1", 1))
    assert gathered(exchange, 1, life_line) == ["miner-1"]


def test_a_stranger_in_the_folder_is_not_gathered(exchange: Exchange, life_line: LifeLine) -> None:
    exchange.open_window(0, PARAMETERS)
    exchange.contribute(contribution("miner-0", 0))
    exchange.contribute(contribution("miner-9", 0))
    assert gathered(exchange, 0, life_line) == ["miner-0"]


def test_a_file_that_names_another_window_is_left_out(exchange: Exchange, life_line: LifeLine) -> None:
    exchange.open_window(0, PARAMETERS)
    exchange.contribute(contribution("miner-0", 0))
    exchange.open_window(1, PARAMETERS)
    earlier = exchange.folder / "window-000000" / "miner-0.pt"
    (exchange.folder / "window-000001" / "miner-0.pt").write_bytes(earlier.read_bytes())
    assert gathered(exchange, 1, life_line) == []


def test_a_reader_never_sees_half_a_file(exchange: Exchange) -> None:
    """One thread publishes the same window over and over while another reads it."""
    large = {"weight": torch.zeros(200_000)}
    exchange.open_window(0, large)
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            exchange.open_window(0, large)

    writer = threading.Thread(target=publish)
    writer.start()
    try:
        for _ in range(50):
            assert exchange.parameters(0)["weight"].shape == (200_000,)
    finally:
        stop.set()
        writer.join()


def test_an_unfinished_file_counts_as_nothing(exchange: Exchange) -> None:
    """What a miner leaves that was killed while writing."""
    exchange.open_window(0, PARAMETERS)
    (exchange.folder / "window-000000" / ".miner-0.pt.4711").write_bytes(b"half")
    assert exchange.contributors(0) == set()


def test_gathering_ends_at_once_when_the_life_line_is_cut(exchange: Exchange) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    exchange.open_window(0, PARAMETERS)
    began = time.monotonic()
    assert exchange.gather(0, ["miner-0"], 60.0, LifeLine(reading)) == []
    assert time.monotonic() - began < 60.0
    os.close(reading)


def test_waiting_for_nodes_asks_for_their_version(exchange: Exchange, life_line: LifeLine) -> None:
    exchange.join("miner-0", "0.1.0")
    exchange.join("miner-1", "0.1.1")
    nodes = ["miner-0", "miner-1"]
    assert exchange.wait_for_nodes(nodes, "0.1.1", 0.1, life_line) == {"miner-1"}
    exchange.join("miner-0", "0.1.1")
    assert exchange.wait_for_nodes(nodes, "0.1.1", 60.0, life_line) == set(nodes)


def test_forgotten_windows_keep_no_tensors(exchange: Exchange) -> None:
    for window in range(3):
        exchange.open_window(window, PARAMETERS)
    exchange.forget_before(2)
    assert [path.parent.name for path in exchange.folder.glob("*/*.pt")] == ["window-000002"]
