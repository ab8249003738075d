"""What a run says of itself: who it is, where it stands, and the labels that may be changed at any time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nodetrack.records import Kind
from nodetrack.run_state import RunState, plain_values
from nodetrack.run_summary import Config, Summary

if TYPE_CHECKING:
    from nodetrack.attempt import Attempt


class RunFace:
    """The half of `live_run.Run` that is read; that one adds what is logged, and the end."""

    _attempt: Attempt
    _state: RunState

    @property
    def summary(self) -> Summary:
        """One value a metric: the last by default. Set an entry to keep your own."""
        state = self._state

        def measured() -> dict[str, object]:
            with state.journal.lock:
                return state.measured_summary()

        def write(entries: Mapping[str, object]) -> None:
            with self._open("summary"):
                state.record(Kind.SUMMARY, plain_values(entries))

        return Summary(state.summary, measured, write)

    @property
    def config(self) -> Config:
        """What this attempt was configured with. A change is journalled as a new version of the config."""
        return self._attempt.config

    @property
    def id(self) -> str:
        """The run's id: it survives restarts, code versions and machines."""
        return self._state.identity.run

    @property
    def attempt(self) -> str:
        """The id of this process start."""
        return self._state.identity.attempt

    @property
    def project(self) -> str:
        """The project's name."""
        return self._state.identity.project

    @property
    def entity(self) -> str | None:
        """The team or account, where a service has them."""
        return self._state.identity.entity

    @property
    def role(self) -> str:
        """What the node does."""
        return self._state.identity.role

    @property
    def uid(self) -> str:
        """The node's number or name within its role."""
        return self._state.identity.uid

    @property
    def environment(self) -> str:
        """`prod`, or the word for trial runs."""
        return self._state.identity.environment

    @property
    def version(self) -> str:
        """The version of the code, found at the start of the process and stamped on every row."""
        return self._state.identity.version

    @property
    def group(self) -> str | None:
        """The name shared by runs that belong together."""
        return self._state.identity.group

    @property
    def job_type(self) -> str | None:
        """The kind of job."""
        return self._state.identity.job_type

    @property
    def previous_run(self) -> str | None:
        """The run that this one replaced, if it was gone."""
        return self._state.identity.previous_run

    @property
    def folder(self) -> Path:
        """The run's folder, with one folder an attempt in it."""
        return self._state.identity.folder

    @property
    def dir(self) -> str:
        """This attempt's folder, as text, as in wandb."""
        return str(self._state.identity.attempt_folder)

    @property
    def url(self) -> str | None:
        """Where the run can be looked at in a browser; None where no backend has such a place."""
        delivery = self._state.delivery
        answers = delivery.answers.values() if delivery is not None else ()
        return next((answer.url for answer in [*answers] if answer.url is not None), None)

    @property
    def step(self) -> int:
        """One past the highest step logged so far in this run, over all attempts; 0 before the first row."""
        with self._state.journal.lock:
            return self._state.step

    @property
    def starting_step(self) -> int:
        """`step` as it was when this attempt began."""
        return self._attempt.starting_step

    @property
    def resumed(self) -> bool:
        """Whether the run has earlier attempts."""
        return self._attempt.resumed

    @property
    def disabled(self) -> bool:
        """Whether this run records nothing: another rank logs, or `mode="disabled"`."""
        return self._state.disabled

    @property
    def finished(self) -> bool:
        """Whether `finish` was called."""
        return self._state.finished

    @property
    def name(self) -> str:
        """The display name."""
        return self._attempt.labels.name

    @name.setter
    def name(self, name: str) -> None:
        self._label(name=name)

    @property
    def notes(self) -> str | None:
        """Free text about the run."""
        return self._attempt.labels.notes

    @notes.setter
    def notes(self, notes: str | None) -> None:
        self._label(notes=notes)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags; assign to replace them, `run.tags += ("stable",)` to add."""
        return self._attempt.labels.tags

    @tags.setter
    def tags(self, tags: Iterable[str]) -> None:
        self._label(tags=(tags,) if isinstance(tags, str) else tuple(tags))

    def __repr__(self) -> str:
        identity = self._state.identity
        version = f"version {identity.version}, project {identity.project}"
        return f"<nodetrack run {identity.run}: {self.name}, {version}>"

    # -- inside --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open(self, call: str) -> Iterator[RunState]:
        """The state, locked; raises RunFinishedError after `finish`."""
        state = self._state
        with state.journal.lock:
            state.require_open(call)
            yield state
        state.say()

    def _label(self, **fields: object) -> None:
        with self._open("set"):
            self._attempt.set_labels(fields)
