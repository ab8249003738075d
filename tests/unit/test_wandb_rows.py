"""Rows on their way to W&B: none is lost to its rising step, and none of its troubles reaches the caller."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodetrack import tracker
from nodetrack.errors import RunFinishedError, UsageError
from nodetrack.live_run import Run
from nodetrack.wandb_rows import WandbRows


@dataclass
class RisingStep:
    """What wandb's core does with rows: merges at one step, and drops what is behind (measured with 0.31)."""

    current: int = 0
    open_row: dict[str, object] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, object]]] = field(default_factory=list)
    dropped: list[dict[str, object]] = field(default_factory=list)

    def log(self, data: dict[str, object], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None, "without a step the row would join whatever row is open"
        if step < self.current:
            self.dropped.append(data)
            return
        if step > self.current:
            self.flush()
            self.current = step
        self.open_row.update(data)
        if commit:
            self.flush()
            self.current += 1

    def flush(self) -> None:
        if self.open_row:
            self.rows.append((self.current, self.open_row))
        self.open_row = {}


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Run]:
    run = tracker.init("demo", dir=tmp_path, version="0.1.0")
    yield run
    run.finish()


STEPS = st.none() | st.integers(-3, 8) | st.sampled_from([10**6, 2**53, 2**53 + 1, 2**62])
NAMES = st.sets(st.sampled_from(["a", "b", "step", "v1/x"]), min_size=1)
CALLS = st.lists(st.tuples(NAMES, STEPS, st.sampled_from([None, False, True])), max_size=12)


@settings(max_examples=200, deadline=None)
@given(CALLS, st.integers(0, 5))
def test_whatever_the_steps_every_value_reaches_wandb_under_its_own_step(
    calls: list[tuple[set[str], int | None, bool | None]], first_number: int
) -> None:
    """`first_number`: the run that is resumed has rows already."""
    with tempfile.TemporaryDirectory() as folder:
        journal = tracker.init("demo", dir=folder, version="0.1.0", resume="never")
        service = RisingStep(current=first_number)
        rows = WandbRows(journal, service.log, first_number)
        expected = []
        for number, (names, step, commit) in enumerate(calls):
            known = step if step is not None else journal.state_dict()["counter"]
            values = {name: 100 * number + place for place, name in enumerate(sorted(names))}
            rows.log(values, step, commit)
            expected += [(known, name, value) for name, value in values.items()]
        journal.finish()
    service.flush()
    assert service.dropped == []
    found = [
        (row.get("nodetrack/step", row["v0.1.0/step"]), name.removeprefix("latest/"), value)
        for _, row in service.rows
        for name, value in row.items()
        if name.startswith("latest/") and (name != "latest/step" or "nodetrack/step" in row)
    ]
    assert sorted(found) == sorted(expected)
    for _, row in service.rows:
        latest = [name for name in row if name.startswith("latest/")]
        assert all(row[name] == row[name.replace("latest/", "v0.1.0/", 1)] for name in latest)
    assert rows.refused == 0


def test_calls_that_share_a_step_share_a_row(journal: Run) -> None:
    service = RisingStep()
    rows = WandbRows(journal, service.log)
    rows.log({"a": 1}, commit=False)
    rows.log({"b": 2})
    rows.log({"a": 3}, 7)
    rows.log({"b": 4}, 7)
    service.flush()
    assert [number for number, _ in service.rows] == [0, 7]
    assert service.rows[1][1] == {
        "v0.1.0/a": 3,
        "latest/a": 3,
        "v0.1.0/b": 4,
        "latest/b": 4,
        "v0.1.0/step": 7,
        "latest/step": 7,
    }


def test_an_explicit_step_that_grows_is_wandbs_row_number_too(journal: Run) -> None:
    service = RisingStep()
    rows = WandbRows(journal, service.log)
    for step in (3, 10, 11):
        rows.log({"a": 1}, step)
    service.flush()
    assert [number for number, _ in service.rows] == [3, 10, 11]


def test_a_counted_row_is_closed_at_once_so_that_it_can_be_seen(journal: Run) -> None:
    service = RisingStep()
    WandbRows(journal, service.log).log({"a": 1})
    assert len(service.rows) == 1


def test_a_value_that_wandb_cannot_encode_costs_only_itself(journal: Run) -> None:
    sent = []

    def picky(data: dict[str, object], step: int | None = None, commit: bool | None = None) -> None:
        if any(isinstance(value, complex) for value in data.values()):
            raise TypeError("complex is not JSON serializable")
        sent.append(data)

    rows = WandbRows(journal, picky)
    rows.log({"good": 1, "odd": 1j})
    assert sent == [{"v0.1.0/good": 1, "latest/good": 1, "v0.1.0/step": 0, "latest/step": 0}]
    assert rows.refused == 0


def test_a_broken_wandb_is_counted_and_warned_of_once(journal: Run, caplog: pytest.LogCaptureFixture) -> None:
    def broken(data: dict[str, object], step: int | None = None, commit: bool | None = None) -> None:
        raise ConnectionResetError("Connection lost")

    rows = WandbRows(journal, broken)
    for _ in range(5):
        rows.log({"a": 1})
    assert rows.refused == 5
    assert journal.health().logged == 5
    [warning] = caplog.messages
    assert "Connection lost" in warning
    assert str(journal.folder) in warning


def test_a_service_that_recovers_gets_the_rows_from_then_on(journal: Run) -> None:
    service = RisingStep()
    broken = True

    def moody(data: dict[str, object], step: int | None = None, commit: bool | None = None) -> None:
        if broken:
            raise ConnectionResetError("Connection lost")
        service.log(data, step, commit)

    rows = WandbRows(journal, moody)
    rows.log({"a": 1})
    broken = False
    rows.log({"a": 2})
    assert [row["latest/a"] for _, row in service.rows] == [2]


def test_the_callers_own_mistakes_are_raised_and_send_nothing(journal: Run) -> None:
    service = RisingStep()
    rows = WandbRows(journal, service.log)
    with pytest.raises(UsageError):
        rows.log({5: 1})
    with pytest.raises(UsageError):
        rows.log([("a", 1)])
    journal.finish()
    with pytest.raises(RunFinishedError):
        rows.log({"a": 1})
    assert service.rows == []


@pytest.mark.parametrize("data", [{}, {"": 1}, {"nested": {}}])
def test_a_row_without_a_usable_name_is_no_row(journal: Run, data: dict[str, object]) -> None:
    service = RisingStep()
    WandbRows(journal, service.log).log(data)
    assert service.rows == []
