"""Many nodes in one folder: they start at once, log, and are read meanwhile; nobody waits for anybody."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nodetrack.journal.folder import TrackingFolder
from nodetrack.journal.views import all_rows

NODES, ROWS = 32, 1000

# One starter forks the nodes, because 32 interpreters would be 32 imports.
FLEET = """
    import os, sys
    import nodetrack
    from nodetrack import tracker

    def node(uid):
        os.read(go, 1)
        run = nodetrack.init("fleet", role="miner", uid=uid, dir=sys.argv[1], version="0.1.0")
        for step in range(ROWS):
            run.log({"loss": float(step), "uid": uid}, step)
        run.finish()

    go, start = os.pipe()
    children = []
    for uid in range(NODES):
        child = os.fork()
        if child == 0:
            os.close(start)
            node(uid)
            os._exit(0)
        children.append(child)
    os.close(start)
    sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""

READER = """
    import sys
    from pathlib import Path
    from nodetrack.journal.folder import TrackingFolder
    from nodetrack.journal.views import all_rows
    print("reading", flush=True)
    while True:
        for run in TrackingFolder(Path(sys.argv[1])).runs("fleet"):
            sum(1 for _ in all_rows(run))
"""


def script(text: str) -> str:
    return textwrap.dedent(text).replace("ROWS", str(ROWS)).replace("NODES", str(NODES))


@pytest.mark.slow
@pytest.mark.case("C037")
def test_many_nodes_start_at_once_in_one_folder_while_readers_come_and_are_killed(tmp_path: Path) -> None:
    fleet = subprocess.Popen([sys.executable, "-c", script(FLEET), str(tmp_path)])
    kills = 0
    while fleet.poll() is None:
        with subprocess.Popen(
            [sys.executable, "-c", script(READER), str(tmp_path)], stdout=subprocess.PIPE
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"reading\n"
            time.sleep(0.1)
            reader.kill()
        assert reader.returncode == -signal.SIGKILL, "it read without an error until then"
        kills += 1
    assert fleet.returncode == 0
    assert kills
    runs = TrackingFolder(tmp_path).runs("fleet")
    assert len(runs) == NODES
    for run in runs:
        rows = list(all_rows(run))
        assert [row.step for row in rows] == [*range(ROWS)]
        assert len({row.values["uid"] for row in rows}) == 1
