"""Finding the version of the code that runs, and ordering versions.

The version is looked for once, when a run starts, and stays what it was then whatever happens to the files
on disk. Versions are compared as PEP 440 says (1.9 < 1.10rc1 < 1.10 < 2.0+cu121), wherever they are compared.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from nodetrack.errors import SettingsError
from nodetrack.machine import git_output, working_folder
from nodetrack.naming import legal_in_version

if TYPE_CHECKING:
    from importlib.metadata import Distribution

    from packaging.version import Version

_log = logging.getLogger("nodetrack")

UNKNOWN_VERSION = "0+unknown"
LONGEST_VERSION = 100
_GIT_TIMEOUT_SECONDS = 2.0

# Programs that run other people's code: their version says nothing about what is trained.
_RUNNERS = frozenset(
    [
        *("accelerate", "deepspeed", "lightning", "submitit", "torch", "torchx", "wandb", "mlflow"),
        *("celery", "dask", "distributed", "ray", "hydra-core", "sagemaker-training"),
        *("ipykernel", "ipython", "jupyter-client", "jupyter-core", "marimo", "papermill", "streamlit"),
        *("gunicorn", "hypercorn", "uvicorn", "debugpy", "pytest"),
    ]
)


class FoundVersion(msgspec.Struct, frozen=True):
    """A version and where it was found, for people to read ("argument", "git describe" …)."""

    version: str
    origin: str


# ---------------------------------------------------------------------------------------------------
# Finding


def find_version(
    explicit: str | None = None, package: str | None = None, start: Path | None = None
) -> FoundVersion:
    """The version of the running code. Never raises: what cannot be read is passed over.

    The first of: `explicit`; NODETRACK_VERSION; the metadata of the installed `package` (default: of the
    package that the main module belongs to); `__version__` of that package or of the main module;
    `git describe` in `start` (default: the folder of the main script, or the working folder);
    `0+unknown`. The result is legal in a metric's flat name: a leading `v` is stripped, blanks, slashes and
    unprintable characters are replaced by `-`, and the text is cut after 100 characters.
    """
    origins: tuple[Callable[[], FoundVersion | None], ...] = (
        lambda: _legal(explicit, "argument"),
        lambda: _legal(os.environ.get("NODETRACK_VERSION"), "NODETRACK_VERSION"),
        lambda: _from_metadata(package),
        lambda: _from_attribute(package),
        lambda: _from_git(start),
    )
    for origin in origins:
        try:
            found = origin()
        except Exception:  # foreign metadata and modules may be broken in any way
            _log.debug("One place to look for the version could not be read.", exc_info=True)
            continue
        if found is not None:
            return found
    return FoundVersion(UNKNOWN_VERSION, "default")


def _legal(text: str | None, origin: str) -> FoundVersion | None:
    """The text as a version that a flat name can hold, with a note in the origin if that took a change."""
    given = _without_v(str(text or "").strip())
    if not given:
        return None
    replaced = "".join(character if legal_in_version(character) else "-" for character in given)
    note = ", characters replaced" if replaced != given else ""
    note += ", shortened" if len(replaced) > LONGEST_VERSION else ""
    return FoundVersion(replaced[:LONGEST_VERSION], origin + note)


def _without_v(text: str) -> str:
    """`v1.2` and `V1.2` are 1.2; `vega` is a name."""
    return text[1:] if re.match(r"[vV][0-9]", text) else text


def _from_metadata(package: str | None) -> FoundVersion | None:
    distribution = _distribution_of(package) if package else _distribution_of_main()
    if distribution is None:
        return None
    return _legal(distribution.version, f"installed package {distribution.name}")


def _distribution_of(package: str) -> Distribution | None:
    """The distribution of that name, or the one that brings the module of that name (`yaml`: PyYAML)."""
    from importlib import metadata

    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError:
        owners = metadata.packages_distributions().get(package.partition(".")[0], [])
        return metadata.distribution(owners[0]) if owners else None


def _distribution_of_main() -> Distribution | None:
    """The distribution that the main module belongs to, if that can be told without doubt."""
    from importlib import metadata

    top_level, file = _main_package(), _main_file()
    if file is None:
        return None
    try:
        found = metadata.distribution(top_level) if top_level else _distribution_of_script(file)
    except metadata.PackageNotFoundError:
        return None
    if found is None or found.name.lower() in _RUNNERS:
        return None
    # A local folder may be called like a package that is installed for something else.
    return found if not top_level or _holds(found, file) else None


def _distribution_of_script(file: Path) -> Distribution | None:
    """The distribution that installed the command being run, such as `.venv/bin/my-node`."""
    from importlib import metadata

    if file.parent != Path(sys.executable).parent:
        return None
    commands = metadata.entry_points(group="console_scripts", name=file.stem)
    return next((command.dist for command in commands if command.dist is not None), None)


def _holds(distribution: Distribution, file: Path) -> bool:
    """Whether the file lies where the distribution is installed, or in the source of an editable install."""
    folders = [Path(str(distribution.locate_file("")))]
    direct_url = distribution.read_text("direct_url.json")
    if direct_url:
        folders.append(Path(unquote(urlsplit(json.loads(direct_url).get("url", "")).path)))
    return any(file.resolve().is_relative_to(folder.resolve()) for folder in folders)


def _from_attribute(package: str | None) -> FoundVersion | None:
    """`__version__` of the named package, of the main module, or of the package around that."""
    names = [package] if package else ["__main__", _main_package()]
    for name in filter(None, names):
        found = _legal(_version_attribute(name), f"{name}.__version__")
        if found is not None:
            return found
    return None


def _version_attribute(name: str) -> str | None:
    """A module's `__version__`. One that is not loaded is read as text: importing it might do anything."""
    module = sys.modules.get(name)
    if module is not None:
        value = getattr(module, "__version__", None)
        return value if isinstance(value, str) else None
    from importlib.util import find_spec

    spec = find_spec(name.partition(".")[0])  # of a submodule, `find_spec` would import the package
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assigned = re.search(r"""^__version__\s*(?::\s*\w+\s*)?=\s*(["'])([^"'\n]+)\1""", source, re.MULTILINE)
    return assigned[2] if assigned else None


