"""Batches as the journal would give them, made up: what `nodetrack.testing` sends to a backend."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from nodetrack.backends.base import Batch, RunInfo
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    ConsoleLine,
    Event,
    JsonValue,
    Record,
    Row,
    RunEdited,
    StoredValue,
    SummarySet,
    SystemRow,
)

#: A PNG of one red point.
PNG: Final = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c4944415478da63f8cfc0000003010100f70341430000000049454e44ae426082"
)
STRANGE_NAMES: Final = (
    *("train/loss", "a b", "a_b", "a.b", "a-b", "a:b", "größe", "損失", "😀", "A", "a", "%41"),
    *("a=b,c", 'quo"te', "it's", "back\\slash", "new\nline", "tab\there", "/lead", "trail/", "a//b", ".."),
    *("step", "time", "_step", "v1.0/x", "v@main/x", "latest/x", "nodetrack/step", "{x}", "$(x)", "#x", "-"),
    *("0", ".", "é", "e\u0301", "<b>x</b>", "system/cpu", " ", "x" * 250),
)


class Attempt:
    """Batches of one attempt, or of one process of it, as the journal would give them."""

    def __init__(self, run: str, number: int = 1, version: str = "0.1.0", writer: int = 1) -> None:
        self.started_ns = time.time_ns() - (3_600 - 60 * number) * 1_000_000_000
        self.writer = writer
        self.info = RunInfo(
            project="contract",
            run=run,
            attempt=f"{number:04}-a{number:03}",
            attempt_number=number,
            version=version,
            role="miner",
            uid="7",
            name="miner 7",
            tags=("contract",),
            started_ns=self.started_ns,
        )
        self._records = 0
        self._offset = 0

    def now_ns(self) -> int:
        """The time of the next record: each is a millisecond after the one before."""
        self._records += 1
        return self.started_ns + 1_000_000 * self._records

    def row(self, step: int, values: Mapping[str, StoredValue], context: Mapping[str, str] = {}) -> Row:
        """What a `log` call records."""
        return Row(
            offset=0,
            names=tuple(values),
            values=list(values.values()),
            step=step,
            time_ns=self.now_ns(),
            context=context,
        )

    def rows(self, *steps: int) -> list[Row]:
        """Two metrics a step, whose values tell the attempt, the writer and the place of the row."""
        place = 1_000 * self.info.attempt_number + 100 * self.writer
        return [
            self.row(step, {"train/loss": place + index + 0.5, "train/count": place + index})
            for index, step in enumerate(steps)
        ]

    def begin(self) -> list[Record]:
        """What stands at the beginning of an attempt."""
        info = self.info
        facts = msgspec.to_builtins(info, enc_hook=str) | {"process": {"pid": 1}, "git": None}
        config: dict[str, JsonValue] = {"learning_rate": 0.1, "model": {"layers": [1, 2], "name": None}}
        return [
            AttemptStarted(offset=0, time_ns=self.now_ns(), attempt=facts),
            RunEdited(offset=0, time_ns=self.now_ns(), fields={"name": info.name, "tags": list(info.tags)}),
            ConfigSet(offset=0, time_ns=self.now_ns(), config=config),
        ]

    def batch(self, *records: Record) -> Batch:
        """The records as the next batch, each at its place in the segment."""
        placed = []
        for record in records:
            self._offset += 100
            placed.append(msgspec.structs.replace(record, offset=self._offset))
        return Batch(run=self.info, records=placed, segment=self.writer, writer=self.writer)

    def every_kind(self) -> list[Record]:
        """One record of each kind that can stand in the middle of an attempt, and each event."""
        config: dict[str, JsonValue] = {
            "learning_rate": 0.2,
            "nested": {"deep": {"list": [1, None, "x", {"y": math.inf}]}},
            "text": "ä" * 600,
        }
        events: dict[str, dict[str, JsonValue]] = {
            "checkpoint": {"step": 1},
            "alert": {"title": "loss", "text": "is NaN"},
            "define_metric": {"name": "train/loss", "step_metric": "tokens", "summary": "min"},
            "provenance": {"dataset": "x"},
            "signal": {"signal": "SIGTERM"},
            "somebody's own": {},
        }
        return [
            ConfigSet(offset=0, time_ns=self.now_ns(), config=config),
            SummarySet(
                offset=0, time_ns=self.now_ns(), summary={"best": 0.1, "gone": None, "word": "x", "list": [1]}
            ),
            RunEdited(offset=0, time_ns=self.now_ns(), fields={"notes": "a\nb", "tags": [], "group": None}),
            ConsoleLine(offset=0, time_ns=self.now_ns(), stream="stderr", text="epoch 1 \x1b[31m100%"),
            SystemRow(
                offset=0,
                names=("system/cpu_ratio", "system/memory_bytes"),
                values=[0.5, 2**34],
                time_ns=self.now_ns(),
            ),
            *(Event(offset=0, time_ns=self.now_ns(), name=name, data=data) for name, data in events.items()),
        ]

    def end(self) -> AttemptFinished:
        """How it ended."""
        return AttemptFinished(offset=0, time_ns=self.now_ns(), state="finished", exit_code=0, reason="")
