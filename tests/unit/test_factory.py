"""From what the user wrote to configs: names, options, kinds, and what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nodetrack.backends import factory
from nodetrack.backends.factory import build_backend, known_kinds, parse_backends, require_sdk
from nodetrack.backends.log import LogBackend, LogConfig
from nodetrack.errors import MissingExtraError, NodetrackError, SettingsError, UnknownBackendError
from nodetrack.settings import resolve


def test_a_name_is_the_backend_with_its_defaults_and_a_mapping_has_options() -> None:
    configs = parse_backends(["null", {"kind": "log", "level": "DEBUG"}])
    assert list(configs) == ["null", "log"]
    assert configs["log"] == LogConfig(level="DEBUG")
    assert isinstance(build_backend(configs["log"]), LogBackend)


@pytest.mark.parametrize("written", ["tensorbord", {"kind": "tensorbord"}])
def test_an_unknown_kind_is_answered_by_those_that_there_are(written: str | dict[str, object]) -> None:
    with pytest.raises(UnknownBackendError, match=r"known backends: .*tensorboard") as raised:
        parse_backends([written])
    assert raised.value.known == known_kinds()
    assert str(raised.value).endswith(" Did you mean 'tensorboard'?")


def test_a_message_says_where_the_name_or_the_option_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nodetrack.toml").write_text('backends = [{ kind = "log", levl = "DEBUG" }]\n')
    with pytest.raises(
        SettingsError, match=r"no option 'levl' \(from .*nodetrack.toml\); .*Did you mean 'level'"
    ):
        parse_backends(resolve(start=tmp_path).settings.backends)
    with pytest.raises(UnknownBackendError, match="The name comes from the argument backends"):
        parse_backends(resolve({"backends": "lgo"}, tmp_path).settings.backends)
    monkeypatch.setenv("NODETRACK_BACKENDS", "lgo")
    with pytest.raises(UnknownBackendError, match="The name comes from NODETRACK_BACKENDS"):
        parse_backends(resolve(start=tmp_path).settings.backends)


@pytest.mark.parametrize("written", [{"level": "DEBUG"}, {"level": "DEBUG", "kind": None}, {}])
def test_options_without_a_kind_are_answered_by_the_kinds(written: dict[str, object]) -> None:
    with pytest.raises(
        SettingsError, match=r"\((level.*)?\) has no kind that is a name: add `kind`, one of aim"
    ):
        parse_backends([written])


def test_an_option_that_is_needed_is_asked_for_with_its_meaning() -> None:
    with pytest.raises(
        SettingsError, match="'aim' needs the option 'repo': the folder of the Aim repository"
    ):
        parse_backends(["aim"])


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "influxdb", "url": "http://admin:hunter2secret@127.0.0.1:8428"},
        {"kind": "influxdb", "token": ["hunter2secret"]},
        {"kind": "influxdb", "tokne": "hunter2secret"},
        {"kind": "influxdb", "gzip": {"password": "hunter2secret"}},
        {"kind": "mlflow", "timeout_seconds": "Bearer hunter2secret"},
        {"url": "http://admin:hunter2secret@127.0.0.1:8428"},
        "http://admin:hunter2secret@127.0.0.1:8428",
    ],
)
def test_no_message_about_a_backend_tells_a_secret(options: str | dict[str, object]) -> None:
    with pytest.raises(NodetrackError) as raised:
        parse_backends([options])
    assert "hunter2secret" not in str(raised.value)


def test_a_wrong_value_is_answered_in_plain_words() -> None:
    with pytest.raises(SettingsError) as raised:
        parse_backends([{"kind": "mlflow", "tracking_uri": "http://x", "timeout_seconds": "long"}])
    message = "The backend 'mlflow' cannot take timeout_seconds='long': a whole number is needed."
    assert str(raised.value) == message


def test_a_kind_named_twice_is_refused() -> None:
    """Each has one cursor."""
    with pytest.raises(SettingsError, match="'log' is named twice"):
        parse_backends(["log", {"kind": "log", "level": "DEBUG"}])


def test_a_missing_sdk_is_answered_by_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'nodetrack\[tensorboard\]'"):
        parse_backends(["tensorboard"])
    require_sdk("log")


def test_parsing_every_backend_imports_no_sdk() -> None:
    """A trainer parses them."""
    code = """
import sys
from nodetrack.backends.factory import parse_backends
mlflow = {"kind": "mlflow", "tracking_uri": "http://x"}
parse_backends(["wandb", "tensorboard", mlflow, {"kind": "influxdb", "url": "http://x", "bucket": "b"}])
sdks = ("wandb", "tensorboard", "mlflow", "influxdb_client", "numpy")
print([name for name in sdks if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
