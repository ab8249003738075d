"""What the delivery process does: it sends the journal of one run, syncs it, and shows that the node lives.

The trainer starts it with a `Spec` on standard input. It ends when the trainer has finished or is gone, and
the rest is sent or has taken too long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from nodetrack.backends.base import Backend
from nodetrack.backends.factory import build_backend, parse_backends
from nodetrack.delivery.companion import companion_writer
from nodetrack.delivery.diary import FORMAT, Diary
from nodetrack.delivery.engine import Delivery
from nodetrack.delivery.life_line import LifeLine
from nodetrack.delivery.process import ALL_SENT, SOME_LEFT
from nodetrack.delivery.prune import Pruner
from nodetrack.delivery.speaker import Speaker
from nodetrack.delivery.spec import Answer, Spec, decode_spec, name_of
from nodetrack.delivery.system import SystemRecorder, SystemSampler
from nodetrack.delivery.worker import Status
from nodetrack.errors import describe
from nodetrack.journal import disk
from nodetrack.journal.folder import AttemptFolder
from nodetrack.journal.recover import read_header
from nodetrack.journal.segment import segment_paths
from nodetrack.keeper import touch
from nodetrack.records import Kind

TICK_SECONDS: Final = 1.0
HEARTBEAT_FILE: Final = "heartbeat"
KILLED: Final = "killed: the process ended without a word"
#: Nobody knows how a killed process would have ended.
UNKNOWN_EXIT_CODE: Final = -1
_NICENESS: Final = 5
_MOST_LOG_BYTES: Final = 16 * 1024 * 1024
_QUIET_SECONDS: Final = 1.5
_STOPPING_SECONDS: Final = 0.2

_log = logging.getLogger("nodetrack.delivery")


def main() -> NoReturn:
    """Run as the process that `process.DeliveryProcess` has started. Does not return."""
    code = SOME_LEFT
    try:
        channel, life_line = _own_descriptors()
        _own_signals()
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=FORMAT)
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)  # training comes first
        spec = decode_spec(_first_line(life_line))
        code = _Child(spec, life_line, channel).run()
    except BaseException:
        _log.exception("The delivery process ended by a fault")
        code = 1
    finally:
        logging.shutdown()
        os._exit(code)  # a call of an SDK that does not come back must not hold the process


def _own_descriptors() -> tuple[int, int]:
    """The pipes to and from the trainer, out of reach of whatever the SDKs read and print."""
    life_line, channel = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return channel, life_line


def _own_signals() -> None:
    """What is meant for the trainer's group is the trainer's affair: it may still be saving a checkpoint, and
    its end is ours. SIGKILL is there for whoever means us.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a child of an SDK would inherit


