"""The example plug-in, really installed: into a folder of its own, which child processes find too.

`tests/conftest.py` gives the fixture `jsonlines` to all tests.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nodetrack.backends import factory

SOURCE = Path(__file__).parent.parent / "plugin_example"


@dataclass
class Jsonlines:
    """One file that the plug-in writes, and the control file that spoils its calls."""

    path: Path

    @property
    def config(self) -> dict[str, object]:
        """What goes into `init(backends=[...])`."""
        return {"kind": "jsonlines", "path": str(self.path)}

    @property
    def control(self) -> Path:
        return self.path.with_name(f"{self.path.name}.control")

    def spoil(self, *faults: str) -> None:
        """From now on calls fail as the lines say, such as `write unavailable 2`; see the plug-in's table.
        The file is replaced in one instant: a running process sees the old faults or the new.
        """
        whole = self.control.with_name(f"{self.control.name}.new")
        whole.write_text("".join(f"{fault}\n" for fault in faults), encoding="utf-8")
        whole.replace(self.control)

    def mend(self) -> None:
        """From now on all calls work."""
        self.control.unlink(missing_ok=True)

    def lines(self) -> list[dict[str, object]]:
        """All records as they came, repeats included."""
        lines: list[dict[str, object]] = importlib.import_module("nodetrack_jsonlines").read_lines(self.path)
        return lines

    def rows(self) -> list[dict[str, object]]:
        """The rows, each once, in the order in which they first came."""
        first: dict[tuple[object, ...], dict[str, object]] = {}
        for line in self.lines():
            if line["record"] == "Row":
                first.setdefault(tuple(line[key] for key in ("run", "attempt", "segment", "offset")), line)
        return list(first.values())


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the plug-in into, with its metadata. Needs no network."""
    folder = tmp_path_factory.mktemp("plugin")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    how = ("--no-deps", "--no-build-isolation", "--no-index", "--target")
    done = subprocess.run(
        [*pip, "install", *how, str(folder), str(SOURCE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def jsonlines(plugin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jsonlines]:
    """The plug-in as a backend that this process and its children know; a file for it to write."""
    monkeypatch.syspath_prepend(str(plugin_folder))
    on_path = [str(plugin_folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(on_path))
    factory._plug_ins.cache_clear()
    yield Jsonlines(tmp_path / "lines.jsonl")
    factory._plug_ins.cache_clear()
    sys.modules.pop("nodetrack_jsonlines", None)
