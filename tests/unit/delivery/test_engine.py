"""The engine on real journals, with a backend whose troubles the test decides."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import pytest

import nodetrack
from nodetrack.backends.base import Backend, BackendConfig, Batch, RunInfo
from nodetrack.delivery.engine import Delivery
from nodetrack.delivery.lock import BackendLock
from nodetrack.delivery.worker import Status
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.journal.cursor import CursorFile, read_cursors
from nodetrack.journal.folder import TrackingFolder
from nodetrack.records import AttemptFinished, AttemptStarted, ConfigSet, Row


class ScriptedConfig(BackendConfig):
    kind: Literal["scripted"] = "scripted"
    place: str = "here"
    batch_seconds: float = 0.02

    def destination(self) -> str:
        return self.place


class Scripted(Backend[ScriptedConfig]):
    """Keeps what it is given; `before` is called first and may raise, `after` once it is kept."""

    config_class = ScriptedConfig
    kept: ClassVar[list[Batch]] = []

    def __init__(self, config: ScriptedConfig | None = None, **hooks: Callable[[Batch], None]) -> None:
        super().__init__(config or ScriptedConfig())
        self.batches: list[Batch] = []
        self.runs: list[RunInfo] = []
        self.calls: list[tuple[float, int]] = []
        self.refuse_to_open: Exception | None = None
        self.before = hooks.get("before", lambda batch: None)
        self.after = hooks.get("after", lambda batch: None)

    def open(self, run: RunInfo) -> None:
        if self.refuse_to_open is not None:
            raise self.refuse_to_open
        self.runs.append(run)

    def write(self, batch: Batch) -> None:
        self.calls.append((time.monotonic(), len(batch.records)))
        self.before(batch)
        self.batches.append(batch)
        self.memory["batches"] = len(self.batches)
        self.after(batch)

    def rows(self) -> list[tuple[int, float]]:
        return [(row.step, row.values[0]) for batch in self.batches for row in batch.rows]


def logged(count: int, *, first: int = 0, **arguments: object) -> Path:
    """A finished attempt with `count` rows; returns the run's folder."""
    run = nodetrack.init(project="p", mode="offline", **arguments)
    for step in range(first, first + count):
        run.log({"loss": step / 2}, step=step)
    run.finish()
    return run.folder


def send(folder: Path, backend: Scripted, *, timeout: float = 30, **arguments: object) -> Status:
    delivery = Delivery(folder, "p", {"scripted": backend}, follow=False, **arguments)
    delivery.start()
    assert delivery.join(timeout)
    return delivery.statuses()["scripted"]


def test_everything_arrives_in_order_and_is_counted() -> None:
    folder = logged(1200, segment_bytes=4096)
    backend = Scripted(ScriptedConfig(batch_rows=100))
    status = send(folder, backend)
    assert backend.rows() == [(step, step / 2) for step in range(1200)]
    assert (status.state, status.delivered, status.quarantined) == ("done", 1200, 0)
    assert max(size for _, size in backend.calls) <= 100
    kinds = [type(record) for batch in backend.batches for record in batch.records]
    assert kinds[0] is AttemptStarted
    assert kinds[-1] is AttemptFinished
    assert kinds.count(ConfigSet) == 1
    cursor = read_cursors(folder)["scripted"]
    assert (cursor.rows(), cursor.state, cursor.memory) == (1200, "ok", {"batches": len(backend.batches)})


def test_a_batch_says_whose_it_is() -> None:
    folder = logged(3, name="bert", tags=("a",), role="miner", uid="7", version="1.2", group="g")
    backend = Scripted()
    send(folder, backend)
    info = backend.batches[0].run
    assert (info.project, info.run, info.role, info.uid, info.version) == (
        "p",
        folder.name,
        "miner",
        "7",
        "1.2",
    )
    assert (info.name, info.tags, info.group, info.attempt_number) == ("bert", ("a",), "g", 1)
    assert backend.runs == [backend.runs[0]]


