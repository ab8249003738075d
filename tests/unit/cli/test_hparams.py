"""`nodetrack hparams show | explain | diff`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from nodetrack.cli.hparams import app

Command = Callable[..., Result]


@pytest.fixture
def hparams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in a folder with a project, a local-run and a size file."""
    for name in [name for name in os.environ if name.startswith("NODETRACK_HPARAMS__")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("hparams.json").write_text('{\n"seed": 5,\n"torchtitan": {"dp_shard": 2}}')
    Path("hparams-local-run.json").write_text('{\n"seed": 6}')
    Path("1b.json").write_text('{"hidden_size": 64}')
    return lambda *arguments: CliRunner().invoke(app, arguments)


def explained(hparams: Command, *arguments: str) -> list[dict[str, Any]]:
    """What `explain --json` says."""
    answer = json.loads(hparams("explain", *arguments, "--json").stdout)
    assert list(answer) == ["hparams"]
    return list(answer["hparams"])


def differences(hparams: Command, *arguments: str) -> list[dict[str, Any]]:
    """What `diff --json` says."""
    answer = json.loads(hparams("diff", *arguments, "--json").stdout)
    assert list(answer) == ["differences"]
    return list(answer["differences"])


def rows(result: Result) -> list[list[str]]:
    """The cells of a printed table, line by line, without its head. Columns begin below their titles."""
    head, _, *lines = [line for line in result.stdout.splitlines() if line.strip()]
    starts = [title.start() for title in re.finditer(r"\S+(?: \S+)*", head)]
    return [[line[a:b].strip() for a, b in pairwise([*starts, None])] for line in lines]


def test_show_prints_every_value_with_unit_and_meaning(hparams: Command) -> None:
    result = hparams("show")
    assert result.exit_code == 0
    assert ["seed", "5", "", "start of every random sequence"] in rows(result)
    assert ["windows", "100", "windows", "exchanges of pseudo-gradients in the whole training"] in rows(
        result
    )


def test_show_json_is_what_a_node_would_have(hparams: Command) -> None:
    values = json.loads(hparams("show", "--json", "--local", "betas=[0.5]", "model_size=1b").stdout)
    assert (values["seed"], values["betas"], values["hidden_size"]) == (6, [0.5], 64)
    assert values["torchtitan"]["dp_shard"] == 2
    assert values["extra"] == {}


def test_show_changed_prints_only_what_differs_from_the_defaults(hparams: Command) -> None:
    result = hparams("show", "--changed", "--json", "windows=100", "gradient_clip=null")
    assert json.loads(result.stdout) == {"seed": 5, "gradient_clip": None, "torchtitan": {"dp_shard": 2}}


def test_explain_prints_file_and_line_and_what_was_overridden(hparams: Command) -> None:
    result = hparams("explain", "seed", "--local")
    assert rows(result) == [
        ["seed", "6", "hparams-local-run.json:2", "5 (hparams.json:2)"],
        ["", "", "", "0 (built-in default)"],
    ]


def test_explain_json_tells_everything_that_is_known(hparams: Command) -> None:
    (told,) = explained(hparams, "torchtitan.dp_shard", "torchtitan.dp_shard=4")
    assert told["key"] == "torchtitan.dp_shard"
    assert (told["value"], told["default"], told["is_changed"], told["is_declared"]) == (4, 1, True, True)
    assert told["origin"]["layer"] == "override"
    assert told["origin"]["source"] == "override torchtitan.dp_shard=4"
    assert told["overridden"] == [
        {
            "value": 2,
            "origin": {
                "layer": "project",
                "source": "hparams.json",
                "path": "hparams.json",
                "line": 3,
                "column": 16,
            },
        },
        {
            "value": 1,
            "origin": {
                "layer": "default",
                "source": "built-in default",
                "path": None,
                "line": None,
                "column": None,
            },
        },
    ]


def test_explain_without_keys_explains_all_and_a_group_explains_its_members(hparams: Command) -> None:
    keys = [told["key"] for told in explained(hparams)]
    assert {"seed", "torchtitan.dp_shard", "extra"} <= set(keys)
    validator = [told["key"] for told in explained(hparams, "validator", "validator")]
    assert validator == [key for key in keys if key.startswith("validator.")]
    assert [told["key"] for told in explained(hparams, "--changed")] == [
        "seed",
        "torchtitan.dp_shard",
    ]


@pytest.mark.case("C066")
def test_an_unknown_key_is_a_warning_and_strictly_exit_code_2(hparams: Command) -> None:
    told = "override learning_rte=1: unknown key 'learning_rte'; did you mean 'learning_rate'?"
    result = hparams("show", "--json", "learning_rte=1")
    assert (result.exit_code, result.stderr) == (0, f"nodetrack: {told}\n")
    assert json.loads(result.stdout)["learning_rte"] == 1
    result = hparams("show", "--strict", "learning_rte=1")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"nodetrack: {told}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["show", "--dir", "gone"],
            "nodetrack: gone is not a folder; pass the one that holds hparams.json.\n",
        ),
        (["show", "seed=x"], 'nodetrack: override seed=x: seed must be a whole number, not "x".\n'),
        (
            ["show", "seed"],
            "nodetrack: Override 'seed' is not of the form key=value, such as torchtitan.dp_shard=2.\n",
        ),
        (["explain", "sede"], "nodetrack: There is no key 'sede'; did you mean 'seed'?\n"),
        (["diff", "gone.json"], "nodetrack: gone.json does not exist; name a folder or a JSON file.\n"),
        (
            ["diff", "old", "new.json"],
            "nodetrack: old and new.json do not exist; name folders or JSON files.\n",
        ),
        (
            ["diff", ".", ".", "."],
            "nodetrack: diff compares one or two folders or files, not 3; name A and B.\n",
        ),
        (["diff", "seed=1"], "nodetrack: diff compares one or two folders or files, not 0; name A and B.\n"),
        (
            ["diff", "hparams.json", "--local"],
            "nodetrack: --local needs a folder, and hparams.json is none; name the file itself.\n",
        ),
    ],
)
def test_an_error_is_one_sentence_on_standard_error_and_exit_code_2(
    hparams: Command, arguments: list[str], message: str
) -> None:
    result = hparams(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message)