def _first_line(fd: int) -> bytes:
    """The first line, without a byte of the next."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"\n", b""):
        line += byte
    return bytes(line)


class _Child:
    def __init__(self, spec: Spec, life_line: int, channel: int) -> None:
        self._spec = spec
        self._folder = spec.attempt_folder
        self._life = LifeLine(life_line, spec.trainer)
        self._speaker = Speaker(channel, self._life.wake)
        self._diary = Diary()
        self._synced: dict[Path, int] = {}
        self._next_beat = 0.0
        self._failed: set[str] = set()
        self._companion = companion_writer(self._folder, spec.header, segment_bytes=spec.segment_bytes)
        self._recorder: SystemRecorder | None = None
        self._next_sample = 0.0
        self._delivery = Delivery(
            spec.run_folder,
            spec.header.project,
            self._backends(),
            follow=True,
            changed=self._changed,
            own_attempt=spec.header.attempt,
        )
        self._pruner = Pruner(
            spec.run_folder,
            spec.header.attempt,
            self._delivery.workers,
            is_whole=len(self._delivery.workers) == len(spec.backends),
            keep_bytes=spec.keep_bytes,
            max_bytes=spec.max_bytes,
            warn=lambda sentence: self._speaker.say(Answer("", "remark", sentence)),
            note=lambda sentence: self._diary.note("limits", sentence),
        )

    def _changed(self, status: Status) -> None:
        self._speaker.take(status)
        self._diary.take(status)

    def _backends(self) -> dict[str, Backend[Any]]:
        """Those that can be made. The trainer has parsed them all, so a fault here is one of the set-up."""
        made = {}
        for given in self._spec.backends:
            try:
                [(kind, config)] = parse_backends([given]).items()  # type: ignore[list-item]  # as given to init
                made[kind] = build_backend(config)
            except Exception as error:
                _log.exception("The backend %s could not be made", name_of(given))
                self._speaker.say(Answer(name_of(given), "down", describe(error)))
        return made

    def run(self) -> int:
        """Deliver until the end; the exit code."""
        names = ", ".join(map(name_of, self._spec.backends)) or "no backend"
        _log.info("Process %d begins, for attempt %s: %s", os.getpid(), self._spec.header.attempt, names)
        self._delivery.start()
        next_tick = time.monotonic()
        while not self._life.is_over:
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._tick()
            self._life.wait(next_tick - time.monotonic())
            self._speaker.flush()
        return self._end()

    # -- meanwhile -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._safely(self._life.look)
        self._safely(self._beat)
        self._safely(self._sample)
        self._safely(self._sync)
        self._safely(self._companion.tend)
        self._safely(self._pruner.prune)
        self._diary.tend()
        self._safely(_limit_log)

    def _safely(self, call: Callable[[], object]) -> None:
        """One thing that fails must not end the others; it is logged the first time."""
        name = getattr(call, "__name__", "")
        try:
            call()
        except Exception:
            if name not in self._failed:
                self._failed.add(name)
                _log.exception("%s failed; it is tried again every second", name)

    def _beat(self) -> None:
        """The trainer's own sign of life depends on its interpreter, which C code may hold for long."""
        if time.monotonic() >= self._next_beat and not self._life.is_over:
            self._next_beat = time.monotonic() + self._spec.heartbeat_seconds
            touch(self._folder / HEARTBEAT_FILE)

    def _sample(self) -> None:
        """What the machine and the trainer use."""
        seconds = self._spec.system_seconds
        if not seconds or time.monotonic() < self._next_sample:
            return
        self._next_sample = time.monotonic() + seconds
        if self._recorder is None:
            sampler = SystemSampler(self._spec.trainer.pid, self._folder)
            self._recorder = SystemRecorder(self._companion, sampler)
        self._recorder.record()

    def _sync(self) -> None:
        """Bring what was written since the last time to the disk itself: a power cut costs one second."""
        for path in segment_paths(self._folder):
            with contextlib.suppress(OSError):  # removed meanwhile; a disk in trouble the writer tells of
                size = path.stat().st_size
                if self._synced.get(path) != size:
                    _sync_file(path)
                    self._synced[path] = size

    # -- the end -------------------------------------------------------------------------------------

    def _end(self) -> int:
        end = self._life.end
        limit = time.monotonic() + (self._spec.finish_timeout if end is None else end.drain_seconds)
        if end is None and self._life.trainer_is_gone():
            self._safely(lambda: self._record_crash(limit))
        self._safely(self._companion.close)
        self._delivery.drain()
        done = self._delivery.join(max(0.0, limit - _STOPPING_SECONDS - time.monotonic()))
        if not done:
            self._delivery.stop()
            self._delivery.join(max(0.0, limit - time.monotonic()))
        self._safely(self._pruner.prune)
        self._speaker.flush()
        states = [status.state for status in self._delivery.statuses().values()]
        complete = done and all(state == "done" for state in states)
        all_sent = complete and len(states) == len(self._spec.backends)
        _log.info("Process %d ends: %s", os.getpid(), "all is sent" if all_sent else "not all is sent")
        return ALL_SENT if all_sent else SOME_LEFT

    def _record_crash(self, limit: float) -> None:
        """Say how the attempt ended, which the trainer had no time for."""
        self._wait_for_other_writers(limit)
        if AttemptFolder(self._folder, is_last=True).finish_record() is None and self._folder.is_dir():
            with self._companion.lock:
                _log.info("The trainer is gone without a word: its attempt is recorded as crashed")
                finish = (int(Kind.FINISH), time.time_ns(), "crashed", UNKNOWN_EXIT_CODE, KILLED)
                self._companion.write([*finish])

    def _wait_for_other_writers(self, limit: float) -> None:
        """Forked children of the trainer may go on logging for a while."""
        paths = segment_paths(self._folder)
        headers = [header for header in map(read_header, paths) if header is not None]
        if len({header.writer for header in headers if not header.companion}) < 2:
            return
        sizes, quiet_since = _sizes(self._folder), time.monotonic()
        while time.monotonic() < min(limit, quiet_since + _QUIET_SECONDS):
            time.sleep(0.1)
            now = _sizes(self._folder)
            if now != sizes:
                sizes, quiet_since = now, time.monotonic()


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in segment_paths(folder):
        with contextlib.suppress(OSError):
            sizes[path.name] = path.stat().st_size
    return sizes


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        disk.sync(fd)
    finally:
        os.close(fd)


def _limit_log() -> None:
    """Begin the log anew when it is long: SDKs may repeat one line for weeks."""
    found = os.fstat(2)
    if stat.S_ISREG(found.st_mode) and found.st_size > _MOST_LOG_BYTES:
        os.ftruncate(2, 0)
