"""The built-in defaults, the files of this repository, and the page that documents them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nodetrack.errors import HparamsError
from nodetrack.hparams.defaults import Hparams
from nodetrack.hparams.explain import explain_hparams
from nodetrack.hparams.fields import Field, declared_fields

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "hparams.md"
FIELDS = [member for member in declared_fields(Hparams).walk() if isinstance(member, Field)]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: ".".join(field.path))
def test_every_default_is_described_and_keeps_its_own_rule(field: Field) -> None:
    assert field.description
    assert field.default is None or field.broken_rule(field.default) is None


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: ".".join(field.path))
def test_every_default_stands_in_the_documentation(field: Field) -> None:
    key, default = ".".join(field.path), json.dumps(field.default)
    row = f"| `{key}` | `{default}` | {field.unit or ''} | {field.description} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_documentation_names_no_other_default() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Built-in defaults")[2]
    assert re.findall(r"^\| `([^`]+)`", table, re.MULTILINE) == [".".join(field.path) for field in FIELDS]


@pytest.mark.parametrize("local", [False, True])
def test_the_files_of_this_repository_are_beyond_doubt(local: bool) -> None:
    explained = explain_hparams(ROOT, local, strict=True)
    assert explained.messages == ()


def test_the_local_run_is_smaller_than_the_project() -> None:
    project, local = explain_hparams(ROOT).values, explain_hparams(ROOT, True).values
    for key in ("windows", "inner_steps", "hidden_size", "sequence_length", "batch_size"):
        assert isinstance(project[key], int)
        assert isinstance(local[key], int)
        assert local[key] < project[key]  # type: ignore[operator]  # both are int, as just asserted


def test_the_examples_of_the_documentation_say_what_the_code_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages shown on the page are made here from the input they speak of."""
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    Path("hparams.json").write_text('{\n\n"learning_rte": 1,\n"dp_shard": 1}')
    for problem in explain_hparams().problems:
        assert problem.message in page
    Path("hparams.json").write_text("\n" * 6 + '{"batch_size": 16.5}')
    with pytest.raises(HparamsError) as wrong_type:
        explain_hparams()
    assert str(wrong_type.value) in page
    Path("hparams.json").write_text('{\n\n "learning_rate": 1e-3, // was 1e-4\n}')
    with pytest.raises(HparamsError) as comment:
        explain_hparams()
    assert str(comment.value) in page
