"""One live process a node, whoever died before."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from nodetrack.errors import IdentityInUseError
from nodetrack.identity import lock as lock_module
from nodetrack.identity.lock import LockOwner, NodeLock, _Contest
from nodetrack.machine import HostIdentity, process_start_ticks, this_host

ELSEWHERE = HostIdentity("host-b", "another-boot", "pid:[1]")


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dead_owner(token: str = "dead") -> LockOwner:
    """An owner on this host whose process has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return LockOwner(ended.pid, time.time(), this_host(), token)


def put_lock(path: Path, owner: LockOwner, age_seconds: float = 0.0) -> None:
    path.write_bytes(msgspec.json.encode(owner))
    then = time.time() - age_seconds
    os.utime(path, (then, then))


def test_a_second_holder_is_refused_with_pid_and_host(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    NodeLock.acquire(path, "miner 3")
    with pytest.raises(IdentityInUseError) as refused:
        NodeLock.acquire(path, "miner 3")
    assert (refused.value.pid, refused.value.host) == (os.getpid(), this_host().hostname)
    assert files_in(tmp_path) == ["miner-3.lock"]


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    NodeLock.acquire(path, "miner 3").release()
    assert files_in(tmp_path) == []
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_a_dead_owner_is_replaced_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    put_lock(path, dead_owner())
    assert NodeLock.acquire(path, "miner 3").is_held()
    assert files_in(tmp_path) == ["miner-3.lock"]


def test_a_reused_process_number_does_not_keep_a_dead_owner_alive(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    put_lock(path, LockOwner(os.getpid(), 1_000_000.0, this_host(), "before"))
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_a_lock_of_this_process_before_exec_is_free(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    before = NodeLock.acquire(path, "miner 3").owner
    lock_module._held_here.clear()  # as in the program that comes after os.execv
    lock = NodeLock.acquire(path, "miner 3")
    assert lock.owner.start_ticks == before.start_ticks
    assert lock.is_held()


def test_a_lock_that_was_taken_when_ctrl_c_came_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "miner-3.lock"
    win = _Contest.win

    def win_and_be_interrupted(contest: _Contest, node: str) -> None:
        win(contest, node)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Contest, "win", win_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            NodeLock.acquire(path, "miner 3")
    assert path.exists()
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_an_owner_is_known_by_its_start_since_the_boot_whatever_the_clock(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = process_start_ticks(child.pid)
    put_lock(path, LockOwner(child.pid, time.time() - 3600, this_host(), "a", ticks))
    try:
        with pytest.raises(IdentityInUseError):
            NodeLock.acquire(path, "miner 3")
    finally:
        child.communicate(b"\n")
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_an_owner_elsewhere_counts_until_it_is_silent_for_too_long(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    put_lock(path, LockOwner(7, 1.0, ELSEWHERE, "far"), age_seconds=50)
    with pytest.raises(IdentityInUseError, match="process 7 on host-b"):
        NodeLock.acquire(path, "miner 3", stale_after_seconds=60)
    assert NodeLock.acquire(path, "miner 3", stale_after_seconds=40).is_held()


def test_an_owner_elsewhere_says_itself_how_long_it_may_be_silent(tmp_path: Path) -> None:
    """Its heartbeat may be slower than that of whoever looks."""
    path = tmp_path / "miner-3.lock"
    put_lock(path, LockOwner(7, 1.0, ELSEWHERE, "far", stale_after_seconds=480), age_seconds=400)
    with pytest.raises(IdentityInUseError):
        NodeLock.acquire(path, "miner 3", stale_after_seconds=60)
    put_lock(path, LockOwner(7, 1.0, ELSEWHERE, "far", stale_after_seconds=480), age_seconds=500)
    lock = NodeLock.acquire(path, "miner 3", stale_after_seconds=600)
    assert msgspec.json.decode(path.read_bytes())["stale_after_seconds"] == 600
    assert lock.is_held()


HOSTILE = {
    "a token that leads elsewhere": b'"token": "../x"',
    "a token that no name can hold": b'"token": "a\\u0000b"',
    "a token that is too long": b'"token": "' + b"t" * 300 + b'"',
    "nested without end": b'"token": "t", "more": ' + b"[" * 100_000 + b"]" * 100_000,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_lock_that_nobody_of_us_wrote_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "miner-3.lock"
    host = msgspec.json.encode(this_host())
    path.write_bytes(b'{"pid": 4194309, "created_at": 1.0, "host": ' + host + b", " + content + b"}")
    os.utime(path, (1.0, 1.0))
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_a_pipe_in_the_place_of_the_lock_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    os.mkfifo(path)
    os.utime(path, (1.0, 1.0))
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_marks_that_lead_in_a_circle_do_not_block(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    owner = dead_owner()
    put_lock(path, owner)
    put_lock(tmp_path / f"miner-3.lock.after-{owner.token}", owner, age_seconds=10)
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_an_owner_that_cannot_look_or_write_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = NodeLock.acquire(tmp_path / "miner-3.lock", "miner 3")

    def refuse(*_arguments: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refuse)
        assert lock.touch()
        patched.setattr(os, "open", refuse)
        assert lock.touch()


def test_an_owner_in_another_container_is_not_looked_up_here(tmp_path: Path) -> None:
    """Its process number means another process here, so only its heartbeat counts."""
    path = tmp_path / "miner-3.lock"
    container = msgspec.structs.replace(this_host(), pid_namespace="pid:[1]")
    put_lock(path, LockOwner(1, 1.0, container, "container"), age_seconds=5)
    with pytest.raises(IdentityInUseError):
        NodeLock.acquire(path, "miner 3")
    put_lock(path, LockOwner(1, 1.0, container, "container"), age_seconds=500)
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_an_owner_from_before_the_reboot_is_gone_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "miner-3.lock"
    before = msgspec.structs.replace(this_host(), boot_id="the boot before")
    put_lock(path, LockOwner(1, 1.0, before, "before"), age_seconds=30)
    monkeypatch.setattr(lock_module, "_uptime_seconds", lambda: 40.0)
    with pytest.raises(IdentityInUseError):  # confirmed since: another machine of the same name
        NodeLock.acquire(path, "miner 3")
    monkeypatch.setattr(lock_module, "_uptime_seconds", lambda: 20.0)
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_the_age_of_a_lock_is_told_by_the_clock_that_stamped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose clock is a day ahead of the file server's must not find every lock stale."""
    path = tmp_path / "miner-3.lock"
    put_lock(path, LockOwner(7, 1.0, ELSEWHERE, "far"))
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with pytest.raises(IdentityInUseError):
        NodeLock.acquire(path, "miner 3")


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b'{"pid": 1'])
def test_a_lock_that_cannot_be_read_is_replaced_once_it_is_no_longer_fresh(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "miner-3.lock"
    path.write_bytes(content)
    os.utime(path, (1_000_000, 1_000_000))
    assert NodeLock.acquire(path, "miner 3").is_held()
    assert files_in(tmp_path) == ["miner-3.lock"]


def test_a_link_to_nowhere_in_the_place_of_the_lock_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    path.symlink_to(tmp_path / "nowhere")
    os.utime(path, (1_000_000, 1_000_000), follow_symlinks=False)
    assert NodeLock.acquire(path, "miner 3").is_held()


def test_a_folder_in_the_place_of_the_lock_is_an_error_each_time(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    path.mkdir()
    os.utime(path, (1_000_000, 1_000_000))
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            NodeLock.acquire(path, "miner 3")
    assert files_in(tmp_path) == ["miner-3.lock"]


def test_a_folder_that_refuses_at_the_end_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = NodeLock.acquire(tmp_path / "miner-3.lock", "miner 3")

    def refuse(_path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    lock.release()


def test_a_successor_that_died_half_way_is_succeeded(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    put_lock(path, dead_owner("first"))
    put_lock(tmp_path / "miner-3.lock.after-first", dead_owner("second"))
    assert NodeLock.acquire(path, "miner 3").is_held()
    assert files_in(tmp_path) == ["miner-3.lock"]


def test_what_killed_contestants_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    put_lock(path, dead_owner("third"))
    put_lock(tmp_path / "miner-3.lock.after-first", dead_owner("second"))
    put_lock(tmp_path / ".miner-3.lock.9.aa.claim", dead_owner(), age_seconds=10_000)
    NodeLock.acquire(path, "miner 3")
    assert files_in(tmp_path) == ["miner-3.lock"]


def test_a_live_successor_that_is_still_at_it_is_the_owner(tmp_path: Path) -> None:
    path = tmp_path / "miner-3.lock"
    put_lock(path, dead_owner("first"))
    put_lock(tmp_path / "miner-3.lock.after-first", LockOwner(7, 1.0, ELSEWHERE, "second"))
    with pytest.raises(IdentityInUseError, match="process 7 on host-b"):
        NodeLock.acquire(path, "miner 3")


def test_a_late_successor_cannot_replace_the_one_that_was_first(tmp_path: Path) -> None:
    """It judged the dead owner, was stopped, and wakes up after another process has taken over."""
    path = tmp_path / "miner-3.lock"
    put_lock(path, dead_owner("first"))
    late = LockOwner(os.getpid(), time.time(), this_host(), "late")
    claim = tmp_path / ".late.claim"
    claim.write_bytes(msgspec.json.encode(late))
    contest = _Contest(path, claim, late, 60)
    judged = contest._chain()
    winner = NodeLock.acquire(path, "miner 3")
    assert not contest._succeed(judged)
    assert winner.is_held()
    assert files_in(tmp_path) == [".late.claim", "miner-3.lock"]


def test_a_file_system_without_hard_links_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "miner-3.lock"
    put_lock(path, dead_owner())
    assert NodeLock.acquire(path, "miner 3").is_held()
    with pytest.raises(IdentityInUseError):
        NodeLock.acquire(path, "miner 3")


def test_touch_moves_the_heartbeat_on(tmp_path: Path) -> None:
    lock = NodeLock.acquire(tmp_path / "miner-3.lock", "miner 3")
    os.utime(lock.path, (1_000_000, 1_000_000))
    assert lock.touch()
    assert lock.path.stat().st_mtime > 1_000_000


def test_a_lock_taken_over_or_removed_is_noticed_and_left_alone(tmp_path: Path) -> None:
    lock = NodeLock.acquire(tmp_path / "miner-3.lock", "miner 3")
    put_lock(lock.path, LockOwner(7, 1.0, ELSEWHERE, "thief"))
    before = lock.path.stat().st_mtime_ns
    assert not lock.touch()
    lock.release()
    assert lock.path.stat().st_mtime_ns == before
    lock.path.unlink()
    assert not lock.touch()
    lock.release()


FORKED_CHILD = """
    import os, sys
    from pathlib import Path
    from nodetrack.identity.lock import NodeLock
    lock = NodeLock.acquire(Path(sys.argv[1]), "miner 3")
    child = os.fork()
    if child == 0:
        assert not lock.touch()
        lock.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert lock.is_held()
"""


def test_a_forked_child_cannot_release_its_parents_lock(tmp_path: Path) -> None:
    script = textwrap.dedent(FORKED_CHILD)
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "miner-3.lock")], check=True, timeout=60)


# One starter process forks the racers, because fifty interpreters would be fifty imports.
RACE = """
    import os, sys
    from pathlib import Path
    from nodetrack.errors import IdentityInUseError
    from nodetrack.identity.lock import NodeLock

    RACERS = 50
    path = Path(sys.argv[1])

    def in_child(work):
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        return child

    def race(go, results, end):
        os.read(go, 1)
        try:
            NodeLock.acquire(path, "miner 3")
            os.write(results, b"W")
        except IdentityInUseError:
            os.write(results, b"L")
        os.read(end, 1)  # stays alive, so that the winner is never seen dead

    for _ in range(int(sys.argv[2])):
        path.unlink(missing_ok=True)
        os.waitpid(in_child(lambda: NodeLock.acquire(path, "miner 3")), 0)  # dies with the lock
        assert path.exists()
        go, results, end = os.pipe(), os.pipe(), os.pipe()
        def racer():
            os.close(go[1]); os.close(end[1])
            race(go[0], results[1], end[0])
        children = [in_child(racer) for _ in range(RACERS)]
        os.close(go[1])
        seen = b""
        while len(seen) < RACERS:
            seen += os.read(results[0], RACERS)
        os.close(end[1])
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        for descriptor in (go[0], end[0], *results):
            os.close(descriptor)
        print(seen.count(b"W"), sorted(os.listdir(path.parent)))
"""


def test_fifty_processes_after_a_stale_lock_have_one_winner(tmp_path: Path) -> None:
    rounds = 6
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RACE), str(tmp_path / "miner-3.lock"), str(rounds)],
        check=True,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["1 ['miner-3.lock']"] * rounds
