"""Measure everything, show it, and keep it in `docs/benchmarks.md`: `make bench`.

With the names of topics (`log_call`, `delivery`, `disk`, `start`) only those are measured and shown, and
nothing is kept.
"""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

from benchmarks import delivery, disk, log_call, start
from benchmarks.processes import ROOT
from benchmarks.report import machine, page, versions

_TOPICS: Final = {
    "log_call": log_call.topics,
    "delivery": delivery.topics,
    "disk": disk.topics,
    "start": start.topics,
}


def main(names: list[str]) -> int:
    """The exit code: 2 for a topic that does not exist."""
    unknown = set(names) - set(_TOPICS)
    if unknown:
        print(
            f"There is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(_TOPICS)}.",
            file=sys.stderr,
        )
        return 2
    console = Console()
    measured = [topic for name in names or _TOPICS for topic in _TOPICS[name](console)]
    console.print(f"\n{machine()}\n{versions()}\n")
    for topic in measured:
        topic.print(console)
    if not names:
        (ROOT / "docs" / "benchmarks.md").write_text(page(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
