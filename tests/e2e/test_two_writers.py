"""Two nodes, and forked children of both, log to one run at once: nobody's rows replace anybody's."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tests.servers.plugin import Jsonlines

from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.records import Row

SECONDS = 60
#: A node of the run "shared" that does as it is told, a line at a time, and says when it is done.
NODE = """
import json, os, sys, warnings
import nodetrack
uid, backends = sys.argv[1], json.loads(sys.argv[2])
run = nodetrack.init("p", role="miner", uid=uid, id="shared", version="1.0.0", quiet=True, console=False,
                     init_timeout=2, finish_timeout=50, backends=backends)
def log(first, last, name):
    for step in range(int(first), int(last)):
        run.log({name: step, "loss": step / 2}, step=step)
def fork(first, last):
    child = os.fork()
    if child == 0:
        log(first, last, f"child/{uid}")
        run.finish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
def finish():
    run.finish()
    print(json.dumps([run.health().warnings, run.health().backends["jsonlines"].pending]), flush=True)
    sys.exit()
print("ready", flush=True)
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "log":
        log(*arguments, f"node/{uid}")
    elif command == "fork":
        fork(*arguments)
    else:
        finish()
    print("done", flush=True)
"""


class Node:
    """One start of a node, in a process of its own."""

    def __init__(self, uid: int, backends: list[object]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, str(uid), json.dumps(backends)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def log(self, first: int, last: int) -> None:
        """Steps `first` to `last` - 1."""
        assert self._ask(f"log {first} {last}") == "done"

    def fork(self, first: int, last: int) -> None:
        """The same steps, logged by a forked child."""
        assert self._ask(f"fork {first} {last}") == "done"

    def finish(self) -> tuple[list[str], int]:
        """What was warned of, and how many rows of this process jsonlines still lacks."""
        warnings, pending = json.loads(self._ask("finish"))
        assert self.process.wait(SECONDS) == 0
        return warnings, pending

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().strip()
        assert answer or self.process.stderr is None, self.process.stderr.read()
        return answer


@pytest.fixture
def node(jsonlines: Jsonlines) -> Iterator[Callable[[int], Node]]:
    """Starts nodes of one run, which both deliver to the same places."""
    nodes: list[Node] = []

    def start(uid: int) -> Node:
        nodes.append(Node(uid, [jsonlines.config, {"kind": "tensorboard", "log_dir": "logs"}]))
        return nodes[-1]

    yield start
    for each in nodes:
        each.end()


def journal() -> RunFolder:
    [run] = TrackingFolder(Path(".nodetrack")).runs("p")
    assert run.id == "shared"
    return run


def in_journal() -> Counter[tuple[str, int]]:
    """By whose metric and step, over all attempts."""
    return Counter(
        (name, row.step)
        for attempt in journal().attempts
        for row in attempt.records()
        if isinstance(row, Row)
        for name in row.names
        if name != "loss"
    )


def at_jsonlines(jsonlines: Jsonlines) -> Counter[tuple[str, int]]:
    """The same of all lines that the backend was ever given."""
    return Counter(
        (name, line["step"])
        for line in jsonlines.lines()
        if line["record"] == "Row"
        for name in line["names"]
        if name != "loss"
    )


def in_tensorboard() -> Counter[tuple[str, int]]:
    """The same of what TensorBoard's own reader finds below its root."""
    reader = EventMultiplexer(size_guidance={"scalars": 0}).AddRunsFromDirectory("logs").Reload()
    return Counter(
        (tag.removeprefix("v1.0.0/"), event.step)
        for name, kinds in reader.Runs().items()
        for tag in kinds["scalars"]
        if tag.startswith(("v1.0.0/node/", "v1.0.0/child/"))
        for event in reader.Scalars(name, tag)
    )


def expected(**ranges: range) -> Counter[tuple[str, int]]:
    """`node_1=range(9)`: the rows of node 1."""
    return Counter((name.replace("_", "/"), step) for name, steps in ranges.items() for step in steps)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


@pytest.mark.case("C041")
@pytest.mark.timeout(240)
def test_two_nodes_on_one_run_replace_nothing_of_each_other(
    node: Callable[[int], Node], jsonlines: Jsonlines
) -> None:
    """Interleaved, both restarted once, both with forked children; the counts of every writer are exact."""
    first = node(1)
    first.log(0, 20)
    second = node(2)
    for turn in range(3):
        second.log(turn * 2, turn * 2 + 2)
        first.log(20 + turn * 10, 30 + turn * 10)
    second.fork(0, 5)
    first.fork(0, 7)
    now = expected(node_1=range(50), node_2=range(6), child_1=range(7), child_2=range(5))
    wait_for(lambda: at_jsonlines(jsonlines) == now)  # also what the second node has, while the first lives
    first.finish()
    first = node(1)
    first.log(50, 75)
    second.log(6, 8)
    wait_for(lambda: at_jsonlines(jsonlines)["node/1", 74] == at_jsonlines(jsonlines)["node/2", 7] == 1)
    second.finish()
    second = node(2)
    second.log(8, 9)
    first.log(75, 100)
    second.log(9, 10)
    second.fork(5, 9)
    first.fork(7, 10)
    first.finish()
    second.finish()
    everything = expected(node_1=range(100), node_2=range(10), child_1=range(10), child_2=range(9))
    assert in_journal() == everything
    assert at_jsonlines(jsonlines) == everything
    assert in_tensorboard() == everything
    ends = [(attempt.facts["uid"], attempt.finish_record()) for attempt in journal().attempts]
    assert [(uid, end is not None and end.state) for uid, end in ends] == [
        (uid, "finished") for uid in ("1", "2", "1", "2")
    ]


@pytest.mark.case("C041")
def test_a_node_that_ends_while_the_other_sends_for_both_leaves_nothing_and_says_nothing(
    node: Callable[[int], Node], jsonlines: Jsonlines
) -> None:
    first = node(1)
    second = node(2)
    first.log(0, 3)
    second.log(0, 30)
    warnings, pending = second.finish()
    assert pending == 0
    assert not [warning for warning in warnings if "before all of it was sent" in warning]
    assert at_jsonlines(jsonlines) == expected(node_1=range(3), node_2=range(30))
    first.log(3, 5)
    first.finish()
    assert at_jsonlines(jsonlines) == expected(node_1=range(5), node_2=range(30)) == in_tensorboard()


@pytest.mark.case("C041")
def test_when_the_node_that_sends_is_killed_the_other_goes_on(
    node: Callable[[int], Node], jsonlines: Jsonlines
) -> None:
    """Its rows are sent first, by its own delivery process; then the other's takes over."""
    first = node(1)
    second = node(2)
    first.log(0, 50)
    first.process.kill()
    second.log(0, 5)
    everything = expected(node_1=range(50), node_2=range(5))
    wait_for(lambda: at_jsonlines(jsonlines) == everything)
    second.log(5, 8)
    everything += expected(node_2=range(5, 8))
    wait_for(lambda: at_jsonlines(jsonlines) == everything)
    second.finish()
    assert in_journal() == everything == in_tensorboard()
