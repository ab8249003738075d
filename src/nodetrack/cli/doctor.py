"""`nodetrack doctor`: what this installation is set to, what it has, and whether it can write."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import typer
from rich.text import Text

import nodetrack
from nodetrack.backends._wandb_lineage import WandbConfig
from nodetrack.backends.base import BackendConfig
from nodetrack.backends.factory import backend_class, kind_of, parse_backends, secret_options
from nodetrack.cli.command import FOUND_WRONG, AsJson, Folder, ends_well
from nodetrack.cli.strict_json import json_line, json_text
from nodetrack.cli.sync_jobs import take_variables_from_dotenv
from nodetrack.cli.terminal import console, print_table, printable, table
from nodetrack.errors import NodetrackError
from nodetrack.identity.wandb_verifier import has_credentials
from nodetrack.journal.folder import TrackingFolder
from nodetrack.redact import MASK, redact, redact_text, secrecy_of
from nodetrack.settings import Backends, Settings, Written, resolve

#: What a node started here would be told. This process would be told of nodetrack, whose program it runs.
_FIND_VERSION = """
import json, sys
from nodetrack.version import find_version
found = find_version(*json.loads(sys.argv[1]))
print(json.dumps([found.version, found.origin]))
"""
_REQUIREMENT = re.compile(r"""(?P<package>[\w.-]+)[^;]*;.*\bextra\s*==\s*['"](?P<extra>[\w-]+)['"]""")


class SettingReport(msgspec.Struct, frozen=True):
    """A setting's value and the layer that it comes from."""

    value: object
    origin: str


class ExtraReport(msgspec.Struct, frozen=True):
    """A package that an extra brings, and its version if it is there."""

    extra: str
    package: str
    version: str | None


class BackendReport(msgspec.Struct, frozen=True):
    """A backend that rows are to go to, and whether a node could begin with it."""

    backend: str
    origin: str
    #: Why a node could not begin with it; None when it could.
    problem: str | None
    #: Variables for credentials, when none is set and no option holds any. Not every service needs one.
    unset: list[str]


class DoctorReport(msgspec.Struct, frozen=True):
    """What `doctor --json` prints."""

    nodetrack: str
    python: str
    platform: str
    folder: str
    folder_exists: bool
    #: Why the folder cannot be written; None when it can.
    folder_problem: str | None
    runs_by_project: dict[str, int]
    settings: dict[str, SettingReport]
    #: The version that a script started in the working folder would have, and where it is found.
    version: SettingReport
    extras: list[ExtraReport]
    backends: list[BackendReport]


@ends_well
def doctor(folder: Folder = None, as_json: AsJson = False) -> None:
    """Print every setting with its origin, the versions that are installed, the state of the folder, and what
    is wrong with the backends. No service is asked.

    Exit code 1 when the folder cannot be written, or a backend cannot be used as it is set up.
    """
    report = _examine(folder)
    if as_json:
        typer.echo(json_text(msgspec.to_builtins(report)))
    else:
        _print(report)
    if report.folder_problem or any(backend.problem for backend in report.backends):
        raise typer.Exit(FOUND_WRONG)


def _examine(folder: Path | None) -> DoctorReport:
    resolved = resolve({"dir": folder})
    values = redact(resolved.settings.model_dump(mode="json"), resolved.settings.redact)
    backends = resolved.settings.backends
    values["backends"] = [_without_secrets(entry, resolved.settings.redact) for entry in backends]
    place = resolved.settings.dir
    return DoctorReport(
        nodetrack=nodetrack.__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        folder=str(place.absolute()),
        folder_exists=place.is_dir(),
        folder_problem=_writing_problem(place.absolute()),
        runs_by_project=dict(Counter(run.project for run in TrackingFolder(place).runs())),
        settings={name: SettingReport(value, resolved.origins[name]) for name, value in values.items()},
        version=_found_version(resolved.settings, resolved.origins["version"]),
        extras=_extras(),
        backends=_judged(backends),
    )


def _judged(backends: Sequence[Written]) -> list[BackendReport]:
    """Each backend alone, so that all that is wrong is told at once."""
    if not isinstance(backends, Backends):
        return []
    reports: list[BackendReport] = []
    for entry, origin in zip(backends, backends.origins, strict=True):
        kind = str(entry if isinstance(entry, str) else entry.get("kind"))
        alone = Backends([entry], origin, in_use=backends.in_use)
        problem, unset = None, list[str]()
        try:
            take_variables_from_dotenv(alone)
            unset = _unset_credentials(*parse_backends(alone).values())
            if kind in [report.backend for report in reports]:
                problem = f"The backend {kind!r} is named twice (from {origin}): name it once."
            elif kind == "wandb" and unset and backends.in_use:
                problem = "W&B has no credentials: set WANDB_API_KEY or run `wandb login`."
        except NodetrackError as error:
            problem = redact_text(str(error))
        reports.append(BackendReport(redact_text(kind), origin, problem, unset))
    return reports


