"""A backend of another package: installed, found by its entry point, parsed, built, and used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.servers.plugin import Jsonlines

from nodetrack.backends.factory import backend_class, build_backend, known_kinds, parse_backends
from nodetrack.errors import SettingsError


def test_an_installed_plug_in_is_known_by_its_kind(jsonlines: Jsonlines) -> None:
    assert "jsonlines" in known_kinds()
    [config] = parse_backends([jsonlines.config]).values()
    backend = build_backend(config)
    assert type(backend) is backend_class("jsonlines")
    assert config.destination() == str(jsonlines.path)


def test_a_child_process_knows_the_plug_in_too(jsonlines: Jsonlines) -> None:
    """It is found by its metadata, so it was installed and not only put on a path."""
    code = "from nodetrack.backends.factory import known_kinds; print('jsonlines' in known_kinds())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "True\n"


def test_a_wrong_option_of_a_plug_in_is_named(jsonlines: Jsonlines) -> None:
    with pytest.raises(SettingsError, match="'jsonlines' cannot take colour="):
        parse_backends([{**jsonlines.config, "colour": "red"}])
