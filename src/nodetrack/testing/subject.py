"""What an author says of a backend, and how the contract's tests feed it and compare what is read back."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nodetrack.backends.base import Backend, BackendConfig, Batch, RunInfo
from nodetrack.backends.factory import build_backend
from nodetrack.naming import with_context
from nodetrack.records import Event, JsonValue, Row
from nodetrack.testing.batches import STRANGE_NAMES


class Point(NamedTuple):
    """One value as the service gives it back: a number, or None where it is a typed value.

    `version`, `attempt` and `context` (sorted pairs) count if the class's `keeps` names them.
    """

    metric: str
    step: int
    value: float | None
    version: str | None = None
    attempt: str | None = None
    context: tuple[tuple[str, str], ...] = ()


class ContractSubject:
    """What an author says of a backend, and how it is fed and read in the tests of `BackendContract`."""

    #: What of a point can be read back: any of version, attempt, context.
    keeps: ClassVar[frozenset[str]] = frozenset({"version", "attempt", "context"})
    #: Typed values that are kept in some form: histogram, text, image, table. The others are counted.
    kept_types: ClassVar[frozenset[str]] = frozenset({"histogram", "text", "image", "table"})
    #: NaN and the infinities come back as they are. If not, they are counted.
    keeps_nonfinite: ClassVar[bool] = True
    #: A batch that is sent twice is there once.
    repeats_are_harmless: ClassVar[bool] = True
    #: Several values of one metric at one step are all kept. If not, the last one of those that `keeps`
    #: does not tell apart.
    keeps_repeated_steps: ClassVar[bool] = True
    #: What was logged beyond the step of a later `rewind` event can still be read.
    keeps_superseded: ClassVar[bool] = True
    #: False for a backend that keeps nothing which could be read, such as `null`: it has to take everything.
    readable: ClassVar[bool] = True
    #: Override to leave out what the service cannot tell apart, and say so in your documentation.
    strange_names: ClassVar[Sequence[str]] = STRANGE_NAMES
    large_batch_rows: ClassVar[int] = 5_000

    # -- what a subclass says -----------------------------------------------------------------------

    def config(self, tmp_path: Path) -> BackendConfig:
        """The config to test: the same destination for the same path."""
        raise NotImplementedError(f"{type(self).__name__} has to define config(tmp_path).")

    def read_back(self, run: str, tmp_path: Path) -> Iterable[Point]:
        """All points of the run, read by other means than the backend, which is closed by then."""
        raise NotImplementedError(f"{type(self).__name__} has to define read_back(run, tmp_path).")

    def as_kept(self, value: float) -> float:
        """The number that the service makes of a number, such as the nearest one of 32 bits."""
        return float(value)

    def refused_config(self, tmp_path: Path) -> BackendConfig | None:  # noqa: ARG002 - for the subclass
        """A config that the service refuses: a wrong token, say. None skips the test."""
        return None

    def unreachable_config(self, tmp_path: Path) -> BackendConfig | None:  # noqa: ARG002 - for the subclass
        """A config of a service that does not answer. None skips the test."""
        return None

    def unavailable(self, tmp_path: Path) -> AbstractContextManager[object] | None:  # noqa: ARG002 - for the subclass
        """Within it the service takes no batch; afterwards it does again. None skips the test."""
        return None

    # -- as delivery does it ------------------------------------------------------------------------

    def deliver(
        self,
        tmp_path: Path,
        batches: Sequence[Batch],
        *,
        newest: RunInfo | None = None,
        reopen: bool = False,
        repeat: bool = False,
    ) -> int:
        """Send the batches, and compare what is read back. How many values were counted as left out."""
        left_out = 0
        memory: dict[str, JsonValue] = {}
        for group in [[batch] for batch in batches] if reopen or repeat else [batches]:
            if repeat:
                with self.opened(tmp_path, newest or group[0].run, memory) as backend:
                    self.write(backend, *group)
            with self.opened(tmp_path, newest or group[0].run, memory) as backend:
                self.write(backend, *group)
            memory = backend.memory
            left_out += sum(backend.left_out.values())
        self.check(tmp_path, batches, repeated=batches if repeat else ())
        return left_out

    @contextmanager
    def opened(
        self, tmp_path: Path, run: RunInfo, memory: Mapping[str, JsonValue] | None = None
    ) -> Iterator[Backend[Any]]:
        backend = build_backend(self.config(tmp_path))
        backend.memory = json.loads(json.dumps(memory or {}))
        backend.open(run)
        try:
            yield backend
        finally:
            backend.close()

    @staticmethod
    def write(backend: Backend[Any], *batches: Batch) -> None:
        for batch in batches:
            backend.write(batch)
            assert json.loads(json.dumps(backend.memory)) == backend.memory, "memory has to be JSON"

    def check(self, tmp_path: Path, batches: Sequence[Batch], repeated: Sequence[Batch] = ()) -> None:
        """What is read back is what was sent; what was sent again may be there again, if that is said."""
        if not self.readable:
            return
        expected = Counter(self._expected(batches))
        found = Counter(self._comparable(point) for point in self.read_back(batches[0].run.run, tmp_path))
        missing = list((expected - found).elements())
        more = found - expected
        if not self.repeats_are_harmless:
            more -= Counter(self._expected(repeated))
        extra = list(more.elements())
        assert not missing, (
            f"{len(missing)} points are missing, such as {missing[:3]}; found {list(found)[:3]}"
        )
        assert not extra, f"{len(extra)} points are there that nobody sent, such as {extra[:3]}"

    def _expected(self, batches: Sequence[Batch]) -> list[tuple[object, ...]]:
        """The points of the batches as the class says that they can be read back."""
        kept: list[tuple[tuple[str, int], Point]] = []
        for batch in batches:
            place = (batch.run.attempt, batch.writer)
            for record in batch.records:
                if isinstance(record, Row):
                    kept.extend((place, point) for point in self._points(batch, record))
                elif isinstance(record, Event) and record.name == "rewind" and not self.keeps_superseded:
                    step = record.data["step"]
                    assert isinstance(step, int)
                    kept = [(at, point) for at, point in kept if at != place or point.step <= step]
        if not self.keeps_repeated_steps:
            points = [self._comparable(point) for _, point in kept]
            return list(
                {
                    (metric, step, *told): (metric, step, value, *told)
                    for metric, step, value, *told in points
                }.values()
            )
        return [self._comparable(point) for _, point in kept]

    def _points(self, batch: Batch, row: Row) -> Iterator[Point]:
        for name, stored in row.items():
            value = None if isinstance(stored, Mapping) else self.as_kept(stored)
            if isinstance(stored, Mapping):
                left_out = stored["type"] not in self.kept_types
            else:
                left_out = not self.keeps_nonfinite and not math.isfinite(stored)
            if not left_out:
                metric, context = name, tuple(sorted(row.context.items()))
                if "context" not in self.keeps:
                    metric = with_context(name, row.context)
                yield Point(metric, row.step, value, batch.run.version, batch.run.attempt, context)

    def _comparable(self, point: Point) -> tuple[object, ...]:
        value = "typed" if point.value is None else repr(float(point.value) + 0.0)
        told = [getattr(point, name) if name in self.keeps else None for name in ("version", "attempt")]
        context = tuple(point.context) if "context" in self.keeps else ()
        return (point.metric, int(point.step), value, *told, context)
