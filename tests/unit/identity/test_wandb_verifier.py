"""The real `wandb.Api` against a fake service on the loopback: which answers cost an id, and which do not."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodetrack.identity import wandb_verifier
from nodetrack.identity.verdict import Verdict, Verification
from nodetrack.identity.wandb_verifier import WandbVerifier, verdict_of

wandb = pytest.importorskip("wandb")

# wandb itself leaves sockets and loops to the garbage collector; they are not ours to judge.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def fresh_wandb() -> Iterator[None]:
    """`wandb` keeps its settings for the life of a process; each test starts without."""
    wandb.teardown()
    yield
    wandb.teardown()


def verify(timeout_seconds: float = 20.0) -> Verification:
    return WandbVerifier(timeout_seconds).verify("abc123", "demo", "team")


def test_a_run_that_the_service_has_exists_and_brings_its_facts(service) -> None:
    verification = verify()
    assert verification.verdict is Verdict.EXISTS
    assert verification.facts is not None
    assert verification.facts.tags == ("v0.1.0", "mine")
    assert verification.facts.config["version_history"] == ["0.1.0"]


@pytest.mark.case("C003")
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "run team/demo/abc123 not found during getRun"),
        (200, "could not find run team/demo/abc123"),
        (409, "run abc123 was previously created and deleted; try a new run name"),
        (410, "run abc123 was previously created and deleted; try a new run name"),
    ],
)
def test_a_run_that_the_service_calls_missing_or_deleted_is_gone(service, status: int, message: str) -> None:
    service.refuses(status, message)
    verification = verify()
    assert verification.verdict is Verdict.GONE
    assert message.rstrip(".") in verification.reason


def test_a_null_run_in_a_project_that_is_there_is_gone(service) -> None:
    service.answers({"project": {"run": None}})
    assert verify().verdict is Verdict.GONE


def test_a_project_that_cannot_be_seen_costs_no_id(service) -> None:
    """The service answers null as well when the credentials are another team's."""
    service.answers({"project": None})
    verification = verify()
    assert verification.verdict is Verdict.UNKNOWN
    assert "Could not find project demo" in verification.reason


@pytest.mark.case("C005")
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "user is not logged in"),
        (403, "permission denied"),
        (404, "project not found"),
        (404, "<html><h1>404 Not Found</h1></html>"),
        (403, "run abc123 not found"),
    ],
)
def test_what_the_service_refuses_costs_no_id(service, status: int, message: str) -> None:
    service.refuses(status, message)
    verification = verify()
    assert verification.verdict is Verdict.UNKNOWN
    assert f"HTTP {status}" in verification.reason
    assert message in verification.reason


@pytest.mark.case("C005")
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_service_in_trouble_costs_no_id(service, status: int) -> None:
    service.refuses(status, "run abc123 not found")
    assert verify(1.5).verdict is Verdict.UNKNOWN


@pytest.mark.case("C005")
def test_a_service_that_never_answers_costs_no_id_and_a_bounded_time(service) -> None:
    service.hangs = True
    verification = verify(1.0)
    assert verification.verdict is Verdict.UNKNOWN
    assert "answer" in verification.reason or "respond" in verification.reason


def test_refused_credentials_cost_no_id(service) -> None:
    service.viewer_status = 401
    assert verify(3.0).verdict is Verdict.UNKNOWN


def test_a_service_that_is_not_there_costs_no_id(service, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    verification = verify()
    assert verification.verdict is Verdict.UNKNOWN
    assert f"WANDB_BASE_URL http://127.0.0.1:{port} cannot be reached" in verification.reason


def test_behind_a_proxy_only_the_proxy_can_tell(service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", service.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("went around the proxy"))
    wandb_verifier.check_reachable()


def test_an_answer_that_is_no_json_costs_no_id(service) -> None:
    service.status, service.body = 200, b"<html>sign in to the hotel's network</html>"
    assert verify(3.0).verdict is Verdict.UNKNOWN


def test_a_run_counts_as_deleted_only_in_the_services_own_words() -> None:
    deleted = "Timed out while retrying: HTTP 409: run abc123 was previously created and deleted"
    assert wandb_verifier.was_deleted(wandb.errors.CommError(deleted))
    proxy = "Failed to get resume status for run abc123: returned error 404: 404 page not found"
    assert not wandb_verifier.was_deleted(wandb.errors.CommError(proxy))


def test_an_error_without_a_word_still_has_a_reason() -> None:
    assert verdict_of(TimeoutError()) == Verification(Verdict.UNKNOWN, "TimeoutError")


NO_KEY = """
    from nodetrack.identity.wandb_verifier import WandbVerifier
    verification = WandbVerifier(5).verify("abc123", "demo", None)
    print(verification.verdict.name, verification.reason)
"""


@pytest.mark.case("C028")
def test_without_credentials_nobody_is_asked_and_nothing_is_read_from_the_terminal(tmp_path: Path) -> None:
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NO_KEY)],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("UNKNOWN no credentials: set WANDB_API_KEY")


def test_credentials_in_a_netrc_file_count(tmp_path: Path, service, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    monkeypatch.delenv("WANDB_API_KEY")
    assert not wandb_verifier.has_credentials()
    file.write_text("this is not a netrc file")
    assert not wandb_verifier.has_credentials()
    file.write_text(f"machine {service.url.removeprefix('http://')}\n  login user\n  password {'k' * 40}\n")
    assert wandb_verifier.has_credentials()
    assert verify().verdict is Verdict.EXISTS
