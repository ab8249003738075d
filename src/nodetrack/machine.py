"""What describes the machine and the process of an attempt: host, liveness, git state, rank.

Nothing here fails for what the machine lacks: no git, no readable `/proc`, no launcher is an answer
too, so that tracking starts anywhere. Heavy modules are imported where they are used.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import platform
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypedDict, cast

import msgspec

from nodetrack.errors import SettingsError
from nodetrack.redact import redact_argv, without_user_info

_log = logging.getLogger("nodetrack")

# ---------------------------------------------------------------------------------------------------
# Host and liveness

# psutil derives an epoch time from the boot time, which the kernel reports in whole seconds and moves
# when the clock is corrected: two readings of one process can differ by a little more than a second.
_CREATED_AT_TOLERANCE_SECONDS = 2.0
_ENDED_STATES = (b"Z", b"X")  # a zombie, or what is left of one
_LARGEST_PID = 2**31 - 1  # pid_t; a damaged lock file may hold anything


class HostIdentity(msgspec.Struct, frozen=True):
    """Where a process number means something: two equal identities share one process table.

    `boot_id` changes with every boot, `pid_namespace` with every container; each is empty where the
    system does not tell.
    """

    hostname: str
    boot_id: str
    pid_namespace: str

    def shares_processes_with(self, other: HostIdentity) -> bool:
        """Whether a pid recorded there can be looked up here.

        The hostname may change under a running machine (DHCP), so it decides only where there is no
        boot id to compare.
        """
        if self.boot_id and other.boot_id:
            return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)
        return self == other


def this_host() -> HostIdentity:
    """The identity of the machine, boot and pid namespace that this process runs in."""
    return HostIdentity(encodable(platform.node()), _boot_id(), _pid_namespace())


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the link's text, not a path
    except OSError:
        return ""


def process_created_at(pid: int | None = None) -> float | None:
    """When the process (default: this one) was started, in epoch seconds; None if it is not alive.

    A zombie is not alive: it can neither log nor let go of anything, and a trainer that was killed
    stays one until its parent looks.
    Raises psutil.AccessDenied where the system hides other people's processes.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.create_time()
    except psutil.NoSuchProcess:
        return None


def process_start_ticks(pid: int | None = None) -> int | None:
    """When the process (default: this one) was started, in clock ticks since the boot.

    Unlike epoch seconds this is the same whenever it is read: no correction of the clock moves it. It names
    a process only together with the boot. None if the process is not alive, or where there is no `/proc`.
    """
    try:
        return _start_ticks(os.getpid() if pid is None else pid)
    except OSError:
        return None


def _start_ticks(pid: int) -> int | None:
    """None if there is no such process; raises OSError where that cannot be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rfind(b")") + 1 :].split()  # the name before it may hold blanks and brackets
    if len(fields) < 20 or fields[0] in _ENDED_STATES:
        return None
    return int(fields[19])


def process_is_alive(pid: int, created_at: float, start_ticks: int | None = None) -> bool:
    """Whether the process `pid` that was started at `created_at` (epoch seconds) still runs here.

    A later process that got the same number is recognised by its start: by `start_ticks`
    (`process_start_ticks`) where they are known, since `created_at` moves with the clock. Where the system
    refuses to say, the process counts as alive: two writers are worse than one too few.
    """
    if not 0 < pid <= _LARGEST_PID:
        return False
    try:
        if start_ticks is not None and _start_ticks(os.getpid()) is not None:
            return _start_ticks(pid) == start_ticks or _is_hidden(pid)
        return _was_created_at(pid, created_at)
    except OSError:  # no descriptor is free to look with
        return True


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process, of which the system tells us nothing (`/proc` with hidepid)."""
    if Path(f"/proc/{pid}").exists():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def _was_created_at(pid: int, created_at: float) -> bool:
    import psutil

    try:
        found = process_created_at(pid)
    except psutil.AccessDenied:
        return True
    return found is not None and abs(found - created_at) <= _CREATED_AT_TOLERANCE_SECONDS


# ---------------------------------------------------------------------------------------------------
# Git


_MAX_GIT_OUTPUT_BYTES = 1024 * 1024


class GitState(msgspec.Struct, frozen=True):
    """The working tree an attempt was started from.

    `commit` is None before the first commit, `branch` is None on a detached head; `dirty` is about
    tracked files only; `remote` carries no user name or password.
    """

    commit: str | None
    branch: str | None
    dirty: bool
    remote: str | None


