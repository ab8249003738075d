"""How `initialize_wandb` uses W&B: whether at all, in which mode, and who verifies an id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal, cast

from nodetrack.errors import MissingExtraError
from nodetrack.identity.verdict import JournalVerifier, Verdict, Verification, Verifier
from nodetrack.identity.wandb_verifier import DEFAULT_TIMEOUT_SECONDS, WandbVerifier
from nodetrack.machine import find_rank
from nodetrack.settings import Settings

Mode = Literal["online", "offline", "disabled"]

_OLD_MODE_NAMES: Final = {"run": "online", "dryrun": "offline", "shared": "online"}


def require_wandb() -> None:
    """Raises MissingExtraError unless wandb can be imported."""
    try:
        import wandb  # noqa: F401 - only whether it is there
    except ImportError:
        raise MissingExtraError("wandb", "wandb", "initialize_wandb") from None


def chosen_mode(mode: Mode | None, settings: Settings) -> Mode:
    """The argument, else WANDB_MODE, else nodetrack's setting; on ranks other than 0 always "disabled"."""
    if find_rank(settings.rank).rank:
        return "disabled"
    given = mode or os.environ.get("WANDB_MODE") or settings.mode
    given = _OLD_MODE_NAMES.get(given, given)
    return cast("Mode", given) if given in ("online", "offline", "disabled") else "online"


def verifier_for(mode: Mode, settings: Settings, init_timeout: float) -> Verifier:
    """Who is asked whether a run still exists."""
    if mode == "offline":
        return OfflineVerifier(settings.dir.absolute())
    return WandbVerifier(min(init_timeout, DEFAULT_TIMEOUT_SECONDS))


class OfflineVerifier:
    """Without a service only the journal can be asked, and its no does not count: GONE is the service's."""

    def __init__(self, folder: Path) -> None:
        self._journal = JournalVerifier(folder)

    def verify(self, run_id: str, project: str, entity: str | None) -> Verification:
        """See the class."""
        verification = self._journal.verify(run_id, project, entity)
        if verification.verdict is Verdict.GONE:
            return Verification(Verdict.UNKNOWN, f"{verification.reason}, and W&B is offline", looked=True)
        return verification


def described(error: Exception) -> str:
    """An error in one line, for a warning."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
