"""`nodetrack demo` where it does not even start: one sentence, exit code 2, nothing left behind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nodetrack.cli.main import app


def demo(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments])


def test_the_knobs_are_in_the_help() -> None:
    result = demo("--help")
    assert result.exit_code == 0
    for knob in (
        "--miners",
        "--windows",
        "--seed",
        "--folder",
        "--local",
        "--hparams-dir",
        "--backends",
        "--json",
    ):
        assert knob in result.output


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = demo("--folder", "run")
    assert result.exit_code == 2
    assert "pip install 'nodetrack[demo]'" in result.stderr
    assert not Path("run").exists()


def test_a_folder_with_something_else_in_it_is_refused() -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep")
    result = demo("--folder", "mine")
    assert (result.exit_code, Path("mine/notes.txt").read_text()) == (2, "keep")
    assert "--folder" in result.stderr


def test_hyper_parameters_that_are_no_demo_are_refused() -> None:
    result = demo("--set", "hidden_size=8192", "--set", "num_hidden_layers=32")
    assert result.exit_code == 2
    assert "million parameters" in result.stderr
    assert not Path("demo-run").exists()


@pytest.mark.parametrize("arguments", [["--windows", "3"], ["--set", "windows=3"], ["--miners", "0"]])
def test_numbers_that_make_no_demo_are_refused(arguments: list[str]) -> None:
    assert demo(*arguments).exit_code == 2


def test_a_backend_that_there_is_not_is_refused_before_anything_starts() -> None:
    result = demo("--backends", "nosuch")
    assert result.exit_code == 2
    assert "There is no backend named 'nosuch'" in result.stderr
    assert not Path("demo-run").exists()