def git_state(start: Path, timeout: float = 1.0) -> GitState | None:
    """The state of the working tree around `start`, or None if git cannot tell within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    status = git_output(start, "status", "--porcelain=v2", "--branch", "-uno", timeout=timeout)
    if status is None:
        return None
    headers, changes = _parse_status(status)
    remotes = git_output(
        start, "config", "--get-regexp", r"^remote\..*\.url$", timeout=deadline - time.monotonic()
    )
    return GitState(
        commit=_unless(headers.get("branch.oid"), "(initial)"),
        branch=_unless(headers.get("branch.head"), "(detached)"),
        dirty=bool(changes),
        remote=_remote_url(remotes or "", headers.get("branch.upstream", "")),
    )


def git_output(start: Path, *arguments: str, timeout: float) -> str | None:
    """What `git <arguments>` prints in `start` (or the folder of the file `start`); None if it fails.

    Bounded by `timeout` seconds, asks nothing, takes no lock of the repository, and never raises.
    """
    if timeout <= 0:
        return None
    folder = start if os.path.isdir(start) else start.parent  # noqa: PTH112 - raises for no folder
    try:
        printed = _run_bounded(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments], folder, timeout
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return None if printed is None else printed.decode("utf-8", errors="replace")


def _run_bounded(command: list[str], folder: Path, timeout: float) -> bytes | None:
    """What a command prints; None if it fails, takes longer, or prints more than a megabyte."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=_git_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            printed = _read_bounded(cast("BinaryIO", process.stdout), time.monotonic() + timeout)
            return printed if printed is not None and process.wait(timeout) == 0 else None
        finally:
            process.kill()  # harmless when it has ended


def _read_bounded(pipe: BinaryIO, deadline: float) -> bytes | None:
    """All that comes until the end; None if that is too late or too much. A child of the command's may keep
    the pipe open for long.
    """
    printed = b""
    with selectors.PollSelector() as waiting:
        waiting.register(pipe, selectors.EVENT_READ)
        while len(printed) <= _MAX_GIT_OUTPUT_BYTES and waiting.select(max(0.0, deadline - time.monotonic())):
            more = os.read(pipe.fileno(), 65536)
            if not more:
                return printed
            printed += more
    return None


def _git_environment() -> dict[str, str]:
    """This environment, without what would point git at another repository than the one around us.

    A trainer that a git hook starts inherits `GIT_DIR` and its like.
    """
    foreign = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"}
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def _parse_status(status: str) -> tuple[dict[str, str], list[str]]:
    """The `# key value` headers of `git status --porcelain=v2`, and its lines about changed files."""
    lines = status.splitlines()
    headers = [line[2:].partition(" ") for line in lines if line.startswith("# ")]
    return {key: value for key, _, value in headers}, [line for line in lines if not line.startswith("# ")]


def _remote_url(config_lines: str, upstream: str) -> str | None:
    """The URL of the branch's own remote, else of `origin`, else of the first one."""
    urls: dict[str, str] = {}
    for line in config_lines.splitlines():
        key, _, url = line.partition(" ")
        urls.setdefault(key.removeprefix("remote.").removesuffix(".url"), url)
    wanted = [name for name in urls if upstream.startswith(f"{name}/")] + ["origin", *urls]
    return next((without_user_info(urls[name]) for name in wanted if name in urls), None)


def _unless(value: str | None, placeholder: str) -> str | None:
    return None if value == placeholder else value


# ---------------------------------------------------------------------------------------------------
# Process


class ProcessDescription(TypedDict):
    """What an attempt's metadata says about its process. Plain values, nothing secret."""

    pid: int
    hostname: str
    command: list[str]
    cwd: str | None
    executable: str
    python: str
    platform: str
    cpu_count: int | None
    memory_total_bytes: int


def describe_process() -> ProcessDescription:
    """Describe this process and its machine; the command line is redacted. Never raises.

    About the person it says no more than the hostname and the working folder do. Bytes that are no UTF-8
    are told as escapes.
    """
    return {
        "pid": os.getpid(),
        "hostname": encodable(platform.node()),
        "command": _command(),
        "cwd": _working_folder(),
        "executable": encodable(sys.executable or ""),  # None where Python is embedded
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": encodable(platform.platform()),
        "cpu_count": os.cpu_count(),
        "memory_total_bytes": _memory_total_bytes(),
    }


