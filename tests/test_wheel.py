"""The wheel as it will be installed: built from the source distribution, with the source out of the way."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "nodetrack"
NODE = """
import nodetrack
run = nodetrack.init(project="wheel", role="miner", uid=1, version="1.2.3", config={"learning_rate": 0.1})
run.log({"train/loss": 0.5}, step=7)
run.finish()
print(nodetrack.__file__)
"""


def call(*command: str | Path, folder: Path) -> str:
    """What a program prints, run in `folder` by somebody who has no source of nodetrack on the path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution, so that nothing the latter lacks gets in."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which borrows the packages it depends on from this one.

    A path in a `.pth` file is added as it is: the `.pth` file of an editable install in it is not followed.
    """
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    call(*pip, "install", "--no-deps", "--no-index", wheel, folder=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == tracked
    assert "nodetrack/py.typed" in packed


def test_the_wheel_carries_its_licence_and_says_which_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        assert "Apache License" in archive.read(licence).decode()
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()


def test_an_installed_wheel_logs_a_run_that_its_command_reads_back(environment: Path, tmp_path: Path) -> None:
    python, command = environment / "bin" / "python", environment / "bin" / "nodetrack"
    place = call(python, "-c", NODE, folder=tmp_path)
    assert Path(place).is_relative_to(environment)
    exported = call(command, "export", "miner-1", "--project", "wheel", "--format", "jsonl", folder=tmp_path)
    assert '"train/loss"' in exported
    assert "1.2.3" in exported


def test_the_command_of_an_installed_wheel_tells_its_version(environment: Path, tmp_path: Path) -> None:
    version = importlib.metadata.version("nodetrack")
    assert call(environment / "bin" / "nodetrack", "--version", folder=tmp_path).endswith(version)
