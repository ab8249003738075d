from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nodetrack import machine
from nodetrack.errors import SettingsError
from nodetrack.machine import (
    GitState,
    HostIdentity,
    Rank,
    describe_process,
    find_rank,
    git_output,
    git_state,
    process_created_at,
    process_is_alive,
    process_start_ticks,
    this_host,
    working_folder,
)

# --- host and liveness


def test_this_host_is_the_same_for_every_process_of_a_machine() -> None:
    code = "from nodetrack.machine import this_host; print(repr(this_host()))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert other.stdout.strip() == repr(this_host())
    assert this_host().boot_id


def test_processes_are_shared_within_one_boot_and_one_container_whatever_the_hostname() -> None:
    host = HostIdentity("a", "boot-1", "pid:[1]")

    assert host.shares_processes_with(HostIdentity("renamed", "boot-1", "pid:[1]"))
    assert not host.shares_processes_with(HostIdentity("a", "boot-2", "pid:[1]"))
    assert not host.shares_processes_with(HostIdentity("a", "boot-1", "pid:[2]"))


def test_without_a_boot_id_the_hostname_decides() -> None:
    assert HostIdentity("a", "", "").shares_processes_with(HostIdentity("a", "", ""))
    assert not HostIdentity("a", "", "").shares_processes_with(HostIdentity("b", "", ""))
    assert not HostIdentity("a", "", "").shares_processes_with(HostIdentity("a", "boot-1", ""))


def test_this_process_is_alive() -> None:
    created_at = process_created_at()

    assert created_at is not None
    assert process_is_alive(os.getpid(), created_at)


def test_a_number_that_another_process_has_taken_over_is_not_alive() -> None:
    created_at = process_created_at()

    assert created_at is not None
    assert not process_is_alive(os.getpid(), created_at - 60)


def test_a_killed_process_is_dead_even_before_its_parent_has_looked() -> None:
    """A zombie keeps its number; a restarted node must not wait for it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        created_at = process_created_at(child.pid)
        assert created_at is not None
        assert process_is_alive(child.pid, created_at)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process_is_alive(child.pid, created_at)
    finally:
        child.communicate()
    assert not process_is_alive(child.pid, created_at)


def test_a_clock_that_was_set_neither_kills_a_process_nor_brings_one_back() -> None:
    """Epoch seconds of a process's start move with the clock (NTP after the boot, a resumed machine)."""
    created_at, ticks = process_created_at(), process_start_ticks()

    assert created_at is not None
    assert ticks is not None
    assert process_is_alive(os.getpid(), created_at - 3600, ticks)
    assert not process_is_alive(os.getpid(), created_at, ticks - 1)


def test_the_start_is_read_behind_whatever_a_process_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = b"7 (a) S (1 2) R " + b" ".join(str(number).encode() for number in range(4, 53)) + b"\n"
    monkeypatch.setattr(Path, "read_bytes", lambda _path: stat)

    assert process_start_ticks(7) == 22


def test_a_zombie_has_no_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = process_start_ticks(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert ticks is not None
        assert process_start_ticks(child.pid) is None
        assert not process_is_alive(child.pid, 0.0, ticks)
    finally:
        child.communicate()


def test_a_process_that_proc_hides_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not process_is_alive(gone.pid, 0.0, 5)
    monkeypatch.setattr(os, "kill", refuse)
    assert process_is_alive(gone.pid, 0.0, 5)


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**80])
def test_a_damaged_process_number_is_not_alive(pid: int) -> None:
    assert not process_is_alive(pid, 0.0)


def test_a_process_that_may_not_be_looked_at_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int | None) -> psutil.Process:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "Process", refuse)

    assert process_is_alive(1, 0.0)


def test_without_a_free_descriptor_a_process_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert process_is_alive(os.getpid(), 0.0, 5)
    monkeypatch.setattr(machine, "process_created_at", refuse)
    assert process_is_alive(os.getpid(), 0.0)


# --- git


