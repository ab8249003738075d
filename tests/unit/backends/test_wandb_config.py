"""What the wandb backend says of where its rows go."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodetrack.backends.factory import parse_backends


@pytest.mark.parametrize("said_by", ["option", "variable"])
def test_offline_is_a_place_of_its_own_and_is_kept_for_sync(
    said_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`show --delivery` must not claim an upload, nor a later sync from another shell make one."""
    monkeypatch.chdir(tmp_path)
    options = {"mode": "offline"} if said_by == "option" else {}
    monkeypatch.setenv("WANDB_MODE", "online" if options else "offline")
    config = parse_backends([{"kind": "wandb", **options}])["wandb"]
    assert config.destination() == f"offline in {tmp_path / 'wandb'}"
    kept = config.public()
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert parse_backends([kept])["wandb"].destination() == f"offline in {tmp_path / 'wandb'}"
    assert "offline" not in parse_backends(["wandb"])["wandb"].destination()
