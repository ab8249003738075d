from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from nodetrack import naming
from nodetrack import version as version_module
from nodetrack.errors import SettingsError
from nodetrack.version import FoundVersion, find_version, matches, version_from_describe, version_key


@pytest.fixture(autouse=True)
def no_version_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an environment variable nor the settings of the user's git decide a test."""
    monkeypatch.delenv("NODETRACK_VERSION", raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)


SOURCE = str(Path(version_module.__file__).parents[1])


def run_node(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run Python as a node would, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


PRINT_VERSION = (
    "from nodetrack.version import find_version\nfound = find_version()\nprint(*found.__reduce__()[1])\n"
)


def install(site: Path, name: str, version: str, **files: str) -> None:
    """Lay out an installed distribution as pip does."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        (info / file.replace("__", ".")).write_text(text)


def git(folder: Path, *arguments: str) -> str:
    person = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    done = subprocess.run(
        ["git", *person, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


# --- finding


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODETRACK_VERSION", "0.3.0")

    assert find_version("0.2.0") == FoundVersion("0.2.0", "argument")
    assert find_version() == FoundVersion("0.3.0", "NODETRACK_VERSION")
    assert find_version("  ") == FoundVersion("0.3.0", "NODETRACK_VERSION")


def test_a_named_package_gives_its_installed_version() -> None:
    found = find_version(package="hypothesis")

    assert found.origin == "installed package hypothesis"
    assert Version(found.version) >= Version("6")


def test_a_package_is_found_by_the_name_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "my-node", "1.2.3", top_level__txt="mynode_module\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert find_version(package="mynode_module") == FoundVersion("1.2.3", "installed package my-node")


def test_a_package_that_is_not_installed_gives_its_attribute_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "localnode").mkdir()
    (tmp_path / "localnode" / "__init__.py").write_text('raise SystemExit\n__version__: str = "0.7"\n')
    monkeypatch.syspath_prepend(tmp_path)

    assert find_version(package="localnode") == FoundVersion("0.7", "localnode.__version__")


def test_a_script_is_known_by_its_own_attribute(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f'__version__ = "0.4"\n{PRINT_VERSION}')

    assert run_node("train.py", cwd=tmp_path) == "0.4 __main__.__version__"


def test_a_module_is_known_by_the_package_it_belongs_to(tmp_path: Path) -> None:
    package = tmp_path / "localnode"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.5"\n')
    (package / "train.py").write_text(PRINT_VERSION)

    assert run_node("-m", "localnode.train", cwd=tmp_path) == "0.5 localnode.__version__"


def test_an_installed_module_is_known_by_its_distribution(tmp_path: Path) -> None:
    install(tmp_path, "localnode", "0.6")
    (tmp_path / "localnode").mkdir()
    (tmp_path / "localnode" / "train.py").write_text(PRINT_VERSION)

    assert run_node("-m", "localnode.train", cwd=tmp_path) == "0.6 installed package localnode"


@pytest.mark.parametrize(
    ("url", "expected"),
    [("file://{source}", "0.6 installed package localnode"), ("file:///elsewhere", "0+unknown default")],
)
def test_a_local_folder_is_taken_for_an_installed_package_only_where_that_is_editable(
    url: str, expected: str, tmp_path: Path
) -> None:
    """`python -m train` in one's own folder has nothing to do with a `train` from an index."""
    site, source = tmp_path / "site", tmp_path / "my source"
    (source / "localnode").mkdir(parents=True)
    (source / "localnode" / "train.py").write_text(PRINT_VERSION)
    address = url.format(source=str(source).replace(" ", "%20"))
    install(site, "localnode", "0.6", direct_url__json=f'{{"url": "{address}"}}')

    found = run_node("-m", "localnode.train", cwd=source, PYTHONPATH=f"{site}{os.pathsep}{SOURCE}")

    assert found == expected


def test_the_command_of_an_installed_package_is_known_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "my-node", "1.4", entry_points__txt="[console_scripts]\nmy-node-run = m:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    script = Path(sys.executable).parent / "my-node-run"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)

    assert find_version() == FoundVersion("1.4", "installed package my-node")


@pytest.mark.parametrize("script", ["elsewhere/my-node-run", "{bin}/pytest"])
def test_a_script_that_is_called_like_a_command_or_only_runs_others_is_not_taken_for_a_package(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "my-node", "1.4", entry_points__txt="[console_scripts]\nmy-node-run = m:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / script.format(bin=Path(sys.executable).parent)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(file), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.delattr(sys.modules["__main__"], "__version__", raising=False)

    assert find_version(start=tmp_path) == FoundVersion("0+unknown", "default")


def test_a_program_that_runs_other_peoples_code_does_not_lend_it_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's kernel or a test run has a version, but it is not the version of anybody's training."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", pytest.__file__, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", importlib.util.find_spec("pytest.__main__"))

    assert find_version(start=tmp_path) == FoundVersion("0+unknown", "default")


def test_nothing_known_is_said_so(tmp_path: Path) -> None:
    assert find_version(start=tmp_path, package="no_such_package") == FoundVersion("0+unknown", "default")


def test_broken_places_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "METADATA").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.py").write_bytes(b"\xff\xfe")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", "")

    assert find_version(package="broken", start=tmp_path / "missing") == FoundVersion("0+unknown", "default")


