"""What is removed is counted, and what cannot be counted stays: real journals, a backend that is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import nodetrack
from nodetrack.backends.base import Batch
from nodetrack.backends.memory import MemoryBackend, MemoryConfig
from nodetrack.delivery.engine import Delivery
from nodetrack.delivery.prune import Pruner
from nodetrack.errors import BackendUnavailableError
from nodetrack.journal.cursor import read_cursors
from nodetrack.journal.folder import segment_records
from nodetrack.journal.segment import segment_paths
from nodetrack.records import Row


class Away(MemoryBackend):
    """A backend that cannot be had."""

    def write(self, batch: Batch) -> None:
        raise BackendUnavailableError("HTTP 503", retry_after_seconds=0.1)


@pytest.fixture
def logged() -> Path:
    """A run's folder with one attempt of many small segments."""
    run = nodetrack.init(project="p", mode="offline", segment_bytes=4096)
    for step in range(2000):
        run.log({"loss": step / 2}, step=step)
    run.finish()
    return run.folder


@pytest.fixture
def delivery(logged: Path) -> Iterator[Delivery]:
    delivery = Delivery(logged, "p", {"memory": Away(MemoryConfig())}, follow=True)
    delivery.start()
    while delivery.statuses()["memory"].state != "down":
        pass
    yield delivery
    delivery.stop()
    assert delivery.join(30)


def pruner(folder: Path, delivery: Delivery) -> Pruner:
    [attempt] = folder.glob("0001-*")
    return Pruner(
        folder,
        attempt.name,
        delivery.workers,
        is_whole=True,
        keep_bytes=None,
        max_bytes=10_000,
        warn=lambda _: None,
        note=lambda _: None,
    )


def segments(folder: Path) -> list[Path]:
    [attempt] = folder.glob("0001-*")
    return segment_paths(attempt)


def test_what_is_removed_unsent_is_counted(logged: Path, delivery: Delivery) -> None:
    before = len(segments(logged))
    pruner(logged, delivery).prune()
    left = segments(logged)
    assert len(left) < before
    rows = [record for path in left for record in segment_records(path) if isinstance(record, Row)]
    assert 0 < len(rows) < 2000
    assert read_cursors(logged)["memory"].lost == 2000 - len(rows)


def test_who_has_given_the_cursor_back_removes_nothing(logged: Path, delivery: Delivery) -> None:
    """Its word would be overwritten by the process that has the cursor now: rows would be gone uncounted."""
    delivery.stop()
    assert delivery.join(30)
    before = segments(logged)
    pruner(logged, delivery).prune()
    assert segments(logged) == before
    assert read_cursors(logged)["memory"].lost == 0


def test_what_cannot_be_removed_is_not_counted(
    logged: Path, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that may not be written; as root it has to be played."""

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(3):
        with pytest.raises(PermissionError):
            pruner(logged, delivery).prune()
    monkeypatch.undo()
    assert read_cursors(logged)["memory"].lost == 0