@pytest.mark.case("C033")
def test_sent_again_only_what_is_new_is_sent() -> None:
    folder = logged(40)
    send(folder, Scripted())
    logged(10, first=40)
    backend = Scripted()
    send(folder, backend)
    assert [step for step, _ in backend.rows()] == list(range(40, 50))
    nothing = Scripted()
    assert send(folder, nothing).delivered == 50
    assert nothing.batches == []


def test_in_the_middle_of_a_segment_names_and_labels_are_known() -> None:
    run = nodetrack.init(project="p", mode="offline", name="bert")
    run.log({"loss": 1.0}, step=0)
    folder = run.folder
    send(folder, Scripted())
    run.log({"loss": 2.0}, step=1)
    backend = Scripted()
    send(folder, backend)
    assert backend.rows() == [(1, 2.0)]
    assert backend.batches[0].rows[0].names == ("loss",)
    assert backend.batches[0].run.name == "bert"


@pytest.mark.case("C019")
def test_a_backend_that_fails_for_a_while_gets_everything_once() -> None:
    folder = logged(50)
    failures = iter([OSError("no route"), BackendUnavailableError("HTTP 503"), RuntimeError("odd")])

    def fail(batch: Batch) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    seen: list[Status] = []
    backend = Scripted(before=fail)
    status = send(folder, backend, changed=seen.append)
    assert backend.rows() == [(step, step / 2) for step in range(50)]
    assert status.state == "done"
    assert [item.error for item in seen if item.state == "down"] == [
        "OSError: no route",
        "HTTP 503",
        "RuntimeError: odd",
    ]
    assert len(backend.runs) == 2  # it was opened anew after three failures


@pytest.mark.case("C054")
def test_retry_after_is_honoured() -> None:
    folder = logged(50)
    answers = iter([BackendUnavailableError("HTTP 429", retry_after_seconds=1.5)])

    def refuse(batch: Batch) -> None:
        if (error := next(answers, None)) is not None:
            raise error

    backend = Scripted(before=refuse)
    delivery = Delivery(folder, "p", {"scripted": backend}, follow=True)
    delivery.start()
    while not backend.calls:
        time.sleep(0.01)
    logged(50, first=50)
    delivery.drain()  # in a hurry, and yet
    assert delivery.join(30)
    (first, _), (second, _), *_ = backend.calls
    assert second - first >= 1.5
    assert len(backend.rows()) == 100