@pytest.mark.parametrize("body", ["yes", "sleep 60 & exec sleep 60", "sleep 60 & exit 0"])
def test_a_git_that_floods_or_never_ends_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    (tmp_path / "git").write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert git_output(tmp_path, "status", timeout=0.5 if body != "yes" else 60) is None


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty git repository on branch `main`, out of reach of the user's own git settings."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "a repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


def git(folder: Path, *arguments: str) -> str:
    person = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    done = subprocess.run(
        ["git", *person, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(folder: Path, text: str = "1") -> str:
    (folder / "train.py").write_text(text)
    git(folder, "add", "train.py")
    git(folder, "commit", "--quiet", "--message=m")
    return git(folder, "rev-parse", "HEAD")


def test_git_state_names_commit_branch_and_changes_of_the_repository_around_a_file(repository: Path) -> None:
    head = commit(repository)
    (repository / "untracked").touch()
    assert git_state(repository / "train.py") == GitState(head, "main", dirty=False, remote=None)

    (repository / "train.py").write_text("2")
    assert git_state(repository) == GitState(head, "main", dirty=True, remote=None)


def test_git_state_of_a_detached_head_has_no_branch(repository: Path) -> None:
    head = commit(repository)
    git(repository, "checkout", "--quiet", "--detach")

    assert git_state(repository) == GitState(head, None, dirty=False, remote=None)


def test_git_state_before_the_first_commit_has_no_commit(repository: Path) -> None:
    assert git_state(repository) == GitState(None, "main", dirty=False, remote=None)


def test_the_remote_is_told_without_user_and_password(repository: Path) -> None:
    git(repository, "remote", "add", "mirror", "git@example.org:o/mirror.git")
    git(repository, "remote", "add", "origin", "https://me:hunter2@example.org/o/r.git")
    state = git_state(repository)

    assert state is not None
    assert state.remote == "https://example.org/o/r.git"


def test_the_remote_is_the_one_that_the_branch_follows(repository: Path) -> None:
    commit(repository)
    git(repository, "remote", "add", "origin", "https://example.org/o/r.git")
    git(repository, "remote", "add", "mirror", "git@example.org:o/mirror.git")
    git(repository, "config", "branch.main.remote", "mirror")
    git(repository, "config", "branch.main.merge", "refs/heads/main")
    state = git_state(repository)

    assert state is not None
    assert state.remote == "example.org:o/mirror.git"


def test_a_folder_without_git_has_no_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    assert git_state(tmp_path / "missing" / "train.py") is None


def test_a_machine_without_git_has_no_state(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    assert git_state(repository) is None


def test_a_git_that_hangs_is_left_behind(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = repository / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")

    assert git_state(repository, timeout=0.2) is None


def test_a_git_hook_that_starts_the_trainer_does_not_redirect_it(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = commit(repository)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    state = git_state(repository)

    assert state is not None
    assert state.commit == head


def test_reading_the_state_takes_no_lock_of_the_repository(repository: Path) -> None:
    """A node that starts while its operator commits must not make the commit fail."""
    commit(repository)
    index = repository / ".git" / "index"
    os.utime(repository / "train.py", (1, 1))  # makes git wish to refresh its index
    before = index.stat().st_mtime_ns
    git_state(repository)

    assert index.stat().st_mtime_ns == before


def test_git_output_is_none_for_a_command_that_fails(repository: Path) -> None:
    assert git_output(repository, "no-such-command", timeout=5) is None


# --- process


def test_the_description_of_a_process_is_plain_and_keeps_secrets_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--api-key", "hunter2", "--lr=1"])
    described = describe_process()

    assert described["command"] == ["python", "train.py", "--api-key", "***", "--lr=1"]
    assert described["pid"] == os.getpid()
    assert described["memory_total_bytes"] > 0
    assert json.loads(json.dumps(described)) == described


def test_a_process_whose_folder_was_removed_is_described_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert describe_process()["cwd"] is None


# --- rank


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for launcher in machine._LAUNCHERS:
        for variable in launcher:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    machine._warn_of_variable.cache_clear()
    yield
    machine._warn_of_variable.cache_clear()


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))


@pytest.mark.case("C040")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", Rank(0, None, None, "default")),
        ("RANK=3 LOCAL_RANK=1 WORLD_SIZE=4", Rank(3, 1, 4, "RANK")),
        ("SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8", Rank(5, 1, 8, "SLURM_PROCID")),
        ("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4", Rank(2, None, 4, "OMPI_COMM_WORLD_RANK")),
        ("PMI_RANK=1 PMI_SIZE=2", Rank(1, None, 2, "PMI_RANK")),
        ("PMIX_RANK=1", Rank(1, None, None, "PMIX_RANK")),
        ("LOCAL_RANK=1", Rank(1, 1, None, "LOCAL_RANK")),
        ("LOCAL_RANK=1 SLURM_PROCID=9", Rank(9, None, None, "SLURM_PROCID")),
        ("RANK=0 SLURM_PROCID=2 LOCAL_RANK=0", Rank(0, 0, None, "RANK")),
    ],
)
def test_the_rank_is_read_from_whichever_launcher_started_the_process(
    variables: str, expected: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, variables)

    assert find_rank() == expected
    assert find_rank().is_main is (expected.rank == 0)


@pytest.mark.case("C040")
def test_an_explicit_rank_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4")

    assert find_rank(0) == Rank(0, 1, 4, "argument")


@pytest.mark.parametrize("rank", [-1, True, "0"])
def test_an_explicit_rank_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(SettingsError, match="given as an argument"):
        find_rank(rank)


def fake_torch(*, initialized: bool) -> types.ModuleType:
    module = types.ModuleType("torch.distributed")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: initialized,
        get_rank=lambda: 6,
        get_world_size=lambda: 8,
    )
    return module


