"""A node as a process: it ends when asked, also when deaf, and its failure is told with its last words."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.nodes import NodeProcess, stop_all
from nodetrack.errors import DemoNodeError

OBEDIENT = "import sys; print('ready', flush=True); sys.stdin.read()"
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('ready', flush=True); time.sleep(600)"
)
StartNode = Callable[[str], NodeProcess]


@pytest.fixture
def start_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartNode]:
    """Starts a node that runs the given code instead of training."""
    started = []

    def start(code: str) -> NodeProcess:
        monkeypatch.setattr(NodeProcess, "_command", lambda *_: [sys.executable, "-c", code])
        node = NodeProcess("miner", 0, 1, DemoFolder(tmp_path))
        node.start("0.1.0", 1)
        started.append(node)
        return node

    yield start
    for node in started:
        node.kill()
        node.cut_life_line()


def wait_for(node: NodeProcess, text: str) -> None:
    while text not in node.output.read_text():
        node.check()
        time.sleep(0.01)


def test_a_node_ends_by_itself_when_its_life_line_is_cut(start_node: StartNode) -> None:
    node = start_node(OBEDIENT)
    wait_for(node, "ready")
    assert node.is_running
    stop_all([node])
    assert node.exit_code == 0


def test_a_node_that_does_not_listen_is_killed_in_the_end(start_node: StartNode) -> None:
    node = start_node(DEAF)
    wait_for(node, "ready")
    node.cut_life_line()
    node.wait_or_end(0.2)
    assert node.exit_code == -9


def test_a_failed_node_is_named_with_the_last_it_said(start_node: StartNode) -> None:
    node = start_node("print('all is well', flush=True); raise ValueError('but this')")
    node.wait_or_end(30.0)
    with pytest.raises(DemoNodeError, match="but this") as raised:
        node.check()
    assert (raised.value.node, raised.value.exit_code) == ("miner-0", 1)
    assert str(node.output) in str(raised.value)


def test_a_node_that_was_killed_on_purpose_has_not_failed(start_node: StartNode) -> None:
    node = start_node(OBEDIENT)
    node.kill()
    node.check()
    assert not node.is_running


def test_each_start_has_an_output_of_its_own(start_node: StartNode) -> None:
    node = start_node(OBEDIENT)
    first = node.output
    stop_all([node])
    node.start("0.1.1", 1)
    assert node.output != first
    assert first.exists()


def test_ctrl_c_on_the_terminal_does_not_reach_a_node(start_node: StartNode) -> None:
    """It is in a session of its own."""
    node = start_node(OBEDIENT)
    assert node._process is not None
    assert os.getsid(node._process.pid) != os.getsid(0)


def test_what_is_meant_for_one_run_is_not_handed_to_all(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NODETRACK_ID would otherwise make all nodes the same run."""
    monkeypatch.setenv("NODETRACK_ID", "onerun")
    monkeypatch.setenv("NODETRACK_TEST_KEPT", "kept")
    node = start_node("import os; print(os.environ.get('NODETRACK_ID'), os.environ['NODETRACK_TEST_KEPT'])")
    node.wait_or_end(30.0)
    assert node.last_lines() == "None kept"


def test_a_node_is_told_by_its_environment_where_to_deliver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the demo's own environment says: that was taken into account when the backends were chosen."""
    monkeypatch.setenv("NODETRACK_BACKENDS", "wandb")
    code = "import os; print(os.environ['NODETRACK_BACKENDS'], flush=True)"
    monkeypatch.setattr(NodeProcess, "_command", lambda *_: [sys.executable, "-c", code])
    for backends, told in (((), "[]"), (("log", {"kind": "null"}), '["log", {"kind": "null"}]')):
        node = NodeProcess("miner", 0, 1, DemoFolder(tmp_path), backends)
        node.start("0.1.0", 1)
        stop_all([node])
        assert node.output.read_text().strip() == told