@pytest.mark.case("C063")
def test_a_version_that_was_found_stays_whatever_happens_to_the_files(tmp_path: Path) -> None:
    (tmp_path / "localnode").mkdir()
    file = tmp_path / "localnode" / "__init__.py"
    file.write_text('__version__ = "0.5"\n')
    (tmp_path / "train.py").write_text(
        "import localnode, pathlib, sys\n"
        "from nodetrack.version import find_version\n"
        "pathlib.Path(localnode.__file__).write_text('__version__ = \"0.6\"')\n"
        "print(find_version(package='localnode').version)\n"
    )

    assert run_node("-B", "train.py", cwd=tmp_path) == "0.5"
    assert run_node("-B", "train.py", cwd=tmp_path) == "0.6"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("v1.2.3", FoundVersion("1.2.3", "argument")),
        (" V1 ", FoundVersion("1", "argument")),
        ("vega", FoundVersion("vega", "argument")),
        ("feature/x y", FoundVersion("feature-x-y", "argument, characters replaced")),
        ("1\n2\x00\u2028\ud800", FoundVersion("1-2---", "argument, characters replaced")),
        ("1" * 200, FoundVersion("1" * 100, "argument, shortened")),
    ],
)
def test_a_version_is_made_fit_for_a_flat_name(given: str, expected: FoundVersion) -> None:
    assert find_version(given) == expected


@given(st.text(min_size=1) | st.text("v1/ \x00", min_size=1))
def test_whatever_is_given_the_version_is_legal(given: str) -> None:
    assert naming.check_version(find_version(given, start=Path("/nonexistent")).version) is None


# --- git


def test_a_repository_without_other_signs_is_described(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "train.py").write_text(PRINT_VERSION)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert run_node("train.py", cwd=tmp_path) == f"0+g{commit} git describe"

    git(tmp_path, "tag", "v1.2.0")
    assert run_node(tmp_path / "train.py", cwd=tmp_path.parent) == "1.2.0 git describe"

    (tmp_path / "train.py").write_text(f"{PRINT_VERSION}\n")
    assert run_node("train.py", cwd=tmp_path) == "1.2.0+dirty git describe"


@pytest.mark.parametrize(
    ("described", "version"),
    [
        ("v1.2.0-0-gabc1234", "1.2.0"),
        ("v1.2.0-0-gabc1234-dirty", "1.2.0+dirty"),
        ("v1.2.0-5-gabc1234", "1.2.0.post5+gabc1234"),
        ("v1.2.0-5-gabc1234-dirty", "1.2.0.post5+gabc1234.dirty"),
        ("v1.2.0-rc.1-5-gabc1234", "1.2.0rc1.post5+gabc1234"),
        ("1.2.post1-5-gabc1234", "1.2.post1+5.gabc1234"),
        ("1.2.dev3-5-gabc1234-dirty", "1.2.dev3+5.gabc1234.dirty"),
        ("v2.0+cu121-5-gabc1234", "2.0.post5+cu121.gabc1234"),
        ("node/v0.3-0-gabc1234", "0.3"),
        ("2024-0-gabc1234", "2024"),
        ("nightly-0-gabc1234", "nightly"),
        ("nightly-5-gabc1234-dirty", "nightly-5-gabc1234-dirty"),
        ("abc1234", "0+gabc1234"),
        ("abc1234-dirty", "0+gabc1234.dirty"),
        ("1234567", "0+g1234567"),
        ("what is this", "what is this"),
    ],
)
def test_a_git_description_becomes_a_version(described: str, version: str) -> None:
    assert version_from_describe(described) == version