def _main_module() -> ModuleType | None:
    return sys.modules.get("__main__")


def _main_package() -> str:
    """The top-level package of what `python -m package.module` runs; "" for a script or a runner."""
    spec = getattr(_main_module(), "__spec__", None)
    name = str(spec.name).partition(".")[0] if spec is not None else ""
    return "" if name.lower().removesuffix("_launcher") in _RUNNERS else name


def _main_file() -> Path | None:
    file = getattr(_main_module(), "__file__", None)
    return Path(file).absolute() if isinstance(file, str) else None


# ---------------------------------------------------------------------------------------------------
# Git


def _from_git(start: Path | None) -> FoundVersion | None:
    described = git_output(
        start or _main_file() or working_folder(),
        *("describe", "--tags", "--always", "--long", "--dirty"),
        timeout=_GIT_TIMEOUT_SECONDS,
    )
    return _legal(version_from_describe(described.strip()), "git describe") if described else None


_DESCRIBED = re.compile(
    r"(?:(?P<tag>.+)-(?P<distance>\d+)-g)?(?P<commit>[0-9a-f]{4,64})(?P<dirty>-dirty)?", re.DOTALL
)


def version_from_describe(described: str) -> str:
    """What `git describe --tags --always --long --dirty` prints, as a PEP 440 version where that can be.

    | git says                  | version                     |
    |---------------------------|-----------------------------|
    | v1.2.0-0-gabc1234         | 1.2.0                       |
    | v1.2.0-0-gabc1234-dirty   | 1.2.0+dirty                 |
    | v1.2.0-5-gabc1234-dirty   | 1.2.0.post5+gabc1234.dirty  |
    | v1.2.0rc1-5-gabc1234      | 1.2.0rc1.post5+gabc1234     |
    | 1.2.dev3-5-gabc1234       | 1.2.dev3+5.gabc1234         |
    | nightly-5-gabc1234        | nightly-5-gabc1234          |
    | abc1234-dirty (no tag)    | 0+gabc1234.dirty            |

    What comes after a tagged version, be it commits or changes, sorts above it.
    """
    match = _DESCRIBED.fullmatch(described)
    if match is None:
        return described
    commit, dirty = f"g{match['commit']}", ["dirty"] if match["dirty"] else []
    if match["tag"] is None:
        return ".".join([f"0+{commit}", *dirty])
    distance = int(match["distance"])
    tagged = _pep440(_without_v(match["tag"].rpartition("/")[2]))
    if tagged is not None:
        return _version_after(tagged, distance, [commit] if distance else [], dirty)
    return "-".join([match["tag"], *([str(distance), commit] if distance else []), *dirty])