def _unset_credentials(config: BackendConfig) -> list[str]:
    """See BackendReport."""
    variables = [name for name in backend_class(kind_of(config)).variables if secrecy_of(name)]
    given = any(getattr(config, name) is not None for name in secret_options(type(config)))
    if given or any(os.environ.get(name) for name in variables):
        return []
    if isinstance(config, WandbConfig) and (config.offline or has_credentials()):
        return []
    return variables


def _without_secrets(entry: Written, keys: Sequence[str]) -> object:
    """What holds a secret for the backend is masked too, whatever it is called."""
    options = {"kind": entry} if isinstance(entry, str) else entry
    with contextlib.suppress(NodetrackError):  # it is judged below
        secret = secret_options(backend_class(str(options.get("kind"))).config_class)
        options = {name: MASK if name in secret else value for name, value in options.items()}
    return redact_text(entry) if isinstance(entry, str) else redact(options, keys)


def _found_version(settings: Settings, origin: str) -> SettingReport:
    if settings.version is not None:
        return SettingReport(settings.version, origin)
    given = json_line([None, settings.package])
    done = subprocess.run(
        [sys.executable, "-c", _FIND_VERSION, given], check=False, capture_output=True, text=True
    )
    if done.returncode:
        return SettingReport(None, "cannot be asked: Python does not start here")
    version, origin = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[str, str])
    return SettingReport(version, origin)


def _writing_problem(folder: Path) -> str | None:
    """Why a node could not write there. Tried where the folder exists; else its nearest parent is asked."""
    if folder.exists():
        try:
            with tempfile.TemporaryFile(dir=folder):
                return None
        except OSError as error:
            return f"{folder} cannot be written: {error.strerror}."
    parent = next(parent for parent in folder.parents if parent.exists())
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return None
    return f"{folder} cannot be made: {parent} is no folder that this user may write."


def _extras() -> list[ExtraReport]:
    """The packages of the extras, without the extra `all`, which is the others together."""
    requirements = metadata.requires("nodetrack") or []
    matches = [match for match in map(_REQUIREMENT.match, requirements) if match is not None]
    found = {(match["extra"], match["package"]) for match in matches if match["extra"] != "all"}
    return [ExtraReport(extra, package, _version(package)) for extra, package in sorted(found)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print(report: DoctorReport) -> None:
    screen = console()
    screen.print(f"nodetrack {report.nodetrack}, {report.python}, {report.platform}")
    screen.print(_folder_line(report))
    settings = table("setting", "value~", "from~")
    for name, setting in report.settings.items():
        style = "dim" if setting.origin == "default" else ""
        value, origin = setting.value, setting.origin
        if name == "version" and value is None:
            value, found = report.version.value, report.version.origin
            origin = "not found" if found == "default" else f"found: {found}"
        settings.add_row(name, _value(value), printable(origin), style=style)
    extras = table("extra", "package", "version~")
    for extra in report.extras:
        version = extra.version or Text(f"not installed: pip install 'nodetrack[{extra.extra}]'", style="dim")
        extras.add_row(extra.extra, extra.package, version)
    backends = table("backend", "from~", "state~")
    for backend in report.backends:
        state = Text(backend.problem, style="red") if backend.problem else Text("can be used as it is set up")
        if backend.unset and not backend.problem:
            state = Text(f"can be used if the service needs none of {', '.join(backend.unset)}: not set here")
        backends.add_row(printable(backend.backend), printable(backend.origin), state)
    for listed in (settings, extras, *([backends] if report.backends else [])):
        screen.print()
        print_table(screen, listed)


def _folder_line(report: DoctorReport) -> Text:
    if report.folder_problem:
        return Text(report.folder_problem, style="red")
    runs = ", ".join(f"{count} of {project}" for project, count in report.runs_by_project.items())
    state = f"runs: {runs}" if runs else "no runs yet" if report.folder_exists else "not there yet"
    return Text(f"{report.folder} can be written; {state}")


def _value(value: object) -> str:
    return printable(value if isinstance(value, str) else "" if value is None else json_line(value))
