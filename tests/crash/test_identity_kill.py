"""SIGKILL while the run id is written: the file holds the old id or the new one, never anything else."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nodetrack.identity.id_file import IdFileState, RunIdFile, TextRunIdFile

KILLS = 40

WRITER = """
    import sys
    from pathlib import Path
    from nodetrack.identity import id_file
    file = getattr(id_file, sys.argv[1])(Path(sys.argv[2]))
    print("ready", flush=True)
    for number in range(int(sys.argv[3]), 10**9):
        run_id = f"run{number:09}"
        if number % 2:
            file.archive(file.read().record.id)
        file.write(id_file.RunIdRecord(run_id, id_file.Fingerprint("p", "miner", "3", "h")))
        print(run_id, flush=True)
"""


@pytest.mark.slow
@pytest.mark.case("C018")
@pytest.mark.parametrize("kind", [RunIdFile, TextRunIdFile])
def test_a_writer_killed_at_any_moment_leaves_the_old_id_or_the_new_one(
    tmp_path: Path, kind: type[RunIdFile]
) -> None:
    path = tmp_path / "ids" / "miner-3.txt"
    moments = random.Random(20)
    acknowledged = "run000000000"
    for _ in range(KILLS):
        told = _killed_writer(kind, path, _number(acknowledged), moments.uniform(0.0, 0.02))
        acknowledged = told[-1] if told else acknowledged
        reading = kind(path).read()
        if not told and reading.state is IdFileState.MISSING:
            continue  # killed before the first write
        assert reading.record is not None, reading.reason
        assert reading.record.id in (acknowledged, f"run{_number(acknowledged) + 1:09}")
        acknowledged = reading.record.id


def _killed_writer(kind: type[RunIdFile], path: Path, first: int, seconds: float) -> list[str]:
    """Runs the writer, kills it `seconds` after it is ready, and returns the ids it had acknowledged."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), kind.__name__, str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(seconds)
        writer.send_signal(signal.SIGKILL)
        lines = writer.stdout.read().splitlines()
    return [line for line in lines if len(line) == len("run000000000")]


def _number(run_id: str) -> int:
    return int(run_id.removeprefix("run"))
