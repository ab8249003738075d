"""The demo clears what a demo made, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nodetrack.demo.folder import MARKER, DemoFolder
from nodetrack.errors import DemoError


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "a" / "b")
    assert not folder.prepare()
    assert [file.name for file in folder.path.iterdir()] == [".nodetrack-demo"]


def prepared_by(process: subprocess.Popen[bytes], path: Path) -> DemoFolder:
    """A folder as another process's demo would have left it."""
    folder = DemoFolder(path)
    folder.prepare()
    (path / MARKER).write_text(f"{process.pid} {psutil.Process(process.pid).create_time()}\n")
    folder.journals.mkdir()
    return folder


def test_an_earlier_demo_is_cleared_away_and_that_is_told(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        folder = prepared_by(process, tmp_path / "demo")
    assert folder.prepare()
    assert not folder.journals.exists()


def test_a_demo_that_is_still_running_is_not_cleared_away(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        folder = prepared_by(process, tmp_path / "demo")
        with pytest.raises(DemoError, match=f"process {process.pid}"):
            folder.prepare()
    assert folder.journals.exists()


def test_somebody_elses_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DemoError, match="--folder"):
        DemoFolder(tmp_path).prepare()
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("a file")
    with pytest.raises(DemoError, match="--folder"):
        DemoFolder(tmp_path / "demo").prepare()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert not DemoFolder(tmp_path).prepare()


def test_the_documentation_names_every_place_in_the_folder() -> None:
    page = (Path(__file__).parents[3] / "docs" / "demo.md").read_text(encoding="utf-8")
    folder = DemoFolder(Path("demo-run"))
    places = [folder.journals, folder.exchange, folder.checkpoint("n").parent, folder.output("n", 1).parent]
    for place in [*places, folder.hparams, folder.path / MARKER]:
        assert f"\n  {place.name}" in page
