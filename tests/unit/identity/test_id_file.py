"""The run-id file: whole at every instant, read without trust, never lost."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.identity.id_file import (
    SCHEMA_VERSION,
    Fingerprint,
    IdFileState,
    RunIdFile,
    RunIdRecord,
    TextRunIdFile,
    check_run_id,
    file_name_part,
    folder_text,
    id_path,
    new_run_id,
    replace_file,
)

MINER = Fingerprint("demo", "miner", "3", "host-a")


def record_of(run_id: str, **changes: object) -> RunIdRecord:
    return msgspec.structs.replace(RunIdRecord(run_id, MINER, "/data/.nodetrack"), **changes)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = RunIdFile(tmp_path / "ids" / "miner-3.json")
    record = record_of("abc123", previous_run="old", created_at="2026-01-01T00:00:00.000Z")
    file.write(record)
    assert file.read().record == record


def test_a_missing_file_is_no_error(tmp_path: Path) -> None:
    reading = RunIdFile(tmp_path / "none.json").read()
    assert (reading.state, reading.record) == (IdFileState.MISSING, None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b" \n\t ", "empty"),
        (b"\x00\xff\xfe\x80binary", "not an id file"),
        (b'{"schema_version": 1, "id": "abc', "not an id file"),
        (b'{"schema_version": 1}', "id"),
        (b'{"id": 5}', "not an id file"),
        (b'["abc"]', "not an id file"),
        (b'{"id": ""}', "it is empty"),
        (b'{"id": "../../etc"}', "cannot be used"),
        (b'{"id": "a b"}', "white space"),
        (b"x" * 100_000, "too long"),
    ],
)
def test_a_file_that_is_not_an_id_file_says_why_and_stays(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "miner-3.json"
    path.write_bytes(content)
    reading = RunIdFile(path).read()
    assert (reading.state, reading.record) == (IdFileState.DAMAGED, None)
    assert reason in reading.reason
    assert path.read_bytes() == content


def test_a_record_cut_at_any_byte_is_damaged_or_whole(tmp_path: Path) -> None:
    file = RunIdFile(tmp_path / "miner-3.json")
    file.write(record_of("abc123"))
    whole = file.path.read_bytes()
    for length in range(len(whole)):
        file.path.write_bytes(whole[:length])
        reading = file.read()
        # Only the final newline can be missed without loss.
        assert reading.state is (IdFileState.READABLE if length == len(whole) - 1 else IdFileState.DAMAGED)


def test_a_newer_schema_gives_its_id_and_says_so(tmp_path: Path) -> None:
    file = RunIdFile(tmp_path / "miner-3.json")
    file.write(record_of("abc123", schema_version=SCHEMA_VERSION + 1))
    reading = file.read()
    assert reading.state is IdFileState.NEWER
    assert reading.record is not None
    assert reading.record.id == "abc123"
    assert f"schema_version {SCHEMA_VERSION + 1}" in reading.reason


def test_a_directory_in_the_place_of_the_file_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.json"
    path.mkdir()
    reading = RunIdFile(path).read()
    assert (reading.state, reading.record) == (IdFileState.UNREADABLE, None)
    assert "directory" in reading.reason


def test_a_damaged_file_is_kept_under_a_name_with_the_time(tmp_path: Path) -> None:
    file = RunIdFile(tmp_path / "miner-3.json")
    file.path.write_bytes(b"\x00garbage")
    kept = file.set_aside()
    assert kept.name.startswith("miner-3.json.damaged-")
    assert kept.read_bytes() == b"\x00garbage"
    assert not file.path.exists()


def test_an_archived_id_stays_until_the_next_write(tmp_path: Path) -> None:
    file = RunIdFile(tmp_path / "miner-3.json")
    file.write(record_of("abc123"))
    before = file.path.read_bytes()
    kept = file.archive("abc123")
    assert kept.name == "miner-3.json.abc123.bak"
    assert kept.read_bytes() == before
    assert file.path.read_bytes() == before


def test_a_failed_write_leaves_the_old_record_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RunIdFile(tmp_path / "miner-3.json")
    file.write(record_of("old"))

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        file.write(record_of("new"))
    reading = file.read()
    assert reading.record is not None
    assert reading.record.id == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["miner-3.json"]


def test_what_a_killed_writer_left_is_removed_by_a_later_write(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.json"
    abandoned, fresh = tmp_path / ".miner-3.json.99.aa.tmp", tmp_path / ".miner-3.json.98.bb.tmp"
    for left in (abandoned, fresh):
        left.write_bytes(b"half")
    os.utime(abandoned, (1_000_000, 1_000_000))
    replace_file(path, b"whole")
    assert not abandoned.exists()
    assert fresh.exists(), "another writer may be at work on a fresh one"


@pytest.mark.parametrize("content", [b"abc123", b"abc123\n", b"  abc123\r\n"])
def test_a_text_file_of_an_older_node_gives_its_id(tmp_path: Path, content: bytes) -> None:
    file = TextRunIdFile(tmp_path / "wandb_run_id_M3.txt")
    file.path.write_bytes(content)
    reading = file.read()
    assert reading.record == RunIdRecord("abc123")


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"a/b", b"a b", b"x" * 129, b"..", b"\x00"])
def test_a_text_file_without_a_usable_id_is_damaged(tmp_path: Path, content: bytes) -> None:
    file = TextRunIdFile(tmp_path / "wandb_run_id_M3.txt")
    file.path.write_bytes(content)
    assert file.read().state is IdFileState.DAMAGED


def test_a_text_file_holds_the_bare_id_and_its_side_file_the_rest(tmp_path: Path) -> None:
    file = TextRunIdFile(tmp_path / "wandb_run_id_M3.txt")
    file.write(record_of("abc123", previous_run="old"))
    assert file.path.read_bytes() == b"abc123"
    assert file.read().record == record_of("abc123", previous_run="old")


def test_a_side_file_of_another_id_does_not_count(tmp_path: Path) -> None:
    """Someone put another id into the text file by hand: the text file decides."""
    file = TextRunIdFile(tmp_path / "wandb_run_id_M3.txt")
    file.write(record_of("abc123"))
    file.path.write_text("other9")
    assert file.read().record == RunIdRecord("other9")


@pytest.mark.parametrize(
    "run_id", ["a:b", "a;b", "a,b", "a#b", "a?b", "a/b", "a'b", "a\\b", "", ".x", "a\nb", "ü" * 65]
)
def test_an_id_that_a_service_or_a_folder_refuses_is_refused_in_words(run_id: str) -> None:
    assert check_run_id(run_id)


def test_new_ids_can_be_used_and_differ() -> None:
    ids = {new_run_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(check_run_id(run_id) is None and len(run_id) >= 8 for run_id in ids)
    assert all(run_id == run_id.lower() and run_id.isalnum() for run_id in ids)


NAMES = st.text(min_size=1, max_size=20)


@given(NAMES)
def test_a_file_name_part_is_one_safe_part(text: str) -> None:
    part = file_name_part(text)
    assert part not in ("", ".", "..")
    assert "/" not in part
    assert part.isascii()
    assert part.isprintable()


@given(NAMES, NAMES, NAMES, NAMES)
def test_two_nodes_never_share_a_file(role: str, uid: str, other_role: str, other_uid: str) -> None:
    folder = Path("x")
    same = id_path(folder, "p", role, uid) == id_path(folder, "p", other_role, other_uid)
    assert same == ((role, uid) == (other_role, other_uid))


def test_two_nodes_with_a_dash_in_their_names_do_not_share_a_file() -> None:
    assert id_path(Path("x"), "p", "a-b", "c") != id_path(Path("x"), "p", "a", "b-c")
    assert id_path(Path("x"), "p", "miner", "3") == Path("x/p/ids/miner-3.json")


@pytest.mark.parametrize("text", ["研" * 29, "u" * 128, "é" * 128, "a.b" * 50, os.fsdecode(b"\xe9") * 128])
def test_a_long_name_is_cut_and_stays_one_of_its_own(text: str) -> None:
    """File systems allow 255 bytes, of which a character may need twelve once it is encoded."""
    name = file_name_part(text)
    assert len(name.encode()) <= 120
    assert name != file_name_part(text + "x")
    assert file_name_part(unquote(name, errors="surrogatepass")) == name


def test_a_short_name_is_not_cut() -> None:
    assert file_name_part("u" * 120) == "u" * 120
    assert file_name_part("a b/ü") == "a%20b%2F%C3%BC"


def test_the_longest_role_and_uid_have_a_file(tmp_path: Path) -> None:
    one, other = (id_path(tmp_path, "研" * 128, "r" * 128, "u" * 127 + end) for end in "ab")
    assert one != other
    for path in (one, other):
        file = RunIdFile(path)
        file.write(record_of("i" * 128))
        assert file.archive("i" * 128).exists()


def test_a_folder_that_is_no_text_is_written_as_escapes(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    file = RunIdFile(folder / "miner-3.json")
    file.write(record_of("abc", folder=str(folder)))
    record = file.read().record
    assert record is not None
    assert record.folder == folder_text(folder) == f"{tmp_path}/caf\\udce9"


def test_a_pipe_in_the_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "miner-3.json")
    assert RunIdFile(tmp_path / "miner-3.json").read().state is IdFileState.DAMAGED


def test_a_file_that_is_nested_without_end_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.json"
    path.write_bytes(b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}")
    assert RunIdFile(path).read().state is IdFileState.DAMAGED
