"""From what the user wrote to configs: names, options, kinds, and what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nodetrack.backends import factory
from nodetrack.backends.factory import build_backend, known_kinds, parse_backends, require_sdk
from nodetrack.backends.log import LogBackend, LogConfig
from nodetrack.errors import MissingExtraError, SettingsError, UnknownBackendError


def test_a_name_is_the_backend_with_its_defaults_and_a_mapping_has_options() -> None:
    configs = parse_backends(["null", {"kind": "log", "level": "DEBUG"}])
    assert list(configs) == ["null", "log"]
    assert configs["log"] == LogConfig(level="DEBUG")
    assert isinstance(build_backend(configs["log"]), LogBackend)


@pytest.mark.parametrize("written", ["tensorbord", {"kind": "tensorbord"}, {"level": "DEBUG"}])
def test_an_unknown_kind_is_answered_by_those_that_there_are(written: str | dict[str, object]) -> None:
    with pytest.raises(UnknownBackendError, match=r"known backends: .*tensorboard") as raised:
        parse_backends([written])
    assert raised.value.known == known_kinds()


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
parse_backends(["wandb", "tensorboard", "mlflow", {"kind": "influxdb", "url": "http://x", "bucket": "b"}])
sdks = ("wandb", "tensorboard", "mlflow", "influxdb_client", "numpy")
print([name for name in sdks if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
