"""`nodetrack env`: what a launched job needs, and no value unless it is asked for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nodetrack.backends import factory

if TYPE_CHECKING:
    from tests.servers.plugin import Jsonlines

    from conftest import Lab

SECRET = "it's a $ecret"


@pytest.fixture
def chosen(jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in is the backend, with a token inside its options and one in the environment."""
    monkeypatch.setenv("JSONLINES_TOKEN", SECRET)
    options = {**jsonlines.config, "token": "inline"}
    monkeypatch.setenv("NODETRACK_BACKENDS", json.dumps(["tensorboard", options]))


@pytest.mark.usefixtures("chosen")
def test_the_variables_of_the_chosen_backends_are_named_without_a_value(lab: Lab) -> None:
    out = lab.out("env")
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["NODETRACK_BACKENDS", "all", "backends", "set"],
        ["JSONLINES_TOKEN", "jsonlines", "set"],
    ]
    for text in (out, lab.out("env", "--json")):
        assert SECRET not in text
        assert "inline" not in text


@pytest.mark.usefixtures("chosen")
def test_with_show_a_shell_takes_the_lines(lab: Lab) -> None:
    """Values that hold quotes and dollars included."""
    script = f'{lab.out("env", "--show")}\nprintf \'%s\\n\' "$JSONLINES_TOKEN" "$NODETRACK_BACKENDS"'
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    token, backends = done.stdout.splitlines()
    assert token == SECRET
    assert json.loads(backends)[1]["token"] == "inline"


@pytest.mark.usefixtures("jsonlines")
def test_what_is_not_set_is_said_and_left_out_of_the_lines(lab: Lab) -> None:
    result = lab.run("env", "--show", "--backends", '["wandb"]')
    assert result.stdout == "export NODETRACK_BACKENDS=wandb\n"
    assert "nodetrack: Not set here: WANDB_API_KEY" in result.stderr
    assert ["WANDB_API_KEY", "wandb", "not", "set"] in [
        line.split() for line in lab.out("env", "--backends", "wandb").splitlines()
    ]


def test_json_has_each_variable_once_with_its_backend(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key")
    hidden, shown = (
        {
            entry["name"]: entry
            for entry in lab.json("env", "--backends", "wandb", "--json", *more)["variables"]
        }
        for more in ((), ("--show",))
    )
    assert hidden["WANDB_API_KEY"] == {
        "name": "WANDB_API_KEY",
        "backend": "wandb",
        "set": True,
        "value": None,
    }
    assert shown["WANDB_API_KEY"]["value"] == "key"
    assert shown["NODETRACK_BACKENDS"] == {
        "name": "NODETRACK_BACKENDS",
        "backend": None,
        "set": True,
        "value": "wandb",
    }


def test_what_stands_in_dotenv_counts_and_the_environment_wins(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(".env").write_text("WANDB_API_KEY=dotenv\nWANDB_ENTITY=dotenv\nOTHER=1\n")
    monkeypatch.setenv("WANDB_ENTITY", "environment")
    lines = lab.out("env", "--backends", "wandb", "--show").splitlines()
    assert lines[1:] == ["export WANDB_API_KEY=dotenv", "export WANDB_ENTITY=environment"]


def test_neither_options_nor_an_sdk_are_needed(
    lab: Lab, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that launches a job need not be one that could log."""
    monkeypatch.setattr(factory, "find_spec", lambda name: None)
    assert jsonlines.path  # the plug-in needs its option `path`
    lines = lab.out("env", "--backends", "aim,mlflow,wandb,jsonlines").splitlines()[2:]
    assert {line.split()[0] for line in lines} >= {"WANDB_API_KEY", "MLFLOW_TRACKING_URI", "JSONLINES_TOKEN"}


def test_a_name_stands_for_the_options_of_the_settings(lab: Lab) -> None:
    Path("nodetrack.toml").write_text('backends = [{ kind = "log", level = "DEBUG" }]\n')
    [line] = lab.out("env", "--backends", "log", "--show").splitlines()
    assert line == """export NODETRACK_BACKENDS='[{"kind":"log","level":"DEBUG"}]'"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "No backend is chosen"),
        (("--backends", "nope"), "There is no backend named 'nope'"),
        (("--backends", "{"), "--backends takes names"),
        (("--backends", "[7]"), "each entry is a name, or a mapping with a kind and options"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(lab: Lab, arguments: tuple[str, ...], words: str) -> None:
    result = lab.run("env", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
