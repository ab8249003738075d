"""Every exception that nodetrack raises on purpose, as one tree.

    NodetrackError
    ├── UsageError                the caller's own mistake, raised where it is made
    │   ├── NoActiveRunError      module-level `log` or `finish` before `init`
    │   └── RunFinishedError      a run is used after `finish`
    ├── SettingsError             a setting has a value that cannot be used
    ├── HparamsError              a hyper-parameter file, key or value is wrong
    ├── IdentityError             the run that was asked for cannot be taken up
    │   ├── IdentityInUseError    another live process is this node
    │   ├── RunNotFoundError      `resume="must"` and there is no such run
    │   └── RunExistsError        `resume="never"` and the given id is taken
    ├── JournalError              a file is not a journal segment that this version reads
    ├── BackendError
    │   ├── UnknownBackendError   no backend has that name
    │   ├── BackendRefusedError   a service refuses the credentials, or does not know the project
    │   ├── BackendUnavailableError  a service cannot be had just now
    │   └── BatchRejectedError    a service will never take what was sent
    ├── MissingExtraError         an optional package is needed
    └── DemoError                 `nodetrack demo` cannot start or go on
        └── DemoNodeError         a node of the demo ended by a fault

Each message is one sentence or two: what happened, where, and what to do. What a program may want to
act on is kept as attributes.
"""

from __future__ import annotations

from pathlib import Path

from nodetrack.invalid import nearest, shown


class NodetrackError(Exception):
    """The root: catch this to catch everything that nodetrack raises on purpose."""


class UsageError(NodetrackError):
    """The caller's own mistake, such as a metric name that is not a string."""


class NoActiveRunError(UsageError):
    """A module-level function was called before `nodetrack.init`."""

    def __init__(self, call: str) -> None:
        super().__init__(f"nodetrack.{call} needs an active run: call nodetrack.init() first.")
        self.call = call


class RunFinishedError(UsageError):
    """A run was used after `finish`."""

    def __init__(self, run_id: str, call: str) -> None:
        super().__init__(
            f"Run {run_id} is finished, so {call}() cannot record anything: "
            "call nodetrack.init() to start a new attempt of it."
        )
        self.run_id = run_id
        self.call = call


class SettingsError(NodetrackError):
    """A setting has a value that cannot be used; the message names the setting and where it came from."""


class HparamsError(NodetrackError):
    """A hyper-parameter file, key or value is wrong.

    Attributes: `path` (file, or None for an override), `line` and `column` (1-based, or None),
    `key` (dotted, or None).
    """

    def __init__(
        self,
        message: str,
        *,
        path: Path | None = None,
        line: int | None = None,
        column: int | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.line = line
        self.column = column
        self.key = key


class IdentityError(NodetrackError):
    """The run that was asked for cannot be taken up."""


class IdentityInUseError(IdentityError):
    """Another live process is this node. Attributes: `pid`, `host`."""

    def __init__(self, node: str, pid: int, host: str) -> None:
        super().__init__(
            f"Node {node} is already running as process {pid} on {host}: stop that process, give this one "
            'another uid, or pass on_conflict="new" to log to a run of its own.'
        )
        self.node = node
        self.pid = pid
        self.host = host


class RunNotFoundError(IdentityError):
    """`resume="must"`, or a command that names a run, found no such run."""


class RunExistsError(IdentityError):
    """`resume="never"` was asked for an id that already has a run."""


class JournalError(NodetrackError):
    """A file is not a journal segment that this version can read. Attribute: `path`."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class BackendError(NodetrackError):
    """The root of what can go wrong with a backend."""


class UnknownBackendError(BackendError):
    """No backend has that name. Attributes: `name`, `known`, and `origin`: where it was written, if known."""

    def __init__(self, name: str, known: tuple[str, ...], origin: str = "") -> None:
        near = nearest(name, known)
        super().__init__(
            f"There is no backend named {shown(name)}; known backends: {', '.join(known)}."
            + (f" Did you mean {near!r}?" if near else "")
            + (f" The name comes from {origin}." if origin else "")
        )
        self.name = name
        self.known = known
        self.origin = origin


class BackendRefusedError(BackendError):
    """A service refuses us: wrong credentials, an unknown project, a version that it does not speak with.

    The message is the service's own words and what to do. Attribute: `backend`, once `init` raises it.
    """

    def __init__(self, message: str, backend: str = "") -> None:
        super().__init__(message)
        self.backend = backend


class BackendUnavailableError(BackendError):
    """A service cannot be had just now. Attribute: `retry_after_seconds`, None if it did not say."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class BatchRejectedError(BackendError):
    """A service will never take this batch. Of one record it is the reason why that is kept in quarantine."""


class MissingExtraError(NodetrackError):
    """An optional package is needed. Attributes: `package`, `extra`."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs {package}: install it with  pip install 'nodetrack[{extra}]'.")
        self.package = package
        self.extra = extra


class DemoError(NodetrackError):
    """`nodetrack demo` cannot start or go on; the message says why and what to do."""


class DemoNodeError(DemoError):
    """A node of the demo ended by a fault. Attributes: `node`, `exit_code`, `last_lines`, `output`."""

    def __init__(self, node: str, exit_code: int, last_lines: str, output: Path) -> None:
        super().__init__(
            f"{node} ended with exit code {exit_code}. "
            f"The last it printed (all of it in {output}):\n{last_lines}"
        )
        self.node = node
        self.exit_code = exit_code
        self.last_lines = last_lines
        self.output = output


def describe(error: BaseException | None) -> str:
    """An error in one line, for a table. What is not ours has its type in front."""
    text = " ".join(str(error).split())
    if not isinstance(error, BackendRefusedError | BackendUnavailableError):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text if len(text) <= 500 else f"{text[:500]}…"