@pytest.mark.case("C050")
def test_one_bad_row_of_five_hundred_goes_to_quarantine_alone() -> None:
    folder = logged(500)

    def refuse(batch: Batch) -> None:
        if any(row.step == 123 for row in batch.rows):
            raise BatchRejectedError("HTTP 400: unable to parse 'loss=61.5'")

    backend = Scripted(before=refuse)
    status = send(folder, backend)
    assert sorted(step for step, _ in backend.rows()) == [step for step in range(500) if step != 123]
    assert (status.delivered, status.quarantined) == (499, 1)
    [line] = (folder / "quarantine" / "scripted.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert kept["reason"] == "HTTP 400: unable to parse 'loss=61.5'"
    assert (kept["record"]["step"], kept["record"]["names"]) == (123, ["loss"])


def test_a_backend_that_refuses_all_is_not_given_the_blame_on_rows() -> None:
    folder = logged(200)

    def refuse(batch: Batch) -> None:
        raise BatchRejectedError("HTTP 400: no such database")

    backend = Scripted(before=refuse)
    delivery = Delivery(folder, "p", {"scripted": backend}, follow=True)
    delivery.start()
    while delivery.statuses()["scripted"].state != "refused":
        time.sleep(0.01)
    delivery.stop()
    assert delivery.join(10)
    status = delivery.statuses()["scripted"]
    assert status.quarantined == 0
    assert "takes no record at all: HTTP 400: no such database" in status.error
    assert not (folder / "quarantine").exists()
    assert len(send_again(folder).rows()) == 200


def send_again(folder: Path) -> Scripted:
    backend = Scripted()
    send(folder, backend)
    return backend


def test_a_refused_backend_is_tried_again_and_says_so() -> None:
    folder = logged(5)
    backend = Scripted()
    backend.refuse_to_open = BackendRefusedError("the token is wrong: set SCRIPTED_TOKEN")
    delivery = Delivery(folder, "p", {"scripted": backend}, follow=True)
    delivery.start()
    while delivery.statuses()["scripted"].state != "refused":
        time.sleep(0.01)
    assert delivery.statuses()["scripted"].error == "the token is wrong: set SCRIPTED_TOKEN"
    backend.refuse_to_open = None
    delivery.drain()
    assert delivery.join(30)
    assert len(backend.rows()) == 5


def test_a_crash_between_send_and_cursor_repeats_one_batch_and_no_more() -> None:
    """The cursor cannot be written after the third batch, as if the process had died there."""
    folder = logged(100)

    class Died(BaseException):
        pass

    def die(batch: Batch) -> None:
        if len(first.batches) == 3:
            raise Died

    first = Scripted(ScriptedConfig(batch_rows=10), after=die)
    threading.excepthook, hook = lambda _: None, threading.excepthook
    try:
        delivery = Delivery(folder, "p", {"scripted": first}, follow=False)
        delivery.start()
        assert delivery.join(30)
    finally:
        threading.excepthook = hook
    second = Scripted(ScriptedConfig(batch_rows=10))
    send(folder, second)
    sent = first.rows() + second.rows()
    assert set(sent) == {(step, step / 2) for step in range(100)}
    assert len(sent) == 100 + len(first.batches[-1].rows)
    assert second.memory["batches"] == len(second.batches)


def test_memory_of_a_failed_write_is_forgotten() -> None:
    folder = logged(10)
    failed = []

    def fail_once(batch: Batch) -> None:
        if not failed:
            failed.append(True)
            backend.memory["half"] = "done"
            raise OSError("cut")

    backend = Scripted(after=fail_once)
    send(folder, backend)
    assert "half" not in backend.memory


@pytest.mark.case("C032")
def test_attempts_in_any_order_and_twice_are_the_union_once() -> None:
    for number in range(4):
        folder = logged(10, first=10 * number)
    names = [attempt.id for attempt in TrackingFolder(Path(".nodetrack")).runs()[0].attempts]
    rows: list[tuple[int, float]] = []
    for number in (3, 1, 4, 2):
        for _ in range(2):
            backend = Scripted()
            send(folder, backend, attempts=[names[number - 1]])
            rows += backend.rows()
    assert sorted(rows) == [(step, step / 2) for step in range(40)]


def test_another_destination_gets_the_run_from_its_beginning_and_the_old_one_goes_on() -> None:
    folder = logged(10)
    send(folder, Scripted())
    there = Scripted(ScriptedConfig(place="there"))
    send(folder, there)
    assert len(there.rows()) == 10
    logged(1, first=10)
    here = Scripted()
    send(folder, here)
    assert here.rows() == [(10, 5.0)]


def test_two_processes_do_not_send_at_once() -> None:
    folder = logged(10)
    lock = BackendLock(folder / "cursors" / "scripted.lock")
    assert lock.acquire()
    backend = Scripted()
    delivery = Delivery(folder, "p", {"scripted": backend}, follow=False)
    delivery.start()
    while delivery.statuses()["scripted"].state != "waiting":
        time.sleep(0.01)
    assert backend.runs == []
    lock.release()
    assert delivery.join(30)
    assert len(backend.rows()) == 10


def test_a_live_run_is_followed_over_segments_and_forked_writers() -> None:
    run = nodetrack.init(project="p", mode="offline", segment_bytes=4096)
    backend = Scripted()
    delivery = Delivery(run.folder, "p", {"scripted": backend}, follow=True)
    delivery.start()
    for step in range(600):
        run.log({"loss": step / 2}, step=step)
    while len(backend.rows()) < 600:
        time.sleep(0.01)
    run.finish()
    delivery.drain()
    assert delivery.join(30)
    assert backend.rows() == [(step, step / 2) for step in range(600)]
    assert isinstance(backend.batches[-1].records[-1], AttemptFinished)


def test_what_grows_while_a_batch_is_sent_waits_for_others() -> None:
    """A service that counts calls is asked once in `batch_seconds`, however slow or quick it is."""
    run = nodetrack.init(project="p", mode="offline")

    def log_on(batch: Batch) -> None:
        if len(backend.calls) < 3:
            run.log({"loss": 0.5})

    backend = Scripted(ScriptedConfig(batch_seconds=1.0), after=log_on)
    delivery = Delivery(run.folder, "p", {"scripted": backend}, follow=True)
    delivery.start()
    while len(backend.calls) < 3:
        time.sleep(0.01)
    times = [at for at, _ in backend.calls]
    assert all(later - earlier >= 0.99 for earlier, later in itertools.pairwise(times))
    delivery.drain()
    assert delivery.join(30)
    assert len(backend.rows()) == 2


def test_what_is_there_already_does_not_wait_and_neither_does_the_end() -> None:
    """Full batches, the segments of one writer, and attempts follow each other at once."""
    logged(500, segment_bytes=4096)
    folder = logged(500, first=500, segment_bytes=4096)
    backend = Scripted(ScriptedConfig(batch_seconds=600, batch_rows=50))
    delivery = Delivery(folder, "p", {"scripted": backend}, follow=True)
    delivery.start()
    while len(backend.rows()) < 1000:
        time.sleep(0.01)
    logged(10, first=1000)
    delivery.drain()
    assert delivery.join(30)
    assert backend.rows() == [(step, step / 2) for step in range(1010)]


def test_a_damaged_cursor_is_kept_aside_and_the_run_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    folder = logged(10)
    send(folder, Scripted())
    CursorFile(folder, "scripted").path.write_bytes(b"{half")
    backend = Scripted()
    send(folder, backend)
    assert len(backend.rows()) == 10
    assert "sent to scripted from its beginning" in caplog.text
    assert list((folder / "cursors").glob("scripted.json.damaged-*"))


def test_a_torn_tail_is_sent_once_it_is_whole() -> None:
    folder = logged(10)
    [segment] = folder.glob("*/segment-000001.ntj")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-20])
    backend = Scripted()
    send(folder, backend)
    count = sum(len(batch.records) for batch in backend.batches)
    segment.write_bytes(whole)
    rest = Scripted()
    send(folder, rest)
    assert [type(record) for batch in rest.batches for record in batch.records] == [AttemptFinished]
    assert count > 10


