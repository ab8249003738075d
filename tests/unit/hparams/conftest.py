"""Folders of hyper-parameter files, and an environment without ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nodetrack.hparams.overrides import ENVIRONMENT_PREFIX

WriteFile = Callable[..., Path]


@pytest.fixture(autouse=True)
def _environment_without_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working directory, so that messages carry short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> WriteFile:
    """Write a file into the folder: text or bytes as given, anything else as JSON."""

    def write_file(name: str, content: object) -> Path:
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write_file
