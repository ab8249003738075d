"""Which run a start continues: the whole decision table."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from nodetrack.errors import IdentityInUseError, RunExistsError, RunNotFoundError, UsageError
from nodetrack.identity.id_file import (
    SCHEMA_VERSION,
    Fingerprint,
    RunIdFile,
    RunIdRecord,
    TextRunIdFile,
    id_path,
)
from nodetrack.identity.take_up import TakenUp, take_up
from nodetrack.identity.verdict import JournalVerifier, Verdict, Verification

EXISTS = Verification(Verdict.EXISTS, "found")
GONE = Verification(Verdict.GONE, "was deleted", looked=True)
UNKNOWN = Verification(Verdict.UNKNOWN, "no answer within 5 s")
NOT_HERE = Verification(Verdict.UNKNOWN, "has no journal here", looked=True)


@dataclass
class Answers:
    """A verifier for these tests that answers as told."""

    answer: Verification = EXISTS
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def verify(self, run_id: str, project: str, entity: str | None) -> Verification:
        self.asked.append((run_id, project, entity))
        return self.answer


@dataclass
class Node:
    """A node's folder, and starts of it that end again (the lock is released)."""

    folder: Path
    uid: str = "3"

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.here("demo", "miner", self.uid)

    @property
    def file(self) -> RunIdFile:
        return RunIdFile(id_path(self.folder, "demo", "miner", self.uid))

    def start(self, answer: Verification = EXISTS, **arguments: object) -> TakenUp:
        taken = take_up(
            self.file,
            self.fingerprint,
            Answers(answer),
            folder=self.folder,
            **arguments,  # type: ignore[arg-type]  # each test names its own
        )
        if taken.lock is not None:
            taken.lock.release()
        return taken

    def write(self, run_id: str, **changes: object) -> bytes:
        record = RunIdRecord(run_id, self.fingerprint, str(self.folder), created_at="2026-01-01T00:00:00Z")
        self.file.write(msgspec.structs.replace(record, **changes))
        return self.file.path.read_bytes()

    def kept(self) -> dict[str, bytes]:
        """What lies beside the id file."""
        return {
            path.name: path.read_bytes() for path in self.file.path.parent.iterdir() if path != self.file.path
        }

    def record(self) -> RunIdRecord:
        record = self.file.read().record
        assert record is not None
        return record


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / ".nodetrack")


def test_a_first_start_gets_a_new_id_and_keeps_it(node: Node) -> None:
    taken = node.start()
    assert not taken.resumed
    assert taken.warnings == ()
    record = node.record()
    assert (record.id, record.fingerprint, record.previous_run) == (taken.run_id, node.fingerprint, None)
    assert record.folder == str(node.folder.absolute())


@pytest.mark.case("C004")
def test_a_restart_in_the_same_folder_has_the_same_id(node: Node) -> None:
    first = node.start()
    second = node.start(EXISTS)
    assert (second.run_id, second.resumed, second.warnings) == (first.run_id, True, ())
    assert node.record().verified_at is not None