def test_a_file_that_is_no_segment_does_not_stop_the_others() -> None:
    folder = logged(10)
    [attempt] = [path.parent for path in folder.glob("*/segment-000001.ntj")]
    (attempt / "segment-000000.ntj").write_bytes(b"something else entirely, and long enough")
    backend = Scripted()
    assert send(folder, backend).delivered == 10


def test_a_row_larger_than_the_batch_arrives() -> None:
    run = nodetrack.init(project="p", mode="offline")
    run.log({"note": nodetrack.Text("x" * 300_000), "loss": 1.0}, step=0)
    run.log({"loss": 2.0}, step=1)
    run.finish()
    backend = Scripted(ScriptedConfig(batch_bytes=1000))
    assert send(run.folder, backend).delivered == 2
    assert isinstance(backend.batches[0].records[0], AttemptStarted)
    assert all(isinstance(row, Row) for batch in backend.batches for row in batch.rows)


def test_many_illegal_rows_of_one_batch_do_not_hold_up_the_others() -> None:
    """More than are needed to believe that a backend refuses everything; but it takes the rest."""
    folder = logged(200)

    def refuse(batch: Batch) -> None:
        if any(row.step % 2 for row in batch.rows):
            raise BatchRejectedError("HTTP 400: an odd step")

    backend = Scripted(before=refuse)
    status = send(folder, backend)
    assert sorted(step for step, _ in backend.rows()) == list(range(0, 200, 2))
    assert (status.state, status.delivered, status.quarantined) == ("done", 100, 100)


