"""What the journal's verifier says, and that it says GONE only with proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodetrack.identity.id_file import Fingerprint, RunIdFile, RunIdRecord, id_path
from nodetrack.identity.verdict import JournalVerifier, Verdict


def keep_id(folder: Path, run_id: str, *, host: str | None = None, created_in: Path | None = None) -> None:
    here = Fingerprint.here("demo", "miner", "3")
    fingerprint = Fingerprint("demo", "miner", "3", host) if host else here
    record = RunIdRecord(run_id, fingerprint, folder=str((created_in or folder).absolute()))
    RunIdFile(id_path(folder, "demo", "miner", "3")).write(record)


def verdict(folder: Path) -> tuple[Verdict, bool]:
    verification = JournalVerifier(folder).verify("abc123", "demo", None)
    return verification.verdict, verification.looked


def test_a_run_with_a_folder_exists(tmp_path: Path) -> None:
    (tmp_path / "demo/runs/abc123").mkdir(parents=True)
    assert verdict(tmp_path) == (Verdict.EXISTS, False)


def test_a_run_that_was_created_here_and_whose_folder_is_missing_is_gone(tmp_path: Path) -> None:
    (tmp_path / "demo/runs/another").mkdir(parents=True)
    keep_id(tmp_path, "abc123")
    assert verdict(tmp_path) == (Verdict.GONE, True)


def test_without_any_runs_nothing_is_known(tmp_path: Path) -> None:
    """The id file came back from a backup, or the runs are on a disk that is not mounted yet."""
    keep_id(tmp_path, "abc123")
    assert verdict(tmp_path) == (Verdict.UNKNOWN, True)


@pytest.mark.parametrize("elsewhere", [{"host": "host-b"}, {"created_in": Path("/other/.nodetrack")}])
def test_a_run_that_was_created_elsewhere_is_not_called_gone(
    tmp_path: Path, elsewhere: dict[str, object]
) -> None:
    (tmp_path / "demo/runs/another").mkdir(parents=True)
    keep_id(tmp_path, "abc123", **elsewhere)  # type: ignore[arg-type]  # one of two keywords
    assert verdict(tmp_path) == (Verdict.UNKNOWN, True)


def test_a_run_that_no_id_file_names_is_not_called_gone(tmp_path: Path) -> None:
    (tmp_path / "demo/runs/another").mkdir(parents=True)
    keep_id(tmp_path, "another")
    assert verdict(tmp_path) == (Verdict.UNKNOWN, True)


def test_runs_that_cannot_be_read_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    verification = JournalVerifier(tmp_path).verify("abc123", "demo", None)
    assert (verification.verdict, verification.looked) == (Verdict.UNKNOWN, False)
    assert "Permission denied" in verification.reason
