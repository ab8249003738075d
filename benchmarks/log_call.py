"""What a call of `log` costs the calling thread: `python -m benchmarks.log_call`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Final, NamedTuple

from rich.console import Console

from benchmarks.measure_log_call import WIDTHS
from benchmarks.peers import PEERS, TITLES
from benchmarks.processes import measure
from benchmarks.report import Topic, target

_ROUNDS: Final = 3
_YARDSTICK: Final = "yardstick"
_COLUMNS: Final = ("tracker", "floats", "p50 µs", "p99 µs", "worst ms", "× yardstick", "target")

_METHOD: Final = (
    f"Host floats, on the calling thread. Medians of {_ROUNDS} rounds, the worst call of all; each tracker "
    "has a process of its own. The yardstick is one MessagePack encode of the values and one `os.write`, in "
    "that process between the tracker's calls. wandb is offline, trackio local."
)
_TITLES: Final = {
    "full speed": "`log` at full speed",
    "paced": "`log` at the pace of a training loop: one call every 5 ms",
}


class Cost(NamedTuple):
    """Of the calls of one round: microseconds, and the p50 over the yardstick's in the same process."""

    p50: float
    p99: float
    worst: float
    ratio: float


def topics(console: Console) -> list[Topic]:
    """Both tables: calls one after the other, and calls at the pace of a training loop."""
    costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    for number in range(_ROUNDS):
        for name in PEERS:
            console.print(f"log call, round {number + 1} of {_ROUNDS}: {TITLES[name]}", style="dim")
            for cell, samples in measure("benchmarks.measure_log_call", name).items():
                costs[name, cell].append(_cost(samples["peer"], samples["yardstick"]))
                if name == PEERS[0]:
                    costs[_YARDSTICK, cell].append(_cost(samples["yardstick"], samples["yardstick"]))
    return [_topic(pace, title, costs) for pace, title in _TITLES.items()]


def _cost(samples: list[int], yardstick: list[int]) -> Cost:
    ordered = sorted(samples)
    p50 = statistics.median(ordered)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return Cost(p50 / 1e3, p99 / 1e3, ordered[-1] / 1e3, p50 / statistics.median(yardstick))


def _topic(pace: str, title: str, costs: dict[tuple[str, str], list[Cost]]) -> Topic:
    topic = Topic(title, _METHOD, _COLUMNS if pace == "full speed" else _COLUMNS[:-1])
    names = {_YARDSTICK: _YARDSTICK, **{name: TITLES[name] for name in PEERS}}
    for name, shown in names.items():
        for width in WIDTHS:
            cost = _over_rounds(costs[name, f"{pace}/{width}"])
            goal = [_goal(cost)] if (name, width, pace) == ("nodetrack", 10, "full speed") else []
            topic.add(shown, str(width), *_cells(cost), *goal)
    return topic


def _cells(cost: Cost) -> tuple[str, ...]:
    ratio = f"{cost.ratio:.2f}" if cost.ratio < 10 else f"{cost.ratio:.0f}"
    return f"{cost.p50:.1f}", f"{cost.p99:.1f}", f"{cost.worst / 1e3:.1f}", ratio


def _over_rounds(rounds: list[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.p50 for cost in rounds),
        statistics.median(cost.p99 for cost in rounds),
        max(cost.worst for cost in rounds),
        statistics.median(cost.ratio for cost in rounds),
    )


def _goal(cost: Cost) -> str:
    goals = {"p50": (cost.p50, 5), "p99": (cost.p99, 25), "×": (cost.ratio, 3)}
    return ", ".join(f"{name} {target(value, limit)}" for name, (value, limit) in goals.items())


if __name__ == "__main__":
    for each in topics(Console()):
        each.print(Console())
