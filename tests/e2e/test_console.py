"""Real programs, once with their console kept and once without: what they print is the same to the byte."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nodetrack.journal.folder import TrackingFolder
from nodetrack.records import ConsoleLine

_BEGIN = """
import logging, os, signal, sys, threading, time
import nodetrack
run = nodetrack.init("p", version="0.1.0", quiet=True)
"""

PROGRAMS = {
    "print": """
        print("a", 1, sep="-")
        print("b", end="")
        print("c", flush=True)
        assert sys.stdout.write("four\\n") == 5
        sys.stdout.writelines(["x\\n", "y\\n"])
        print("err", file=sys.stderr, flush=True)
        print("ünïcödé 🙂 \\u2028 \\x0b")
        print("not ended", end="")
    """,
    "bar": """
        for percent in range(0, 101):
            print(f"\\r{percent:3}%|{'#' * (percent // 5):20}|", end="", file=sys.stderr, flush=percent > 9)
        print(file=sys.stderr)
        for percent in range(0, 101):
            print(f"{percent}%", end="\\r")
        print()
    """,
    "rich": """
        from rich.console import Console
        from rich.progress import track
        console = Console(width=60)
        for step in track(range(50), console=console, description="training", auto_refresh=False):
            if step == 25:
                console.print("[bold red]half[/]")
    """,
    "logging": """
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
        logging.info("one")
        logging.getLogger("mine").warning("two")
    """,
    "halves": """
        sys.stdout.reconfigure(errors="surrogateescape")
        print("\\udcf0\\udc9f\\udc99\\udc82 half \\udcf0")
        print("\\ud83d", file=sys.stderr)
        sys.stdout.flush()
        os.write(1, b"\\xf0\\x9f")
        os.write(1, b"\\x99\\x82\\n")
        sys.stdout.buffer.write(b"raw\\n")
    """,
    "large": """
        print("x" * 3_000_000)
        for line in range(20_000):
            print(f"line {line}")
    """,
    "threads": """
        lock = threading.Lock()
        def say(name):
            for count in range(50):
                with lock:
                    print(name, count)
        threads = [threading.Thread(target=say, args=(name,)) for name in "ab"]
        for thread in threads: thread.start(); thread.join()
    """,
    "child": """
        print("parent")
        sys.stdout.flush()
        if os.fork() == 0:
            print("child")
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        os.system("echo a shell")
        print("parent again")
    """,
    "crash": """
        def deep():
            raise ValueError("boom 🙂")
        print("before")
        deep()
    """,
    "exit": """
        print("before")
        sys.exit("the reason")
    """,
    "closed": """
        print("before")
        sys.stdout.close()
        try:
            print("late")
        except ValueError as error:
            print(error, file=sys.stderr)
    """,
    "switched": """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            print("nobody sees it")
        print(len(caught.getvalue()))
        before, sys.stdout = sys.stdout, sys.stderr
        print("to the error")
        sys.stdout = before
        print("back")
    """,
}


def environment(*, console: bool) -> dict[str, str]:
    """The variables of the program."""
    return {**os.environ, "NODETRACK_CONSOLE": str(console).lower(), "PYTHONIOENCODING": "utf-8"}


def program(name: str) -> list[str]:
    """The command that runs it."""
    return [sys.executable, "-c", _BEGIN + textwrap.dedent(PROGRAMS[name])]


def piped(name: str, folder: Path, *, console: bool) -> tuple[bytes, bytes, int]:
    """Runs it with pipes."""
    folder.mkdir()
    done = subprocess.run(
        program(name),
        cwd=folder,
        env=environment(console=console),
        capture_output=True,
        check=False,
        timeout=60,
    )
    return done.stdout, done.stderr, done.returncode


def in_terminal(name: str, folder: Path, *, console: bool) -> tuple[bytes, int]:
    """Runs it in a terminal of its own."""
    folder.mkdir()
    leader, follower = pty.openpty()
    with subprocess.Popen(
        program(name),
        cwd=folder,
        env=environment(console=console),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    ) as node:
        os.close(follower)
        seen = b""
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            while block := os.read(leader, 65536):
                seen += block
        os.close(leader)
    return seen, node.returncode


def kept(folder: Path, stream: str | None = None) -> list[str]:
    """The lines in the journal, of one stream or of both."""
    [run] = TrackingFolder(folder / ".nodetrack").runs()
    records = [record for attempt in run.attempts for record in attempt.records()]
    lines = [record for record in records if isinstance(record, ConsoleLine)]
    return [line.text for line in lines if stream in (None, line.stream)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_printed_is_the_same_to_the_byte(name: str, tmp_path: Path) -> None:
    without = piped(name, tmp_path / "without", console=False)
    assert piped(name, tmp_path / "with", console=True) == without
    assert without[2] == (1 if name in ("crash", "exit") else 0), without[1].decode()
    assert kept(tmp_path / "without") == []
    assert kept(tmp_path / "with") != []


@pytest.mark.parametrize("name", ["print", "bar", "logging", "crash", "child", "switched"])
def test_in_a_terminal_too(name: str, tmp_path: Path) -> None:
    without = in_terminal(name, tmp_path / "without", console=False)
    assert in_terminal(name, tmp_path / "with", console=True) == without
    assert kept(tmp_path / "with") != []


@pytest.mark.parametrize(
    ("name", "stdout", "stderr"),
    [
        ("print", ["a-1", "bc", "four", "x", "y", "ünïcödé 🙂", "not ended"], ["err"]),
        ("bar", ["100%"], ["100%|####################|"]),
        ("logging", [], ["INFO one", "WARNING two"]),
        ("threads", [f"{name} {count}" for name in "ab" for count in range(50)], []),
        ("child", ["parent", "parent again"], []),
        ("exit", ["before"], ["the reason"]),
        ("closed", ["before"], ["I/O operation on closed file."]),
        ("switched", ["15", "back"], ["to the error"]),
    ],
)
def test_the_lines_are_those_that_a_person_saw(
    name: str, stdout: list[str], stderr: list[str], tmp_path: Path
) -> None:
    piped(name, tmp_path / "with", console=True)
    assert kept(tmp_path / "with", "stdout") == stdout
    assert kept(tmp_path / "with", "stderr") == stderr


def test_the_traceback_of_an_uncaught_exception_is_kept(tmp_path: Path) -> None:
    piped("crash", tmp_path / "with", console=True)
    lines = kept(tmp_path / "with", "stderr")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom 🙂"
    [run] = TrackingFolder(tmp_path / "with" / ".nodetrack").runs()
    assert run.overview().state == "crashed"


def test_a_display_that_redraws_itself_is_a_few_lines(tmp_path: Path) -> None:
    piped("rich", tmp_path / "with", console=True)
    lines = kept(tmp_path / "with")
    assert "half" in lines
    assert len(lines) < 10


@pytest.mark.parametrize("text", ["killed soon", "killed soon 🙂"])
def test_a_line_that_was_printed_survives_a_kill_in_the_next_instant(text: str, tmp_path: Path) -> None:
    body = f"{_BEGIN}\nprint({text!r})\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run(
        [sys.executable, "-c", body], cwd=tmp_path, env=environment(console=True), check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert kept(tmp_path) == [text]


def test_secrets_that_are_printed_reach_no_file(tmp_path: Path) -> None:
    token = "hf_" + "a1B2" * 8
    body = f"""{_BEGIN}
