"""Does a run still exist? Three answers, because "we could not ask" must never cost a run its id.

Promise P6: an id is given up only on GONE, and GONE is said only by someone who looked and knows.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nodetrack.identity.id_file import IdFileState, RunIdFile, file_name_part, folder_text
from nodetrack.machine import this_host


class Verdict(enum.Enum):
    """What is known about a run id."""

    EXISTS = "exists"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RunFacts:
    """What a service told about a run that it has."""

    tags: tuple[str, ...] = ()
    config: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Verification:
    """A verdict and its reason in words, fit for a warning.

    `looked` tells the two kinds of UNKNOWN apart: True when the place was searched and the run is not there
    (it may live elsewhere), False when nobody answered. `facts` come with EXISTS, from a service that
    tells them.
    """

    verdict: Verdict
    reason: str
    looked: bool = False
    facts: RunFacts | None = None

    @property
    def found_nothing(self) -> bool:
        """Whether someone searched for the run and did not find it."""
        return self.verdict is Verdict.GONE or (self.verdict is Verdict.UNKNOWN and self.looked)


class Verifier(Protocol):
    """Whoever can say whether a run exists. Returns in bounded time and never raises."""

    def verify(self, run_id: str, project: str, entity: str | None) -> Verification:
        """What is known about the run `run_id` of `project` (of `entity`, where the service has entities)."""
        ...


class JournalVerifier:
    """Looks for the run's folder under `folder` (`.nodetrack`); the entity plays no part.

    GONE needs proof that the run was here: its folder is missing although the project has others, and an id
    file says that it was created on this host in this very folder. Anything less is UNKNOWN.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def verify(self, run_id: str, project: str, entity: str | None) -> Verification:  # noqa: ARG002 - the protocol's
        """See the class."""
        project_folder = self._folder / file_name_part(project)
        runs = project_folder / "runs"
        try:
            if (runs / run_id).is_dir():
                return Verification(Verdict.EXISTS, f"its journal is in {runs / run_id}")
            if not runs.is_dir():
                return Verification(Verdict.UNKNOWN, f"there are no runs in {runs}", looked=True)
            created_here = self._was_created_here(run_id, project_folder / "ids")
        except OSError as error:
            return Verification(Verdict.UNKNOWN, f"{runs} cannot be read: {error.strerror or error}")
        if created_here:
            return Verification(Verdict.GONE, f"its folder {runs / run_id} was removed", looked=True)
        return Verification(Verdict.UNKNOWN, f"it has no journal in {runs}", looked=True)

    def _was_created_here(self, run_id: str, ids: Path) -> bool:
        here = folder_text(self._folder)
        for path in ids.glob("*.json"):
            reading = RunIdFile(path).read()
            record = reading.record if reading.state is IdFileState.READABLE else None
            if record is None or record.id != run_id or record.fingerprint is None:
                continue
            if record.fingerprint.host == this_host().hostname and record.folder == here:
                return True
        return False
