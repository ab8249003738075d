"""The set-up: what is pinned, the verbs of make, and the fragments of the changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def requirements() -> Iterator[Requirement]:
    """Everything that `pyproject.toml` asks for: always, by an extra, to develop, to build."""
    lists = [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
        PROJECT["build-system"]["requires"],
    ]
    for line in [line for lines in lists for line in lines]:
        requirement = Requirement(line)
        if requirement.name != "nodetrack":
            yield requirement


def pins() -> dict[str, str]:
    """The version of each package in `constraints.txt`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", {str(each): each for each in requirements()}.values(), ids=str)
def test_every_requirement_has_a_pin_that_satisfies_it(requirement: Requirement) -> None:
    """When this fails: `make constraints`."""
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_no_pin_names_a_local_build() -> None:
    """`torch==2.13.0` takes the CPU build where there is one; `+cpu` would take no other."""
    assert [name for name, version in pins().items() if "+" in version] == []


def test_make_alone_prints_every_verb_with_one_line() -> None:
    verbs = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert verbs is not None
    done = subprocess.run(
        ["make", "--no-print-directory", "--directory", ROOT],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    shown = [line.split()[:2] for line in done.stdout.splitlines()]
    assert sorted(shown) == sorted(["make", verb] for verb in verbs[1].split())


def test_every_changelog_fragment_has_a_name_that_the_release_understands() -> None:
    kinds = {kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"]}
    fragments = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    assert fragments
    for path in fragments:
        assert re.fullmatch(rf"\+[a-z0-9-]+\.({'|'.join(kinds)})\.md", path.name), path.name
        assert path.read_text(encoding="utf-8").strip()


def test_the_check_for_every_change_can_be_executed() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
