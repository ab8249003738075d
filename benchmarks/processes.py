"""Each measurement has a process of its own, so that no tracker's threads or modules are in another's way."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import quiet_environment

ROOT: Final = Path(__file__).parent.parent
_TIMEOUT_SECONDS: Final = 120


def measure(module: str, *arguments: str) -> Any:  # the JSON that the measuring function returned
    """Call the module's `main(folder, *arguments)` in a new process and a new folder; what it returned."""
    with tempfile.TemporaryDirectory(prefix="nodetrack-benchmark-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, str(answer), *arguments]
        environment = quiet_environment(Path(folder))
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'src'}"
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return json.loads(answer.read_text(encoding="utf-8"))


def answer(main: Callable[..., object]) -> None:
    """In the new process: call `main` with the folder and the arguments, and hand over what it returns."""
    path = Path(sys.argv[1])
    result = main(path.parent, *sys.argv[2:])
    path.write_text(json.dumps(result), encoding="utf-8")
