"""Options of the Aim backend, and the context that it writes, without a repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.backends.aim import AimConfig, _renamed
from nodetrack.backends.factory import parse_backends
from nodetrack.errors import SettingsError


def test_the_config_is_parsed_without_aim() -> None:
    """A trainer that asks for Aim imports none of it."""
    code = (
        "import sys; from nodetrack.backends.factory import parse_backends\n"
        "parse_backends([{'kind': 'aim', 'repo': 'runs'}])\n"
        "assert not {'aim', 'numpy', 'PIL'} & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_repository_is_the_same_from_every_folder() -> None:
    """A path is made absolute where the trainer was started; `nodetrack sync` may be started elsewhere."""
    config = AimConfig(repo="runs/aim")
    assert config.repo == config.destination() == str(Path.cwd() / "runs/aim")
    assert AimConfig(repo="~/aim").repo == str(Path.home() / "aim")
    assert parse_backends([config.public()])["aim"] == config


def test_a_repository_is_needed() -> None:
    """Aim's own default would be a folder wherever the process happens to be."""
    with pytest.raises(SettingsError, match="repo"):
        parse_backends(["aim"])


@given(
    st.dictionaries(
        st.text("_versionwriter", max_size=9) | st.sampled_from(["version", "_writer"]), st.text()
    )
)
def test_no_context_of_the_user_is_mistaken_for_ours(context: dict[str, str]) -> None:
    """Keys that mean something of ours step aside, and no two become one."""
    renamed = _renamed(context)
    assert not renamed.keys() & {"version", "writer"}
    assert len(renamed) == len(context)
