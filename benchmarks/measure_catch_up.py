"""One million points from a journal to one backend, in one process: run by `delivery.py`."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.processes import answer

ROWS: Final = 100_000
WIDTH: Final = 10
_PROJECT: Final = "benchmark"
#: Written by another process, so that what the sender needs is all that is measured.
_WRITE: Final = f"""
import random, nodetrack
draw = random.Random(1)
rows = [{{f"train/metric_{{number}}": draw.random() for number in range({WIDTH})}} for _ in range(64)]
run = nodetrack.init(project="{_PROJECT}", mode="offline", system_seconds=0, console=False, version="1.0")
for step in range({ROWS}):
    run.log(rows[step % 64], step=step)
run.finish()
"""


def main(folder: Path, kind: str) -> dict[str, float]:
    """Points a second, the process's highest memory, and how many batches it took."""
    subprocess.run([sys.executable, "-c", _WRITE], cwd=folder, check=True, capture_output=True)
    from nodetrack.backends.factory import build_backend, parse_backends
    from nodetrack.delivery.engine import Delivery
    from nodetrack.journal.folder import TrackingFolder

    [run] = TrackingFolder(folder / ".nodetrack").runs()
    options: dict[str, object] = {"kind": kind}
    if kind == "influxdb":  # a server keeps one point of those with the same tags and time
        options["bucket"] = f"round-{random.getrandbits(32)}"
    [config] = parse_backends([options]).values()
    batches = 0

    def count(_: object) -> None:
        nonlocal batches
        batches += 1

    delivery = Delivery(run.folder, _PROJECT, {kind: build_backend(config)}, follow=False, changed=count)
    began = time.perf_counter()
    delivery.start()
    delivery.join()
    seconds = time.perf_counter() - began
    [status] = delivery.statuses().values()
    if status.delivered != ROWS:
        raise RuntimeError(f"{status.delivered} of {ROWS} rows arrived: {status.error}")
    return {
        "points_per_second": ROWS * WIDTH / seconds,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "batches": batches - 2,  # one was told when it was opened, one when it was done
    }


if __name__ == "__main__":
    answer(main)