@pytest.mark.case("C003")
def test_a_run_that_is_gone_is_replaced_at_once_and_linked(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    before = node.write("deleted1")
    taken = node.start(GONE)
    assert taken.run_id != "deleted1"
    assert not taken.resumed
    assert taken.previous_run == "deleted1"
    assert (node.record().id, node.record().previous_run) == (taken.run_id, "deleted1")
    assert node.kept() == {"miner-3.json.deleted1.bak": before}
    [warning] = caplog.messages
    assert "deleted1" in warning
    assert taken.run_id in warning
    assert taken.warnings == (warning,)


@pytest.mark.case("C005")
def test_an_unknown_verdict_costs_neither_the_id_nor_a_byte(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    before = node.write("abc123")
    written_at = node.file.path.stat().st_mtime_ns
    taken = node.start(UNKNOWN)
    assert (taken.run_id, taken.resumed) == ("abc123", True)
    assert node.file.path.read_bytes() == before
    assert node.file.path.stat().st_mtime_ns == written_at
    assert node.kept() == {}
    [warning] = caplog.messages
    assert "no answer within 5 s" in warning


@pytest.mark.case("C006")
def test_a_copied_id_file_of_another_node_gives_a_new_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Node(tmp_path / "one", "3"), Node(tmp_path / "two", "4")
    original = first.start()
    bytes_before = first.file.path.read_bytes()
    second.file.path.parent.mkdir(parents=True)
    shutil.copy(first.file.path, second.file.path)
    taken = second.start(EXISTS)
    assert taken.run_id != original.run_id
    assert not taken.resumed
    assert taken.previous_run is None
    assert "belongs to miner 3 of project demo" in caplog.messages[0]
    assert len(caplog.messages) == 1
    assert first.file.path.read_bytes() == bytes_before
    assert second.kept() == {f"miner-4.json.{original.run_id}.bak": bytes_before}
    assert second.start(EXISTS).run_id == taken.run_id


def test_a_node_that_moved_to_another_host_keeps_its_run(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nodetrack")
    elsewhere = msgspec.structs.replace(node.fingerprint, host="host-b")
    node.write("abc123", fingerprint=elsewhere)
    taken = node.start(EXISTS)
    assert (taken.run_id, taken.warnings) == ("abc123", ())
    assert any("host-b" in message for message in caplog.messages)
    assert node.record().fingerprint == node.fingerprint


@pytest.mark.parametrize("content", [b"", b"\x00\x01binary", b'{"id": "abc'])
def test_a_damaged_file_is_kept_aside_with_one_warning(
    node: Node, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    node.file.path.parent.mkdir(parents=True)
    node.file.path.write_bytes(content)
    taken = node.start()
    [(name, kept)] = node.kept().items()
    assert name.startswith("miner-3.json.damaged-")
    assert kept == content
    [warning] = caplog.messages
    assert name in warning
    assert node.record().id == taken.run_id


def test_a_file_of_a_newer_release_gives_its_id_and_is_left_alone(node: Node) -> None:
    before = node.write("abc123", schema_version=SCHEMA_VERSION + 1)
    for arguments in ({}, {"explicit_id": "abc123"}):
        assert node.start(EXISTS, **arguments).run_id == "abc123"
        assert node.file.path.read_bytes() == before


def test_a_file_replaced_while_the_node_runs_counts_at_the_next_start(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    running = take_up(node.file, node.fingerprint, Answers(), folder=node.folder)
    node.write("foreign9", fingerprint=Fingerprint("demo", "validator", "1", "host-b"))
    assert running.lock is not None
    assert running.lock.touch()
    running.lock.release()
    taken = node.start(EXISTS)
    assert taken.run_id not in ("foreign9", running.run_id)
    assert "belongs to validator 1" in caplog.messages[0]


def test_a_lock_replaced_while_the_node_runs_is_noticed(node: Node) -> None:
    running = take_up(node.file, node.fingerprint, Answers(), folder=node.folder)
    assert running.lock is not None
    running.lock.path.write_bytes(b"something else")
    assert not running.lock.touch()
    running.lock.release()
    assert running.lock.path.read_bytes() == b"something else"


# --- resume and explicit ids -------------------------------------------------------------------------


def test_must_without_a_file_finds_no_run(node: Node) -> None:
    with pytest.raises(RunNotFoundError, match="miner 3 of project demo"):
        node.start(resume="must")
    assert not node.file.path.exists()


@pytest.mark.parametrize("answer", [GONE, NOT_HERE])
def test_must_with_a_run_that_was_not_found_touches_nothing(node: Node, answer: Verification) -> None:
    before = node.write("abc123")
    with pytest.raises(RunNotFoundError, match="abc123"):
        node.start(answer, resume="must")
    with pytest.raises(RunNotFoundError, match="other9"):
        node.start(answer, resume="must", explicit_id="other9")
    assert node.file.path.read_bytes() == before
    assert node.kept() == {}


@pytest.mark.parametrize("arguments", [{}, {"explicit_id": "abc123"}])
def test_must_goes_on_when_nobody_answers(node: Node, arguments: dict[str, object]) -> None:
    """A dead network must not keep a node from starting."""
    node.write("abc123")
    taken = node.start(UNKNOWN, resume="must", **arguments)
    assert (taken.run_id, taken.resumed) == ("abc123", True)


def test_never_with_an_existing_id_is_refused(node: Node) -> None:
    with pytest.raises(RunExistsError, match="abc123"):
        node.start(EXISTS, resume="never", explicit_id="abc123")
    assert not node.file.path.exists()


def test_never_with_a_free_id_uses_it(node: Node) -> None:
    assert node.start(NOT_HERE, resume="never", explicit_id="abc123").run_id == "abc123"


def test_never_without_an_id_begins_anew_and_keeps_the_old_one(node: Node) -> None:
    before = node.write("abc123")
    taken = node.start(EXISTS, resume="never")
    assert taken.run_id != "abc123"
    assert taken.previous_run == "abc123"
    assert node.kept() == {"miner-3.json.abc123.bak": before}


@pytest.mark.parametrize("answer", [EXISTS, NOT_HERE, UNKNOWN])
def test_an_explicit_id_is_used_and_written(node: Node, answer: Verification) -> None:
    before = node.write("abc123")
    taken = node.start(answer, explicit_id="other9")
    assert (taken.run_id, taken.resumed) == ("other9", answer is EXISTS)
    assert taken.previous_run == "abc123"
    assert (node.record().id, node.record().previous_run) == ("other9", "abc123")
    assert node.kept() == {"miner-3.json.abc123.bak": before}


def test_an_explicit_id_that_cannot_be_one_is_the_callers_mistake(node: Node) -> None:
    with pytest.raises(UsageError, match="'a/b'"):
        node.start(explicit_id="a/b")
    with pytest.raises(UsageError, match="empty"):
        node.start(explicit_id="")


def test_words_that_are_not_known_are_the_callers_mistake(node: Node) -> None:
    with pytest.raises(UsageError, match="resume='yes'"):
        node.start(resume="yes")
    with pytest.raises(UsageError, match="on_conflict='kill'"):
        node.start(on_conflict="kill")


def test_the_verifier_is_asked_with_project_and_entity(node: Node) -> None:
    node.write("abc123")
    verifier = Answers(EXISTS)
    take_up(node.file, node.fingerprint, verifier, folder=node.folder, entity="team")
    assert verifier.asked == [("abc123", "demo", "team")]


# --- a second process --------------------------------------------------------------------------------


def test_a_second_process_of_the_node_is_refused(node: Node) -> None:
    take_up(node.file, node.fingerprint, Answers(), folder=node.folder)
    with pytest.raises(IdentityInUseError, match=f"process {os.getpid()} on {node.fingerprint.host}"):
        node.start()


@pytest.mark.parametrize("same", [True, False])
def test_a_second_process_may_have_a_run_of_its_own(
    node: Node, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = take_up(node.file, node.fingerprint, Answers(), folder=node.folder)
    before = node.file.path.read_bytes()
    beside = node.start(on_conflict="new", explicit_id=first.run_id if same else None)
    assert beside.run_id != first.run_id
    assert beside.lock is None
    assert node.file.path.read_bytes() == before
    [warning] = caplog.messages
    assert str(os.getpid()) in warning


def test_a_refused_start_gives_the_lock_back(node: Node) -> None:
    with pytest.raises(RunNotFoundError):
        node.start(resume="must")
    assert node.start().lock is not None


# --- folders that refuse -----------------------------------------------------------------------------

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder outside pytest's own (which only its owner may enter)."""
    folder = Path(tempfile.mkdtemp(prefix="nodetrack-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def without_privileges() -> Iterator[None]:
    """Root writes into read-only folders too, so a test that runs as root becomes nobody for its while."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    yield
    if was_root:
        os.seteuid(0)


@pytest.fixture
def read_only(open_folder: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    node = Node(open_folder)
    node.start()  # the folder and the file are there from better days
    ids = node.file.path.parent
    ids.chmod(0o555)
    request.getfixturevalue("without_privileges")
    yield node
    os.seteuid(os.getuid())
    ids.chmod(0o755)


def test_a_read_only_folder_costs_a_warning_and_not_the_run(
    read_only: Node, caplog: pytest.LogCaptureFixture
) -> None:
    taken = read_only.start(EXISTS)
    assert (taken.run_id, taken.resumed, taken.lock) == (read_only.record().id, True, None)
    [warning] = caplog.messages
    assert "cannot be written (Permission denied)" in warning
    assert "id=" in warning


def test_a_read_only_folder_and_a_run_that_is_gone(read_only: Node) -> None:
    taken = read_only.start(GONE)
    assert taken.run_id != read_only.record().id
    assert taken.previous_run == read_only.record().id


def test_an_unreadable_file_is_left_as_it_is(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """A directory in the place of the file: nothing is known about what it is, so it is not moved."""
    node.file.path.mkdir(parents=True)
    taken = node.start()
    assert taken.run_id
    assert node.file.path.is_dir()
    assert node.kept() == {}
    [warning] = caplog.messages
    assert "Is a directory" in warning


def test_a_file_in_the_place_of_the_folder_costs_a_warning_and_not_the_run(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.folder.parent.mkdir(exist_ok=True)
    node.folder.write_text("not a folder")
    assert node.start().run_id
    assert "cannot be written" in caplog.messages[0]


# --- the file of initialize_wandb ----------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"abc123", b"abc123\n"])
def test_a_node_with_a_file_of_old_carries_on(tmp_path: Path, content: bytes) -> None:
    file = TextRunIdFile(tmp_path / "wandb" / "wandb_run_id_M3.txt")
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    fingerprint = Fingerprint.here("demo", "M", "3")
    for answer in (UNKNOWN, EXISTS):
        taken = take_up(file, fingerprint, Answers(answer), folder=tmp_path)
        assert (taken.run_id, taken.resumed) == ("abc123", True)
        assert taken.lock is not None
        taken.lock.release()
        assert file.path.read_bytes() == (content if answer is UNKNOWN else b"abc123")


# --- what it is built from -----------------------------------------------------------------------------

AUDITED = """
    import sys
    used = []
    sys.addaudithook(lambda event, _: used.append(event) if event.startswith(("mmap.", "fcntl.")) else None)
    from pathlib import Path
    from nodetrack.identity.id_file import Fingerprint, RunIdFile
    from nodetrack.identity.take_up import take_up
    from nodetrack.identity.verdict import JournalVerifier
    folder = Path(sys.argv[1])
    for _ in range(3):
        taken = take_up(RunIdFile(folder / "p/ids/miner-3.json"), Fingerprint.here("p", "miner", "3"),
                        JournalVerifier(folder), folder=folder)
        taken.lock.touch()
        taken.lock.release()
        (folder / "p/runs" / taken.run_id).mkdir(parents=True, exist_ok=True)
    print(used)
    import fcntl, os
    fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)
    assert used, "the hook sees locks"
"""


@pytest.mark.case("C038")
def test_neither_mmap_nor_file_locks_are_used(tmp_path: Path) -> None:
    """They fail or lie on NFS, Lustre and Weka."""
    command = [sys.executable, "-c", textwrap.dedent(AUDITED), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.case("C004")
def test_with_the_journals_verifier_a_deleted_run_is_followed_by_a_linked_one(tmp_path: Path) -> None:
    node = Node(tmp_path)
    verifier = JournalVerifier(tmp_path)
    runs = tmp_path / "demo" / "runs"

    def start() -> TakenUp:
        taken = take_up(node.file, node.fingerprint, verifier, folder=tmp_path)
        (runs / taken.run_id).mkdir(parents=True, exist_ok=True)
        assert taken.lock is not None
        taken.lock.release()
        return taken

    first = start()
    assert start().run_id == first.run_id
    (runs / "another").mkdir()
    (runs / first.run_id).rmdir()
    second = start()
    assert second.previous_run == first.run_id
    assert start().run_id == second.run_id


def test_a_run_has_begun_before_its_id_is_written(node: Node) -> None:
    """Killed in between, the next start must not take the run for a deleted one."""
    seen: list[tuple[str, bool]] = []
    taken = node.start(begun=lambda run_id: seen.append((run_id, node.file.path.exists())))
    assert seen == [(taken.run_id, False)]


def test_a_folder_below_bytes_that_are_no_text_is_known_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path / os.fsdecode(b"caf\xe9"))
    assert node.start().run_id == node.start().run_id
    assert caplog.messages == []


def test_what_is_said_of_a_folder_that_is_no_text_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("not a folder")
    node = Node(tmp_path / os.fsdecode(b"caf\xe9"))
    assert "caf\\udce9" in node.start().warnings[0]


# -- a disk that is full at the start and has room later


@pytest.fixture
def full(node: Node) -> TakenUp:
    """A start in a folder that refuses everything; afterwards there is room."""
    node.folder.parent.mkdir(exist_ok=True)
    node.folder.write_text("in the way")
    taken = node.start()
    assert taken.retry is not None
    assert taken.retry() is None
    node.folder.unlink()
    return taken


def test_what_the_disk_refused_is_made_up_for(node: Node, full: TakenUp) -> None:
    assert full.lock is None
    assert full.retry is not None
    lock = full.retry()
    assert lock is not None
    assert lock.is_held()
    assert node.record().id == full.run_id
    with pytest.raises(IdentityInUseError):
        node.start()
    lock.release()
    assert node.start().run_id == full.run_id


def test_an_id_that_another_start_wrote_meanwhile_is_left(
    node: Node, full: TakenUp, caplog: pytest.LogCaptureFixture
) -> None:
    other = node.start().run_id
    assert full.retry is not None
    assert full.retry() is not None
    assert node.record().id == other
    assert full.run_id in caplog.messages[-1]


def test_a_process_that_is_the_node_by_now_keeps_the_lock(
    node: Node, full: TakenUp, caplog: pytest.LogCaptureFixture
) -> None:
    other = take_up(node.file, node.fingerprint, Answers(), folder=node.folder)
    assert full.retry is not None
    assert full.retry() is None
    said = len(caplog.messages)
    assert full.retry() is None
    assert len(caplog.messages) == said
    assert other.lock is not None
    assert other.lock.is_held()


def test_a_lock_is_given_back_when_the_id_still_cannot_be_written(
    node: Node, full: TakenUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    assert full.retry is not None
    with monkeypatch.context() as patched:
        patched.setattr(RunIdFile, "write", refuse)
        assert full.retry() is None
    assert node.start().lock is not None


def test_the_id_of_a_run_that_is_gone_is_replaced_once_there_is_room(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    before = node.write("before")
    with monkeypatch.context() as patched:
        patched.setattr(RunIdFile, "archive", refuse)
        taken = node.start(GONE)
    assert node.record().id == "before"
    assert taken.retry is not None
    taken.retry()
    assert (node.record().id, node.record().previous_run) == (taken.run_id, "before")
    assert before in node.kept().values()


def test_a_start_that_was_refused_nothing_has_nothing_to_make_up_for(node: Node) -> None:
    assert node.start().retry is None


def test_a_deleted_run_below_bytes_that_are_no_text_is_followed_by_a_linked_one(tmp_path: Path) -> None:
    node = Node(tmp_path / os.fsdecode(b"caf\xe9"))
    (node.folder / "demo" / "runs" / "another").mkdir(parents=True)
    first = node.start().run_id
    taken = take_up(node.file, node.fingerprint, JournalVerifier(node.folder), folder=node.folder)
    assert taken.previous_run == first
