"""What `initialize_wandb` returns when W&B cannot be had: a run that journals, with the surface of wandb's.

Training code goes on as written: `run.log`, `wandb.log`, `run.summary`, `wandb.run.id` work. What needs the
service, such as `log_artifact`, does nothing, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, cast

from nodetrack.live_run import Run
from nodetrack.wandb_rows import WandbRows

_OWN: Final = frozenset({"nodetrack_run", "_rows", "_told", "_replaced", "_at_end"})
_MODULE_NAMES: Final = ("run", "log", "config", "summary", "define_metric", "alert")

_log = logging.getLogger("nodetrack")


class StandIn:
    """A wandb run without W&B. Attributes are the journal run's; `nodetrack_run` is that run."""

    nodetrack_run: Run

    def __init__(self, journal: Run, at_end: Callable[[], None]) -> None:
        rows = WandbRows(journal, None)
        own = {"nodetrack_run": journal, "_at_end": at_end, "_rows": rows, "_told": set(), "_replaced": {}}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    _at_end: Callable[[], None]
    _rows: WandbRows
    _told: set[str]
    _replaced: dict[str, object]

    def log(
        self,
        data: Mapping[str, object],
        step: int | None = None,
        commit: bool | None = None,
        sync: bool | None = None,
    ) -> None:
        """Journals the row."""
        self._rows.log(data, step, commit, sync)

    def define_metric(self, name: str, step_metric: object = None, **_wandb_only: object) -> None:
        """Journals how a metric is plotted; wandb's further arguments are for its own page."""
        self.nodetrack_run.define_metric(name, step_metric if isinstance(step_metric, str) else None)

    def alert(self, title: str, text: str = "", **_wandb_only: object) -> None:
        """Journals that something needs a person's attention."""
        self.nodetrack_run.alert(title, text)

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:  # noqa: ARG002 - wandb's
        """Ends the run, and gives the names of the module `wandb` back."""
        self._leave_module()
        self.nodetrack_run.finish(exit_code or 0)
        self._at_end()

    def become_active(self) -> None:
        """Let `wandb.log`, `wandb.run` and their like reach this run, unless another run is active."""
        import wandb

        if wandb.run is not None:
            return
        here = {"run": self, "config": self.nodetrack_run.config, "summary": self.nodetrack_run.summary}
        for name in _MODULE_NAMES:
            self._replaced[name] = getattr(wandb, name)
            setattr(wandb, name, here.get(name) or getattr(self, name))

    def _leave_module(self) -> None:
        import wandb

        if cast("object", wandb.run) is self:
            for name, before in self._replaced.items():
                setattr(wandb, name, before)

    def __getattr__(self, name: str) -> object:
        if not name.startswith("_"):
            if hasattr(self.nodetrack_run, name):
                return getattr(self.nodetrack_run, name)
            return self._nothing(name)
        raise AttributeError(name)

    def _nothing(self, name: str) -> Callable[..., None] | None:
        """In the place of what only W&B can do: a function that does nothing, or None for a property."""
        import wandb

        if not hasattr(wandb.Run, name):
            raise AttributeError(f"A wandb run has no attribute {name!r}.")
        if name not in self._told:
            self._told.add(name)
            _log.warning(
                "run.%s does nothing, because run %s goes on without W&B.", name, self.nodetrack_run.id
            )
        return (lambda *_, **__: None) if callable(getattr(wandb.Run, name)) else None

    def __setattr__(self, name: str, value: object) -> None:
        target = self if name in _OWN or not hasattr(Run, name) else self.nodetrack_run
        object.__setattr__(target, name, value)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_module()
        self.nodetrack_run.__exit__(kind, error, trace)
        self._at_end()