@pytest.mark.case("C040")
def test_an_initialised_process_group_knows_better_than_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_environment(monkeypatch, "RANK=3 LOCAL_RANK=2")
    monkeypatch.setitem(sys.modules, "torch.distributed", fake_torch(initialized=True))

    assert find_rank() == Rank(6, 2, 8, "torch.distributed")


@pytest.mark.parametrize("module", [fake_torch(initialized=False), types.ModuleType("half imported")])
def test_a_process_group_that_is_not_there_yet_is_passed_over(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, "RANK=3")
    monkeypatch.setitem(sys.modules, "torch.distributed", module)

    assert find_rank().origin == "RANK"


def test_finding_the_rank_does_not_import_torch() -> None:
    code = "import sys; from nodetrack.machine import find_rank; find_rank(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("value", ["one", "-1", "1.0", "1_0", "٣", "9" * 5000])
def test_a_malformed_rank_is_warned_of_once_and_ignored(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", value)
    monkeypatch.setenv("SLURM_PROCID", "2")
    with caplog.at_level(logging.WARNING, logger="nodetrack"):
        found = [find_rank(), find_rank()]

    assert found == [Rank(2, None, None, "SLURM_PROCID")] * 2
    assert len(caplog.records) == 1
    assert "RANK is" in caplog.text


def test_an_empty_variable_is_one_that_is_not_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "")

    assert find_rank().origin == "default"
    assert not caplog.records


# --- what is no text


def test_a_process_is_described_whatever_its_arguments_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    os.chdir(folder)
    monkeypatch.setattr(sys, "orig_argv", ["python", os.fsdecode(b"caf\xe9")])
    description = describe_process()

    assert description["command"] == ["python", "caf\\udce9"]
    assert description["cwd"] == f"{tmp_path}/caf\\udce9"


def test_a_process_is_described_even_if_little_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> object:
        raise OSError

    monkeypatch.setattr(sys, "orig_argv", [None])
    monkeypatch.setattr(psutil, "virtual_memory", refuse)

    assert (describe_process()["command"], describe_process()["memory_total_bytes"]) == ([], 0)


def test_a_working_folder_that_was_removed_is_told_where_it_was(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()

    assert working_folder() == gone