def test_what_comes_after_a_tag_sorts_above_it_and_below_the_next_one() -> None:
    described = [
        "v1.2-0-gabc1234",
        "v1.2-0-gabc1234-dirty",
        "v1.2-5-gabc1234",
        "v1.2-10-gabc1234",
        "v1.3-0-gabc1",
    ]
    versions = [version_from_describe(text) for text in described]

    assert sorted(versions, key=version_key) == versions


# --- order


@pytest.mark.case("C075")
def test_versions_sort_as_pep_440_says_with_all_others_below() -> None:
    in_order = [
        "",
        "main",
        "run9",
        "run10",
        "0+unknown",
        "1.9",
        "1.10rc1",
        "v1.10",
        "1.10.0",
        "2.0",
        "2.0+cu121",
    ]

    for shuffled in itertools.islice(itertools.permutations(in_order), 0, None, 99_991):
        assert sorted(shuffled, key=version_key) == in_order


def test_versions_are_the_same_only_as_the_same_text_after_the_v() -> None:
    assert version_key("v1.10") == version_key("1.10")
    assert version_key("1.10") != version_key("1.10.0")
    assert version_key("run1") != version_key("run01")


any_version = st.text(max_size=6) | st.from_regex(
    r"v?[0-9]{1,2}(\.[0-9]{1,2}){0,2}(rc1|\.post1|\+l)?", fullmatch=True
)


@given(any_version, any_version, any_version)
def test_the_order_is_total(one: str, two: str, three: str) -> None:
    low, middle, high = sorted([one, two, three], key=version_key)

    assert version_key(low) <= version_key(middle) <= version_key(high)
    assert version_key(low) <= version_key(high)
    assert (version_key(one) == version_key(two)) is (
        version_module._without_v(one) == version_module._without_v(two)
    )


def test_a_number_of_any_length_can_be_sorted() -> None:
    assert version_key("run" + "1" * 10_000) > version_key("run" + "9" * 9_999)
    assert version_key("1" * 10_000) < version_key("0")


# --- filters


@pytest.mark.case("C075")
def test_a_filter_keeps_the_versions_from_1_10_on() -> None:
    versions = ["1.9", "1.10", "1.10rc1", "2.0+cu121"]

    assert [version for version in versions if matches(version, ">=1.10")] == ["1.10", "2.0+cu121"]


@pytest.mark.parametrize(
    ("version", "spec", "expected"),
    [
        ("0.1.7", "==0.1.*", True),
        ("0.2.0", "==0.1.*", False),
        ("1.10rc1", ">=1.9,<2", True),
        ("v1.10", "==1.10", True),
        ("1.10", "==v1.10.0", True),
        ("1.2.0.post5+gabc", ">=1.2", True),
        ("main", "===main", True),
        ("main", "===other", False),
        ("main", "!=1.0", True),
        ("main", ">=0", False),
        ("main", "", True),
        ("1", "", True),
    ],
)
def test_a_filter_means_what_it_means_to_pip_with_pre_releases(
    version: str, spec: str, expected: bool
) -> None:
    assert matches(version, spec) is expected


@pytest.mark.parametrize("spec", ["1.0", "newest", ">=", "=>1", ">=1 <2"])
def test_a_filter_that_is_none_is_refused_in_one_sentence(spec: str) -> None:
    with pytest.raises(SettingsError, match="is not a version filter: write comparisons such as"):
        matches("1.0", spec)


def test_the_module_loads_without_packaging() -> None:
    code = (
        "import sys; import nodetrack.version;"
        "print([name for name in ('packaging', 'psutil') if name in sys.modules])"
    )

    assert run_node("-c", code, cwd=Path.cwd()) == "[]"
