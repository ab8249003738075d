"""The contract sees what is wrong with a backend: each fault of these is found by the test that is for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nodetrack.backends import memory
from nodetrack.backends.base import Batch
from nodetrack.backends.memory import MemoryBackend, MemoryConfig
from nodetrack.records import Row
from nodetrack.testing import BackendContract, Point


class Subject(BackendContract):
    """The memory backend, which a fault is built into."""

    repeats_are_harmless = False

    def config(self, tmp_path: Path) -> MemoryConfig:
        return MemoryConfig()

    def read_back(self, run: str, tmp_path: Path) -> Iterator[Point]:
        for batch in MemoryBackend.of(run):
            for row in batch.rows:
                for name, value in row.items():
                    number = value if isinstance(value, int | float) else None
                    context = tuple(sorted(row.context.items()))
                    yield Point(name, row.step, number, batch.run.version, batch.run.attempt, context)


class Faulty(MemoryBackend):
    """Spoils each row on its way."""

    def write(self, batch: Batch) -> None:
        records = [self.spoilt(each) if isinstance(each, Row) else each for each in batch.records]
        super().write(msgspec.structs.replace(batch, records=[each for each in records if each is not None]))

    def spoilt(self, row: Row) -> Row | None:
        return row


class DropsLowerSteps(Faulty):
    highest = -(10**18)

    def spoilt(self, row: Row) -> Row | None:
        if row.step < self.highest:
            return None
        self.highest = row.step
        return row


class DropsNonFinite(Faulty):
    def spoilt(self, row: Row) -> Row | None:
        kept = [
            (name, value)
            for name, value in row.items()
            if isinstance(value, int | dict) or -1e300 < value < 1e300
        ]
        return msgspec.structs.replace(
            row, names=[name for name, _ in kept], values=[value for _, value in kept]
        )


class DropsTypedValues(Faulty):
    def spoilt(self, row: Row) -> Row | None:
        kept = [(name, value) for name, value in row.items() if not isinstance(value, dict)]
        return msgspec.structs.replace(
            row, names=[name for name, _ in kept], values=[value for _, value in kept]
        )


class CountsTypedValues(DropsTypedValues):
    def spoilt(self, row: Row) -> Row | None:
        self.leave_out("typed", sum(isinstance(value, dict) for value in row.values))
        return super().spoilt(row)


class MixesUpNames(Faulty):
    def spoilt(self, row: Row) -> Row | None:
        return msgspec.structs.replace(row, names=[name.replace(" ", "_") for name in row.names])


class DropsContext(Faulty):
    def spoilt(self, row: Row) -> Row | None:
        return msgspec.structs.replace(row, context={})


class KeepsLastOfAStep(Faulty):
    def write(self, batch: Batch) -> None:
        last = {row.step: row for row in batch.rows}
        super().write(msgspec.structs.replace(batch, records=list(last.values())))


class ForgetsTheVersion(Faulty):
    first_version: str | None = None

    def write(self, batch: Batch) -> None:
        kind = type(self)
        kind.first_version = kind.first_version or batch.run.version
        super().write(
            msgspec.structs.replace(batch, run=msgspec.structs.replace(batch.run, version=kind.first_version))
        )


class RemembersWhatIsNoJson(Faulty):
    def write(self, batch: Batch) -> None:
        super().write(batch)
        self.memory["seen"] = {1, 2}  # type: ignore[assignment]


class FailsOnSystemRows(Faulty):
    def write(self, batch: Batch) -> None:
        if any(type(record).__name__ == "SystemRow" for record in batch.records):
            raise TypeError("what is that?")
        super().write(batch)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (DropsLowerSteps, "test_steps_may_go_down_repeat_and_jump"),
        (DropsNonFinite, "test_numbers_that_are_not_finite"),
        (DropsTypedValues, "test_typed_values_are_kept_or_counted"),
        (MixesUpNames, "test_names_survive"),
        (DropsContext, "test_contexts_are_told_apart"),
        (KeepsLastOfAStep, "test_several_calls_at_one_step"),
        (ForgetsTheVersion, "test_two_versions_in_two_attempts"),
        (RemembersWhatIsNoJson, "test_every_value_arrives_at_its_step"),
        (FailsOnSystemRows, "test_every_kind_of_record_is_taken"),
    ],
)
def test_a_fault_is_found(
    fault: type[Faulty], test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(Subject(), test)(tmp_path)  # the backend as it is passes
    monkeypatch.setattr(memory, "MemoryBackend", fault)
    with pytest.raises((AssertionError, TypeError)):
        getattr(Subject(), test)(tmp_path)


def test_repeats_count_where_they_are_said_to_be_harmless(tmp_path: Path) -> None:
    """The memory backend keeps a batch as often as it comes."""

    class Claims(Subject):
        repeats_are_harmless = True

    with pytest.raises(AssertionError, match="points are there that nobody sent"):
        Claims().test_a_batch_that_is_sent_again_loses_nothing(tmp_path)


@pytest.mark.parametrize("fault", [DropsTypedValues, CountsTypedValues])
def test_a_typed_value_that_is_not_kept_has_to_be_counted(
    fault: type[Faulty], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Numbers(Subject):
        kept_types = frozenset()

    monkeypatch.setattr(memory, "MemoryBackend", fault)
    if fault is CountsTypedValues:
        Numbers().test_typed_values_are_kept_or_counted(tmp_path)
    else:
        with pytest.raises(AssertionError, match="5 values are not kept, 0 counted"):
            Numbers().test_typed_values_are_kept_or_counted(tmp_path)


def test_the_contract_is_imported_without_pytest() -> None:
    """Only running it needs pytest."""
    code = "import sys, nodetrack.testing; print('pytest' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
