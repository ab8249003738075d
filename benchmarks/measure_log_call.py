"""One peer's calls beside the yardstick, in one process: run by `log_call.py`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.peers import Peer, Values, open_peer
from benchmarks.processes import answer

WIDTHS: Final = (1, 10, 100)
PERIOD_NS: Final = 5_000_000
#: Calls of one kind in a row; then the other kind has its turn, so that both see the same machine.
_BLOCK: Final = 100
_FULL_SPEED_NS: Final = 450_000_000
_PACED_CALLS: Final = 130
_SETTLE_SECONDS: Final = 0.15
_ROWS: Final = 64

Call = Callable[[Values, int], object]


def main(folder: Path, name: str) -> dict[str, dict[str, list[int]]]:
    """Nanoseconds of each call, by `pace/width`, of the peer and of the yardstick between its calls."""
    peer = open_peer(name, folder)
    yardstick = _yardstick(folder)
    step, samples = 0, {}
    for pace, measure in (("paced", _paced), ("full speed", _full_speed)):
        for width in WIDTHS:
            rows = _rows(width)
            for warm_up in range(_BLOCK):
                peer.log(rows[warm_up % _ROWS], step + warm_up)
            step += _BLOCK
            _settle(peer)
            peer_ns, yardstick_ns = measure(peer.log, yardstick, rows, step)
            step += len(peer_ns)
            samples[f"{pace}/{width}"] = {"peer": peer_ns, "yardstick": yardstick_ns}
    peer.finish()
    return samples


def _yardstick(folder: Path) -> Call:
    """The least that keeps values safe from a kill: one MessagePack encode of them, one write to a file."""
    file = os.open(folder / "yardstick", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    encode, write = msgspec.msgpack.Encoder().encode, os.write

    def call(values: Values, _step: int) -> None:
        write(file, encode([*values.values()]))

    return call


def _rows(width: int) -> list[Values]:
    """Rows that a training loop might log: the same names, other values each time."""
    draw = random.Random(width)
    return [{f"train/metric_{number}": draw.random() for number in range(width)} for _ in range(_ROWS)]


def _full_speed(peer: Call, yardstick: Call, rows: list[Values], step: int) -> tuple[list[int], list[int]]:
    """Blocks of the one and blocks of the other, until the time is up."""
    peer_ns: list[int] = []
    yardstick_ns: list[int] = []
    end = time.perf_counter_ns() + _FULL_SPEED_NS
    while time.perf_counter_ns() < end:
        for _ in range(_BLOCK):
            yardstick_ns.append(_timed(yardstick, rows[len(yardstick_ns) % _ROWS], step))
        for _ in range(_BLOCK):
            peer_ns.append(_timed(peer, rows[len(peer_ns) % _ROWS], step + len(peer_ns)))
    return peer_ns, yardstick_ns


def _paced(peer: Call, yardstick: Call, rows: list[Values], step: int) -> tuple[list[int], list[int]]:
    """One call every 5 ms, the one and the other by turns: between two calls the caches go to others."""
    peer_ns, yardstick_ns = [], []
    due = time.perf_counter_ns()
    for number in range(_PACED_CALLS):
        row = rows[number % _ROWS]
        due = _wait(due)
        yardstick_ns.append(_timed(yardstick, row, step))
        due = _wait(due)
        peer_ns.append(_timed(peer, row, step + number))
    return peer_ns, yardstick_ns


def _timed(call: Call, values: Values, step: int) -> int:
    """Nanoseconds of one call, with what reading the clock costs."""
    began = time.perf_counter_ns()
    call(values, step)
    return time.perf_counter_ns() - began


def _wait(due: int) -> int:
    """Sleep until the next call is due; one that is late is not made up for."""
    due = max(due + PERIOD_NS, time.perf_counter_ns())
    time.sleep(max(0, due - time.perf_counter_ns()) / 1e9)
    return due


def _settle(peer: Peer) -> None:
    """Let the peer's own threads finish what the calls before gave them to do."""
    peer.flush()
    time.sleep(_SETTLE_SECONDS)


if __name__ == "__main__":
    answer(main)
