"""The summary of a run: the last value of each metric, or what `define_metric` asked for instead.

The same code runs in the process that logs and in whoever reads the journal, so both agree.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from typing import Final, Literal, get_args

from nodetrack.records import StoredValue

SummaryKind = Literal["last", "min", "max", "mean", "first", "none"]
SUMMARY_KINDS: Final[tuple[str, ...]] = get_args(SummaryKind)


class Aggregates:
    """Keeps the summary of metrics that have a rule; the last value of others is the caller's affair.

    A rule's name may be a pattern, `val/*`; the rule given last that fits decides. Values that are not
    numbers or not finite count for `last` and `first` only.
    """

    def __init__(self) -> None:
        self._rules: dict[str, SummaryKind] = {}
        self._state: dict[str, tuple[float, int]] = {}
        self._kinds: dict[str, SummaryKind] = {}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def define(self, name: str, kind: SummaryKind) -> None:
        """Add a rule. Only values seen from now on count."""
        self._rules[name] = kind
        self._kinds.clear()

    def kind(self, name: str) -> SummaryKind:
        """How the metric is summarised: "last" where no rule fits."""
        kind = self._kinds.get(name)
        if kind is None:
            fitting = [
                rule for rule in reversed(self._rules) if rule == name or fnmatch.fnmatchcase(name, rule)
            ]
            kind = self._kinds[name] = self._rules[fitting[0]] if fitting else "last"
        return kind

    def see(self, values: Iterable[tuple[str, StoredValue]]) -> None:
        """Take in one row."""
        for name, value in values:
            kind = self.kind(name)
            if kind in ("last", "none") or not isinstance(value, int | float):
                continue
            if kind == "first" or math.isfinite(value):
                self._add(name, kind, value)

    def _add(self, name: str, kind: SummaryKind, value: float) -> None:
        number, count = self._state.get(name, (value, 0))
        if kind == "min":
            number = min(number, value)
        elif kind == "max":
            number = max(number, value)
        elif kind == "mean":
            number += (value - number) / (count + 1)
        self._state[name] = (number, count + 1)

    def value(self, name: str, last: StoredValue) -> StoredValue | None:
        """The summary of a metric whose last value is `last`; None when it shall have none."""
        kind = self.kind(name)
        if kind == "last":
            return last
        return self._state[name][0] if kind != "none" and name in self._state else None
