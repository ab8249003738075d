"""The text: real, the same everywhere, and split so that nothing held out is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodetrack.demo.corpus import is_held_out, load_corpus
from nodetrack.errors import DemoError


def test_no_held_out_file_is_trained_on() -> None:
    corpus = load_corpus()
    assert set(corpus.train_files).isdisjoint(corpus.held_out_files)
    assert "calendar.py" in corpus.held_out_files
    assert "abc.py" in corpus.train_files


def test_the_standard_library_is_enough_text_on_both_sides() -> None:
    corpus = load_corpus()
    assert len(corpus.train) > 1_000_000
    assert len(corpus.held_out) > 100_000


def test_the_same_text_comes_out_every_time_in_the_order_of_names() -> None:
    first, second = load_corpus(), load_corpus()
    assert first == second
    assert list(first.train_files) == sorted(first.train_files)


def test_a_new_module_moves_no_other_file_to_the_other_side(tmp_path: Path) -> None:
    """The side depends on the name alone."""
    for name in ("calendar.py", "abc.py"):
        (tmp_path / name).write_text(f"# {name}")
    before = load_corpus(tmp_path)
    (tmp_path / "aaa_new.py").write_text("# new")
    after = load_corpus(tmp_path)
    assert before.held_out == after.held_out == b"# calendar.py"
    assert set(before.train_files) < set(after.train_files)


def test_about_a_tenth_is_held_out() -> None:
    names = [f"module_{number}.py" for number in range(2000)]
    assert 0.07 < sum(map(is_held_out, names)) / len(names) < 0.13


def test_a_python_without_sources_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=str(tmp_path)):
        load_corpus(tmp_path)