def encodable(text: str) -> str:
    """The text as UTF-8 can hold it: bytes of a file name that are no text become their escapes.

    For people to read only: no such file can be opened by this name.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def working_folder() -> Path:
    """The working folder; one that was removed is told where it was."""
    try:
        return Path.cwd()
    except OSError:
        return _removed_folder()


def _removed_folder() -> Path:
    try:
        return Path(os.readlink("/proc/self/cwd").removesuffix(" (deleted)"))  # noqa: PTH115 - the text
    except OSError:
        return Path(os.environ.get("PWD") or os.sep)


def _command() -> list[str]:
    try:
        return [encodable(word) for word in redact_argv(sys.orig_argv)]
    except Exception:  # whatever a program has put there; rather nothing than what was not redacted
        _log.debug("The command line could not be read.", exc_info=True)
        return []


def _working_folder() -> str | None:
    try:
        return encodable(str(Path.cwd()))
    except OSError:  # removed under us
        return None


def _memory_total_bytes() -> int:
    import psutil

    try:
        return int(psutil.virtual_memory().total)
    except (OSError, psutil.Error, RuntimeError, ValueError):  # no readable /proc
        return 0


# ---------------------------------------------------------------------------------------------------
# Rank


class Rank(msgspec.Struct, frozen=True):
    """This process's place in a distributed job; `origin` names what said so.

    `local_rank` and `world_size` are None where nothing tells them.
    """

    rank: int
    local_rank: int | None
    world_size: int | None
    origin: str

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes when only one does."""
        return self.rank == 0


class _Launcher(NamedTuple):
    """The environment variables in which one launcher tells a process its place."""

    rank: str
    local_rank: str
    world_size: str


_LAUNCHERS = (
    _Launcher("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # torchrun, accelerate, deepspeed
    _Launcher("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # MPICH, Intel MPI
    _Launcher("PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE"),
    _Launcher("LOCAL_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)


class _TorchDistributed(Protocol):
    """The part of `torch.distributed` that is asked; torch itself is never imported here."""

    def is_available(self) -> bool: ...
    def is_initialized(self) -> bool: ...
    def get_rank(self) -> int: ...
    def get_world_size(self) -> int: ...


def find_rank(explicit: int | None = None) -> Rank:
    """This process's rank: argument, then an initialised torch.distributed, then the launcher's variables.

    The variables are, in order, RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK and
    LOCAL_RANK; with none of them the process is rank 0. A value that is not a rank is warned of once
    and ignored. Raises SettingsError for an explicit rank below 0.
    """
    if explicit is not None:
        return _explicit_rank(explicit)
    return _torch_rank() or _launcher_rank() or Rank(0, None, None, "default")


def _explicit_rank(rank: int) -> Rank:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise SettingsError(f"rank is {rank!r}, given as an argument: pass a whole number from 0 on.")
    return Rank(rank, _count_from("LOCAL_RANK"), _count_from("WORLD_SIZE"), "argument")


def _torch_rank() -> Rank | None:
    """The rank in the default process group; None unless the program itself set one up."""
    module = sys.modules.get("torch.distributed")
    if module is None:
        return None
    distributed = cast(_TorchDistributed, module)
    try:
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    except (AttributeError, RuntimeError, ValueError):  # half imported, or torn down meanwhile
        return None
    return Rank(rank, _count_from("LOCAL_RANK"), world_size, "torch.distributed")


def _launcher_rank() -> Rank | None:
    for launcher in _LAUNCHERS:
        rank = _count_from(launcher.rank)
        if rank is not None:
            local_rank, world_size = _count_from(launcher.local_rank), _count_from(launcher.world_size)
            return Rank(rank, local_rank, world_size, launcher.rank)
    return None


def _count_from(variable: str) -> int | None:
    """The whole number in an environment variable; None if it is unset, empty or something else."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    _warn_of_variable(variable, text)
    return None


@functools.cache
def _warn_of_variable(variable: str, text: str) -> None:
    """Cached, so that each value is warned of once however often the rank is looked up."""
    _log.warning(
        "%s is %.40r in the environment, which is not a whole number from 0 on: it is ignored.",
        variable,
        text,
    )