def _version_after(tagged: Version, distance: int, commit: list[str], dirty: list[str]) -> str:
    """The version `distance` commits after a tagged one."""
    public, local = tagged.public, [tagged.local] if tagged.local else []
    if distance and (tagged.is_postrelease or tagged.is_devrelease):  # a second `.post` is not allowed
        local.append(str(distance))
    elif distance:
        public = f"{public}.post{distance}"
    local += commit + dirty
    return f"{public}+{'.'.join(local)}" if local else public


# ---------------------------------------------------------------------------------------------------
# Order

Natural = tuple[tuple[int, str], ...]
VersionKey = tuple[bool, "Version", Natural, str]


@functools.lru_cache(maxsize=4096)
def version_key(version: str) -> VersionKey:
    """A key that sorts versions: `sorted(versions, key=version_key)`.

    A total order: PEP 440 versions among themselves as PEP 440 says; any other text below all of them, with
    numbers in it compared as numbers (`run9` < `run10`). Two versions are equal only if they are the same
    text after a leading `v`: of `1.0` and `1.0.0` the shorter comes first.
    """
    text = _without_v(version)
    parsed = _pep440(text)
    if parsed is not None:
        return (True, parsed, (), text)
    return (False, _lowest(), _natural(text), text)


def matches(version: str, spec: str) -> bool:
    """Whether a version passes a filter such as `>=1.10`, `==0.1.*` or `>=1.9,<2`.

    The comparisons mean what they mean to pip, but pre-releases take part. A version that is not of
    PEP 440 passes only `===` with its own text, and `!=`. An empty filter passes everything.

    Raises SettingsError if `spec` is not such a filter.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        specifiers = SpecifierSet(spec)
    except InvalidSpecifier:
        raise SettingsError(
            f'{spec!r} is not a version filter: write comparisons such as ">=1.10", "==0.1.*" or ">=1.9,<2".'
        ) from None
    text = _without_v(version)
    if (parsed := _pep440(text)) is not None:
        return specifiers.contains(parsed, prereleases=True)
    return all(
        specifier.operator == "!=" or (specifier.operator == "===" and specifier.version == text)
        for specifier in specifiers
    )


def _pep440(text: str) -> Version | None:
    from packaging.version import Version

    try:
        return Version(text)
    except ValueError:  # InvalidVersion, or a number too long for int()
        return None


@functools.cache
def _lowest() -> Version:
    from packaging.version import Version

    return Version("0")


def _natural(text: str) -> Natural:
    """Text and numbers by turns; a number as its length and its digits, which compare like the number."""
    parts = re.split(r"([0-9]+)", text)
    digits = [part.lstrip("0") for part in parts[1::2]]
    numbers = [(len(number), number) for number in digits]
    words = [(0, word) for word in parts[0::2]]
    return tuple(part for pair in zip(words, [*numbers, (0, "")], strict=True) for part in pair)
