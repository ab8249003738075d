"""docs/plugins.md shows a whole backend, and its contract: installed as they stand there, they pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, with the package installed beside them."""
    folder = tmp_path_factory.mktemp("documented")
    for name, content in BLOCK.findall((ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")):
        (folder / name).write_text(content, encoding="utf-8")
    how = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *how, "--target", folder / "site", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "mine.py").unlink()  # what is imported is what was installed
    return folder


def python(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def test_the_documented_backend_keeps_the_contract_that_is_documented_with_it(package: Path) -> None:
    """Against a real service. Only the test that is for an SDK has nothing to do."""
    pytest_ = ("-m", "pytest", "-q", "-rs", "-p", "tests.servers.rows_service", "-p", "no:cacheprovider")
    done = python(package, *pytest_, "--rootdir", str(package), "test_mine.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed, 1 skipped", done.stdout, re.MULTILINE), done.stdout
    assert "it needs no SDK" in done.stdout


def test_the_bare_name_of_a_backend_with_a_needed_option_is_answered_by_that_option(package: Path) -> None:
    """As the page says: it is named with its options."""
    code = "from nodetrack.backends.factory import parse_backends; print(parse_backends([{}]))"
    done = python(package, "-c", code.format('"mine"'))
    assert "url" in done.stderr.splitlines()[-1]
    done = python(package, "-c", code.format('{"kind": "mine", "url": "http://rows:9000"}'))
    assert "http://rows:9000" in done.stdout, done.stderr
