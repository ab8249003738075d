"""The active run and the module-level surface: `nodetrack.log`, `summary`, `config`, `finish`, `run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, cast

from nodetrack.errors import NoActiveRunError

if TYPE_CHECKING:
    from nodetrack.live_run import Run

_active: Run | None = None


def active_run() -> Run | None:
    """The run that `init` returned last, None before the first and after `finish`."""
    return None if _active is None or _active.finished else _active


def set_active(run: Run | None) -> None:
    """Make `run` the one that the module-level functions speak to."""
    global _active
    _active = run


def require_run(call: str) -> Run:
    """The active run; raises NoActiveRunError when there is none."""
    if _active is None:
        raise NoActiveRunError(call)
    return _active


def log(
    values: Mapping[str, object],
    step: int | None = None,
    *,
    context: Mapping[str, object] | None = None,
    commit: bool | None = None,
    defer: bool = False,
) -> None:
    """`Run.log` of the active run."""
    require_run("log").log(values, step, context=context, commit=commit, defer=defer)


def finish(exit_code: int = 0) -> None:
    """`Run.finish` of the active run; harmless without one, so that a script may end with it."""
    if _active is not None:
        _active.finish(exit_code)


class ActiveMapping(MutableMapping[str, object]):
    """`nodetrack.summary` and `nodetrack.config`: may be imported before `init`, and speak to the active
    run.
    """

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    _name: str

    def _target(self) -> MutableMapping[str, object]:
        return cast("MutableMapping[str, object]", getattr(require_run(self._name), self._name))

    def __getitem__(self, key: str) -> object:
        return self._target()[key]

    def __setitem__(self, key: str, value: object) -> None:
        self._target()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._target()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._target())

    def __len__(self) -> int:
        return len(self._target())

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # inspection, copying and doctest ask; they are no use of the run
            raise AttributeError(name)
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._target(), name, value)

    def update(self, *others: object, **more: object) -> None:
        """`update` of the active run's mapping."""
        getattr(self._target(), "update")(*others, **more)  # noqa: B009 - both take more than MutableMapping says

    def __repr__(self) -> str:
        return repr(self._target()) if _active is not None else f"<nodetrack.{self._name}: no active run>"


summary = ActiveMapping("summary")
config = ActiveMapping("config")