def test_diff_shows_what_the_local_run_and_overrides_change(hparams: Command) -> None:
    assert differences(hparams, ".", ".", "--local", "windows=3") == [
        {"key": "seed", "a": 5, "a_origin": "hparams.json:2", "b": 6, "b_origin": "hparams-local-run.json:2"},
        {
            "key": "windows",
            "a": 100,
            "a_origin": "built-in default",
            "b": 3,
            "b_origin": "override windows=3",
        },
    ]


def test_diff_heads_each_side_with_what_it_is(hparams: Command) -> None:
    def head(*arguments: str) -> list[str]:
        return re.split(r"  +", hparams("diff", *arguments).stdout.splitlines()[0].strip())

    here = Path.cwd().name
    assert head(".", ".", "--local", "extra.a=x[b]") == ["key", here, f"{here} --local extra.a=x[b]"]
    assert head(".") == ["key", "built-in defaults", here]
    assert head("1b.json") == ["key", "built-in defaults", "1b.json"]
    Path("sub").mkdir()
    assert head("--dir", "sub", "..") == ["key", "built-in defaults", here]


def test_diff_of_one_side_is_against_the_defaults(hparams: Command) -> None:
    assert [pair["key"] for pair in differences(hparams, ".")] == [
        "seed",
        "torchtitan.dp_shard",
    ]


def test_diff_compares_files_of_any_name_in_the_given_folder(hparams: Command, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.json").write_text('{"extra": {"mine": null, "flag": true}}')
    (tmp_path / "old" / "b.json").write_text('{"extra": {"flag": 1}}')
    assert differences(hparams, "--dir", "old", "a.json", "b.json") == [
        {"key": "extra.mine", "a": None, "a_origin": "old/a.json:1"},
        {"key": "extra.flag", "a": True, "a_origin": "old/a.json:1", "b": 1, "b_origin": "old/b.json:1"},
    ]


def test_diff_prints_a_side_without_the_key_as_none(hparams: Command) -> None:
    result = hparams("diff", ".", ".", "extra.mine=x[bold]")
    assert rows(result)[0] == ["extra.mine", "(none)", '"x[bold]"']


def test_what_no_terminal_can_print_is_printed_as_its_escape(hparams: Command) -> None:
    Path("hparams.json").write_text('{"extra": {"mine": "\\ud800[red]"}}')
    result = hparams("show", "--changed")
    assert result.exit_code == 0
    assert rows(result)[0][1] == '"\\ud800[red]"'


def test_an_object_that_is_empty_on_one_side_is_no_difference_of_its_own(hparams: Command) -> None:
    """What the other side has in it is the difference."""
    assert [pair["key"] for pair in differences(hparams, ".", ".", "extra.mine=1")] == ["extra.mine"]
    Path("a.json").write_text('{"extra": {"deep": {"mine": 1}}}')
    Path("b.json").write_text('{"extra": {"deep": {}}}')
    assert [pair["key"] for pair in differences(hparams, "a.json", "b.json")] == ["extra.deep.mine"]
    assert [pair["key"] for pair in differences(hparams, "b.json")] == ["extra.deep"]


def test_where_nothing_differs_a_sentence_says_so(hparams: Command) -> None:
    Path("hparams.json").write_text("{}")
    for command in ("show", "explain"):
        assert hparams(command, "--changed").stdout == "Every value is the built-in default.\n"
    assert hparams("diff", ".").stdout == "No value differs.\n"
    assert json.loads(hparams("show", "--changed", "--json").stdout) == {}
    assert (explained(hparams, "--changed"), differences(hparams, ".")) == ([], [])


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_secrets_are_masked_wherever_a_value_is_told(hparams: Command, as_json: bool) -> None:
    Path("hparams.json").write_text(
        '{"extra": {"hf_token": "secret-1", "num_tokens": 5, "a": {"name": "API_KEY", "value": "secret-2"}}}'
    )
    json_option = ["--json"] if as_json else []
    for command in (["show"], ["show", "--changed"], ["explain"], ["diff", "."], ["diff", ".", "."]):
        result = hparams(*command, "extra.hf_token=secret-3", "wandb_api_key=secret-4", *json_option)
        assert result.exit_code == 0, result.output
        assert "secret-" not in result.output
        assert "***" in result.stdout
    assert "num_tokens" in hparams("show", *json_option).stdout


def test_the_settings_own_patterns_are_masked_too(hparams: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODETRACK_REDACT", "*_pin")
    (told,) = explained(hparams, "extra.door_pin", "extra.door_pin=4711")
    assert (told["value"], told["origin"]["source"]) == ("***", "override extra.door_pin=***")


def test_secrets_that_differ_are_a_difference(hparams: Command) -> None:
    Path("a.json").write_text('{"extra": {"hf_token": "one"}}')
    Path("b.json").write_text('{"extra": {"hf_token": "two"}}')
    (pair,) = differences(hparams, "a.json", "b.json")
    assert (pair["a"], pair["b"]) == ("***", "***")