def test_a_backend_that_refuses_all_of_a_slow_run_is_not_given_the_blame_on_rows_either() -> None:
    """Each batch has fewer rows than it takes to be sure."""
    folder = logged(40)
    away = [True]

    def refuse(batch: Batch) -> None:
        if away and batch.rows:
            raise BatchRejectedError("HTTP 400: no such database")

    backend = Scripted(ScriptedConfig(batch_rows=2), before=refuse)
    delivery = Delivery(folder, "p", {"scripted": backend}, follow=True)
    delivery.start()
    while delivery.statuses()["scripted"].state != "refused":
        time.sleep(0.01)
    away.clear()
    delivery.drain()  # which wakes it
    assert delivery.join(30)
    assert backend.rows() == [(step, step / 2) for step in range(40)]
    assert delivery.statuses()["scripted"].quarantined == 0
    assert not (folder / "quarantine").exists()


def test_a_few_rows_that_are_refused_by_a_backend_that_takes_none_are_not_given_up() -> None:
    folder = logged(3)
    refusals = iter(range(9))

    def refuse(batch: Batch) -> None:
        if batch.rows and next(refusals, None) is not None:
            raise BatchRejectedError("HTTP 400: no such database")

    backend = Scripted(before=refuse)
    status = send(folder, backend)
    assert sorted(backend.rows()) == [(step, step / 2) for step in range(3)]
    assert (status.delivered, status.quarantined) == (3, 0)


def test_a_service_that_asks_to_wait_for_ever_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodetrack.delivery.patience._LONGEST_ASKED_SECONDS", 0.05)
    folder = logged(10)
    answers = iter([1e12, -5.0, float("inf")])

    def refuse(batch: Batch) -> None:
        if (seconds := next(answers, None)) is not None:
            raise BackendUnavailableError("HTTP 503", retry_after_seconds=seconds)

    assert send(folder, Scripted(before=refuse)).delivered == 10


def test_a_fault_of_ours_is_begun_again_and_costs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = logged(10)
    faults = iter([RuntimeError("odd")])
    real = CursorFile.take_up

    def stumble(self: CursorFile, destination: str) -> object:
        if (error := next(faults, None)) is not None:
            raise error
        return real(self, destination)

    monkeypatch.setattr(CursorFile, "take_up", stumble)
    seen: list[Status] = []
    status = send(folder, Scripted(), changed=seen.append)
    assert (status.state, status.delivered) == ("done", 10)
    assert "begins again (RuntimeError: odd)" in next(item.error for item in seen if item.state == "down")


def test_a_folder_that_cannot_be_written_for_a_while_is_waited_for() -> None:
    folder = logged(10)
    (folder / "cursors").write_text("in the way")
    backend = Scripted()
    delivery = Delivery(folder, "p", {"scripted": backend}, follow=False)
    delivery.start()
    while delivery.statuses()["scripted"].state != "down":
        time.sleep(0.01)
    (folder / "cursors").unlink()
    assert delivery.join(30)
    assert len(backend.rows()) == 10


def test_who_has_ended_writes_nothing_to_the_cursor_any_more() -> None:
    """It is the next process's: what this one wrote there would undo what that one has counted. How far it
    had come stays known, so that what was delivered can be pruned at the end.
    """
    folder = logged(10)
    delivery = Delivery(folder, "p", {"scripted": Scripted()}, follow=False)
    delivery.start()
    assert delivery.join(30)
    [worker] = delivery.workers.values()
    before = CursorFile(folder, "scripted").path.read_bytes()
    [attempt] = TrackingFolder(Path(".nodetrack")).runs()[0].attempts
    [segment] = folder.glob("*/segment-000001.ntj")
    assert worker.offset(attempt.id, "segment-000001.ntj") == segment.stat().st_size
    assert worker.note_lost(attempt.id, "segment-000001.ntj", 1, 5) is False
    assert CursorFile(folder, "scripted").path.read_bytes() == before


def test_a_destination_that_is_no_text_has_a_cursor_all_the_same() -> None:
    folder = logged(10)
    assert send(folder, Scripted(ScriptedConfig(place="here\udcff"))).delivered == 10
    assert read_cursors(folder)["scripted"].rows() == 10
