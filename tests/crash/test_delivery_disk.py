"""A journal with a limit: what was delivered goes first; what was not, only past the hard limit, counted."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.servers.plugin import Jsonlines

import nodetrack
from nodetrack.journal.cursor import read_cursors
from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.views import all_rows, current_rows
from nodetrack.live_run import Run

KEEP = 400_000


def start(folder: Path, backend: Jsonlines, **limits: object) -> Run:
    return nodetrack.init(
        project="p",
        id="node",
        dir=folder,
        version="1.0",
        init_timeout=50,
        backends=[{**backend.config, "batch_seconds": 0.05}],
        **limits,  # type: ignore[arg-type]
    )


def log(run: Run, rows: int) -> None:
    """About 100 bytes each."""
    for _ in range(rows):
        run.log({f"m/{number}": 0.5 for number in range(9)})


def size(run: Run) -> int:
    total = 0
    for path in run.folder.rglob("*.ntj"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            total += path.stat().st_size
    return total


def wait_for(condition: Callable[[], object], seconds: float = 50.0) -> None:
    """Until it holds; the bound is there so that a broken test ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.05)


@pytest.mark.case("C026")
def test_delivered_segments_are_removed_and_nothing_else(tmp_path: Path, jsonlines: Jsonlines) -> None:
    """Ten times the limit is logged, over two attempts: the backend has all, the disk what fits."""
    for attempt in range(2):
        run = start(tmp_path, jsonlines, keep_bytes=KEEP)
        log(run, 20_000)
        run.finish()
        assert size(run) <= KEEP
        assert len(jsonlines.rows()) == 20_000 * (attempt + 1)
        assert run.health().backends["jsonlines"].lost == 0
    again = start(tmp_path, jsonlines, keep_bytes=KEEP)
    assert (again.step, again.resumed) == (40_000, True)
    assert read_cursors(again.folder)["jsonlines"].rows() == 40_000, "what was removed is still counted"


@pytest.mark.case("C026")
def test_without_the_backend_nothing_is_removed_up_to_the_hard_limit(
    tmp_path: Path, jsonlines: Jsonlines
) -> None:
    run = start(tmp_path, jsonlines, keep_bytes=KEEP, max_bytes=2 * KEEP)
    wait_for(jsonlines.lines)
    jsonlines.spoil("write fail")  # a batch with rows is under way when its segment is removed
    log(run, 6_000)
    time.sleep(2.5)  # two looks at the disk
    assert KEEP < size(run) < 2 * KEEP
    assert run.health().backends["jsonlines"].lost == 0
    log(run, 20_000)
    wait_for(lambda: size(run) <= 2 * KEEP)
    wait_for(lambda: run.health().backends["jsonlines"].lost)
    wait_for(lambda: any("counted as lost" in warning for warning in run.health().warnings))
    jsonlines.mend()
    run.finish()
    health = run.health().backends["jsonlines"]
    assert health.lost > 10_000
    assert health.delivered + health.lost == 26_000
    assert len(jsonlines.rows()) == health.delivered
    assert len([warning for warning in run.health().warnings if "counted as lost" in warning]) == 1
    assert re.search(
        r"pruned .*; rows removed unsent: \d+ of jsonlines", (Path(run.dir) / "delivery.log").read_text()
    )


@pytest.mark.case("C026")
def test_earlier_attempts_go_as_a_whole_in_the_end(tmp_path: Path, jsonlines: Jsonlines) -> None:
    for _ in range(6):
        run = start(tmp_path, jsonlines, keep_bytes=12_000)
        log(run, 300)
        run.finish()
    assert size(run) <= 12_000
    attempts = RunFolder(run.folder, "p").attempts
    assert 1 <= len(attempts) < 6
    assert {attempt.state(attempt.finish_record()).state for attempt in attempts} == {"finished"}
    assert len(jsonlines.rows()) == 1_800
    assert start(tmp_path, jsonlines).step == 1_800


def test_whoever_reads_a_pruned_run_reads_what_there_is(tmp_path: Path, jsonlines: Jsonlines) -> None:
    run = start(tmp_path, jsonlines, keep_bytes=KEEP)
    log(run, 20_000)
    run.finish()
    [folder] = TrackingFolder(tmp_path).runs()
    overview, detail = folder.overview(), folder.detail()
    assert (overview.state, overview.step, overview.version, overview.role) == (
        "finished",
        20_000,
        "1.0",
        "trainer",
    )
    assert 0 < detail.rows < 20_000
    assert (detail.damage.corrupt, detail.damage.problems) == (0, [])
    assert len(list(all_rows(folder))) == detail.rows
    assert [row.step for row in current_rows(folder)][-1] == 19_999


def test_without_backends_only_the_hard_limit_removes(tmp_path: Path) -> None:
    run = nodetrack.init(project="p", dir=tmp_path, version="1.0", keep_bytes=KEEP)
    log(run, 10_000)
    run.finish()
    assert size(run) > KEEP
    run = nodetrack.init(project="p", dir=tmp_path, version="1.0", max_bytes=KEEP)
    wait_for(lambda: size(run) <= KEEP)
    wait_for(lambda: any("counted as lost" in warning for warning in run.health().warnings))
