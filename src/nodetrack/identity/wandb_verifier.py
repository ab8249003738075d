"""Asks a W&B service, through `wandb.Api`, whether a run still exists.

What counts as GONE (everything else that is not a found run is UNKNOWN, promise P6):

- the service says that the run is not found (its own error message, with 404 or as a GraphQL error);
- it says that the run "was previously created and deleted" (409 or 410);
- it answers that there is no such run, and that the project is there. A missing project is no proof:
  credentials that may not see a private project get the same answer.

A 404 whose text is not about a run, such as a proxy's page, proves nothing either.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

from nodetrack.errors import MissingExtraError
from nodetrack.identity.verdict import RunFacts, Verdict, Verification

DEFAULT_TIMEOUT_SECONDS = 8.0
_CONNECT_TIMEOUT_SECONDS = 3.0
_STATUSES_THAT_CAN_MEAN_GONE = (200, 404, 409, 410)
_WAS_DELETED = "previously created and deleted"
_RUN_IS_GONE = re.compile(
    rf"\brun\b[^<]{{0,300}}\bnot found\b|could not find run|{_WAS_DELETED}", re.IGNORECASE | re.DOTALL
)


class _Run(Protocol):
    tags: list[str]
    config: Mapping[str, object]


class _Api(Protocol):
    """The part of `wandb.Api` that is used."""

    def run(self, path: str) -> _Run: ...

    def runs(self, path: str, *, filters: Mapping[str, object], per_page: int) -> list[_Run]: ...


class WandbVerifier:
    """The verdict of the service that `wandb` is set up for. Never prompts; answers within the timeout."""

    def __init__(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds

    def verify(self, run_id: str, project: str, entity: str | None) -> Verification:
        """See the class. Without an entity the account's default one is asked about."""
        try:
            import wandb  # noqa: F401 - imported here, so that a slow import does not eat up the timeout
        except ImportError:
            raise MissingExtraError("wandb", "wandb", "Verifying a W&B run") from None
        try:
            check_reachable()
        except ConnectionError as error:
            return Verification(Verdict.UNKNOWN, str(error))
        question = _Question(run_id, project, entity, self._timeout_seconds)
        # A daemon thread: wandb retries for longer than its own timeout, and a node cannot wait for that.
        asker = threading.Thread(target=question.ask, name="nodetrack-verify", daemon=True)
        asker.start()
        asker.join(self._timeout_seconds)
        return question.answer or Verification(
            Verdict.UNKNOWN, f"the service did not answer within {self._timeout_seconds:g} s"
        )


class _Question:
    """One question to the service; `answer` is set once it is known."""

    def __init__(self, run_id: str, project: str, entity: str | None, timeout_seconds: float) -> None:
        self._run_id = run_id
        self._project_path = f"{entity}/{project}" if entity else project
        self._timeout_seconds = timeout_seconds
        self.answer: Verification | None = None

    def ask(self) -> None:
        """Never raises: whatever comes is an answer."""
        try:
            self.answer = self._look_up()
        except Exception as error:
            self.answer = verdict_of(error)

    def _look_up(self) -> Verification:
        import wandb

        api = cast("_Api", wandb.Api(timeout=max(1, round(self._timeout_seconds))))
        try:
            run = api.run(f"{self._project_path}/{self._run_id}")
        except Exception as error:
            if _cause_name(error) != "RunNotFoundError":
                raise
            return self._confirm_missing(api)
        facts = RunFacts(tuple(run.tags or ()), dict(run.config or {}))
        return Verification(Verdict.EXISTS, f"the service has it in {self._project_path}", facts=facts)

    def _confirm_missing(self, api: _Api) -> Verification:
        """`api.run` says the same for a missing run and for a project that is missing or may not be seen."""
        try:
            found = len(api.runs(self._project_path, filters={"name": self._run_id}, per_page=1))
        except ValueError as error:
            return Verification(Verdict.UNKNOWN, f"{error}, or these credentials may not see it")
        if found:
            return Verification(Verdict.UNKNOWN, "the service lists the run, and does not find it")
        return Verification(Verdict.GONE, f"the service has no such run in {self._project_path}", looked=True)


def verdict_of(error: Exception) -> Verification:
    """What an error of the `wandb` package says about a run: GONE only if the service says so."""
    text = str(error).strip() or type(error).__name__
    status = _http_status(error)
    could_mean_gone = status is None or status in _STATUSES_THAT_CAN_MEAN_GONE
    if could_mean_gone and _RUN_IS_GONE.search(text):
        return Verification(Verdict.GONE, f"the service says: {_first_line(text)}", looked=True)
    code = f"HTTP {status}: " if status else ""
    return Verification(Verdict.UNKNOWN, f"{code}{_first_line(text)}")


def was_deleted(error: Exception) -> bool:
    """Whether `wandb.init` failed because the id is a deleted run's.

    Narrower than `verdict_of`: these errors put "run <id>" before whatever answered, which may be a proxy's
    "404 page not found".
    """
    return _WAS_DELETED in str(error)


def check_reachable() -> None:
    """Raises ConnectionError if there is no way in, where `wandb.init` would ask a person or wait long."""
    import wandb

    if not has_credentials():
        raise ConnectionError("no credentials: set WANDB_API_KEY or run `wandb login`")
    url = urlsplit(wandb.setup().settings.base_url)
    if url.hostname is None or _has_proxy():
        return
    address = (url.hostname, url.port or (443 if url.scheme == "https" else 80))
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"WANDB_BASE_URL {url.geturl()} cannot be reached: {error}") from error


def _has_proxy() -> bool:
    """Whether the way leads through a proxy, so that a direct connection tells nothing."""
    names = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
    return any(os.environ.get(name) or os.environ.get(name.lower()) for name in names)


def has_credentials() -> bool:
    """Whether `wandb` can sign in without asking someone at a terminal."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    settings = wandb.setup().settings
    return bool(settings.api_key) or _is_in_netrc(urlsplit(settings.base_url).netloc)


def _is_in_netrc(machine: str) -> bool:
    """Whether `wandb login` kept a key; the hosted service is known by its older name there too."""
    named = os.environ.get("NETRC")
    places = [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    machines = [machine, "api.wandb.ai"] if machine.startswith("api.") else [machine]
    for place in places:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if any(netrc.netrc(place).authenticators(name) for name in machines):
                return True
    return False


def _cause_name(error: Exception) -> str:
    """`wandb` wraps what happened in a CommError and keeps it as `exc`."""
    return type(getattr(error, "exc", None) or error).__name__


def _http_status(error: Exception) -> int | None:
    cause = getattr(error, "exc", None) or error
    response = getattr(cause, "response", None)
    for name in ("http_status", "status_code"):  # wandb-core's reply, requests' in older releases
        status = getattr(response, name, None)
        if isinstance(status, int) and status > 0:
            return status
    return None


def _first_line(text: str) -> str:
    return text.splitlines()[0][:300].rstrip(".")
