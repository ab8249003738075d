"""The delivery process's own journal: samples of the machine, beside the node's segments.

It is one more writer of the attempt, in segments of its own, so nothing is shared with the node. Their
headers are marked: they say nothing of the run's step, its summary, or whether the node lives.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from nodetrack.journal.writer import DEFAULT_SEGMENT_BYTES, JournalWriter
from nodetrack.records import SegmentHeader

_log = logging.getLogger("nodetrack")


def companion_writer(
    attempt_folder: Path, of: SegmentHeader, *, segment_bytes: int = DEFAULT_SEGMENT_BYTES
) -> JournalWriter:
    """A writer beside the one whose segments have headers such as `of`. It makes no file before its first
    record.

    As for every writer, somebody has to call `tend` about once a second, and `close` in the end.
    """

    def header(writer: int, segment: int) -> SegmentHeader:
        return msgspec.structs.replace(
            of,
            writer=writer,
            segment=segment,
            created_ns=time.time_ns(),
            step=0,
            counter=0,
            summary={},
            labels={},
            companion=True,
        )

    return JournalWriter(
        attempt_folder,
        header,
        lambda message: _log.warning("Samples of the machine: %s.", message),
        segment_bytes=segment_bytes,
    )
