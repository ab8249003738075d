"""How long `init` and `finish` take where a server does not answer: run by `delivery.py`."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.processes import answer


def main(folder: Path, url: str, finish_timeout: str) -> dict[str, float]:
    """Seconds of both calls."""
    import nodetrack

    began = time.perf_counter()
    run = nodetrack.init(
        project="benchmark",
        dir=folder / ".nodetrack",
        backends=[{"kind": "influxdb", "url": url}],
        finish_timeout=float(finish_timeout),
    )
    started = time.perf_counter()
    for step in range(1000):
        run.log({"loss": 0.5}, step=step)
    logged = time.perf_counter()
    run.finish()
    return {"init": started - began, "finish": time.perf_counter() - logged}


if __name__ == "__main__":
    answer(main)