print("token {token}")
print("INFLUXDB_TOKEN=abcdefgh12345678==", file=sys.stderr)
logging.warning("https://user:passw0rd@example.org/x")
print("-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkqh\\n-----END PRIVATE KEY-----")
"""
    subprocess.run(
        [sys.executable, "-c", body], cwd=tmp_path, env=environment(console=True), check=True, timeout=60
    )
    assert len(kept(tmp_path)) == 6
    for path in tmp_path.rglob("*.ntj"):
        for secret in (token, "abcdefgh12345678", "passw0rd", "MIIEvQIBADANBgkqh"):
            assert secret.encode() not in path.read_bytes()


def test_other_ranks_and_disabled_runs_keep_nothing(tmp_path: Path) -> None:
    for number, variables in enumerate(({"RANK": "1", "WORLD_SIZE": "2"}, {"NODETRACK_MODE": "disabled"})):
        body = f"{_BEGIN}\nprint('a'); assert 'write' not in vars(sys.stdout)"
        folder = tmp_path / str(number)
        folder.mkdir()
        subprocess.run(
            [sys.executable, "-c", body],
            cwd=folder,
            env={**environment(console=True), **variables},
            check=True,
            timeout=60,
        )
        assert not list(folder.rglob("*.ntj"))


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_a_wrapper_such_as_wandb_s_lives_beside_it(order: str, tmp_path: Path) -> None:
    """wandb wraps `write` of the same objects, and puts back what it found."""
    wrap = """
heard, original = [], sys.stdout.write
sys.stdout.write = lambda text: (heard.append(text), original(text))[1]
"""
    init = 'run = nodetrack.init("p", version="0.1.0", quiet=True)\n'
    unwrap, finish = "sys.stdout.write = original\n", "run.finish()\n"
    begin, end = (init + wrap, unwrap + finish) if order == "ours first" else (wrap + init, finish + unwrap)
    body = (
        f"import sys, nodetrack\n{begin}print('both')\n{end}print('after')\nprint(heard, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", body],
        cwd=tmp_path,
        env=environment(console=True),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "both\nafter\n"
    assert done.stderr == "['both', '\\n']\n"
    assert kept(tmp_path) == ["both"]
