"""`run.summary` and `run.config`: mappings that write what the user sets to the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import cast

from nodetrack.plain import plain_config
from nodetrack.records import JsonValue


class Summary(MutableMapping[str, object]):
    """One value a metric: what the user set, else the metric's own summary (last value by default).

    Setting an entry writes it to the journal. A deleted entry falls back to the metric's own summary.
    """

    def __init__(
        self,
        explicit: dict[str, object],
        measured: Callable[[], Mapping[str, object]],
        write: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._explicit = explicit
        self._measured = measured
        self._write = write

    def _all(self) -> dict[str, object]:
        return {**self._measured(), **self._explicit}

    def __getitem__(self, key: str) -> object:
        if key in self._explicit:
            return self._explicit[key]
        return self._measured()[key]

    def __setitem__(self, key: str, value: object) -> None:
        self._set({key: value})

    def __delitem__(self, key: str) -> None:
        self._write({key: None})
        del self._explicit[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def update(self, *others: object, **more: object) -> None:
        """Set several entries with one record."""
        self._set(
            {
                key: value
                for other in (*others, more)
                for key, value in dict(cast("Mapping[str, object]", other)).items()
            }
        )

    def _set(self, entries: Mapping[str, object]) -> None:
        self._write(entries)
        self._explicit.update(entries)

    def __repr__(self) -> str:
        return repr(self._all())


class Config(MutableMapping[str, object]):
    """What the user set for this attempt, readable by key and by attribute; a change is journalled.

    Values read back are the user's own, also where the journal and the backends get them masked.
    """

    def __init__(self, values: Mapping[str, object], write: Callable[[Mapping[str, object]], None]) -> None:
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_write", write)

    _values: dict[str, object]
    _write: Callable[[Mapping[str, object]], None]

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __setitem__(self, key: str, value: object) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        del self._values[key]
        self._write(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> object:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"The config has no {name!r}; it has {', '.join(self._values) or 'nothing'}."
            ) from None

    def __setattr__(self, name: str, value: object) -> None:
        self.update({name: value})

    def update(  # type: ignore[override]  # takes namespaces too, as wandb does
        self,
        *others: object,
        allow_val_change: bool | None = None,  # noqa: ARG002 - wandb has it
        **more: object,
    ) -> None:
        """Set several values with one record. `allow_val_change` is wandb's and not needed: a change is a new
        version of the config, never an error.
        """
        changed = dict(self._values)
        for other in (*others, more):
            changed.update(other if isinstance(other, Mapping) else plain_config(other))
        if changed != self._values:
            self._write(changed)
            self._values.clear()
            self._values.update(changed)

    def setdefaults(self, values: Mapping[str, object]) -> None:
        """Set what is not set yet."""
        self.update({key: value for key, value in values.items() if key not in self._values})

    def as_dict(self) -> dict[str, object]:
        """A copy as a plain dict."""
        return dict(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


def differences(
    before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]
) -> dict[str, list[JsonValue]]:
    """What changed between two configs: dotted key → [value before, value after]; None for an absent one."""
    changed: dict[str, list[JsonValue]] = {}
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed.update({f"{key}.{inner}": pair for inner, pair in differences(old, new).items()})
        elif old != new:
            changed[key] = [old, new]
    return changed
