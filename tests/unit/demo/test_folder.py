"""The demo clears what a demo made, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodetrack.demo.folder import DemoFolder
from nodetrack.errors import DemoError


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "a" / "b")
    assert not folder.prepare()
    assert [file.name for file in folder.path.iterdir()] == [".nodetrack-demo"]


def test_an_earlier_demo_is_cleared_away_and_that_is_told(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "demo")
    folder.prepare()
    folder.journals.mkdir()
    assert folder.prepare()
    assert not folder.journals.exists()


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
