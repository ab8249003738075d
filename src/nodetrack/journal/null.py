"""The writer of a run that records nothing: other ranks, and `mode="disabled"`."""

from __future__ import annotations

from pathlib import Path

from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.records import Payload, SegmentHeader, StoredValue


def _no_header(_writer: int, _segment: int) -> SegmentHeader:
    raise AssertionError("a run that records nothing has no segment")


class NullJournal(JournalWriter):
    """Takes everything and touches no disk."""

    def __init__(self) -> None:
        super().__init__(Path(), _no_header, lambda _: None)

    def open(self) -> None:
        """See JournalWriter."""

    def write_row(
        self,
        key_set: KeySet,  # noqa: ARG002 - the signature is JournalWriter's
        step: int,
        time_ns: int,  # noqa: ARG002 - as above
        values: list[StoredValue],
        counted: bool,  # noqa: ARG002 - as above
        checked: bool = False,
    ) -> None:
        """See JournalWriter."""
        if not checked:
            self._check(step, values)

    def write(self, payload: Payload) -> None:
        """See JournalWriter."""

    def tend(self, *, sync: bool = True) -> bool:  # noqa: ARG002 - as above
        """See JournalWriter."""
        return False

    def forget_key_sets(self) -> None:
        """See JournalWriter."""
