"""A server program for the length of a test: its own folder and port on loopback, ended afterwards."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_SECONDS = 60.0


def program(name: str, package: str) -> str:
    """Where the program is; the test is skipped, with the reason, where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install {package}")
    return found


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: Callable[[int], list[str]], folder: Path, ready: str) -> Iterator[int]:
    """Runs `command(port)` until its path `ready` answers, and gives the port. What it prints is kept in
    `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(3):  # another program may be faster at taking the port
        port = free_port()
        with (folder / f"output-{attempt}.txt").open("wb") as output:
            server = subprocess.Popen(command(port), stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        try:
            if _answers(server, f"http://127.0.0.1:{port}{ready}"):
                yield port
                return
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(20)
    pytest.fail(f"{command(0)[0]} does not start: {(folder / 'output-2.txt').read_text()[-2000:]}")


def _answers(server: subprocess.Popen[bytes], url: str) -> bool:
    """False if it ended before it answered."""
    limit = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < limit:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
        else:
            return True
    return False
