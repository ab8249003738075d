"""`nodetrack doctor`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

import nodetrack
from nodetrack.backends import factory
from nodetrack.cli import doctor
from nodetrack.settings import Settings

if TYPE_CHECKING:
    from tests.servers.plugin import Jsonlines

    from conftest import Lab


def test_every_setting_is_shown_with_its_value_and_where_that_came_from(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODETRACK_ROLE", "validator")
    Path(".env").write_text("NODETRACK_UID=7\n")
    Path("nodetrack.toml").write_text('project = "from-the-file"\n')
    settings = lab.json("doctor", "--json")["settings"]
    assert list(settings) == list(Settings.model_fields)
    assert settings["role"] == {"value": "validator", "origin": "NODETRACK_ROLE"}
    assert settings["uid"]["value"] == "7"
    assert settings["uid"]["origin"].startswith("NODETRACK_UID in ")
    assert settings["project"] == {"value": "from-the-file", "origin": str(Path("nodetrack.toml").absolute())}
    assert settings["heartbeat_seconds"] == {"value": 15.0, "origin": "default"}
    assert ["role", "validator", "NODETRACK_ROLE"] in [
        line.split() for line in lab.out("doctor").splitlines()
    ]


def test_secrets_in_settings_are_masked(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODETRACK_BACKENDS", '[{"kind": "influxdb", "token": "verysecret"}]')
    printed = lab.out("doctor") + lab.out("doctor", "--json")
    assert "influxdb" in printed
    assert "verysecret" not in printed


def test_versions_and_extras_are_shown(lab: Lab) -> None:
    report = lab.json("doctor", "--json")
    assert report["nodetrack"] == nodetrack.__version__
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in report["python"]
    extras = {(extra["extra"], extra["package"]): extra["version"] for extra in report["extras"]}
    assert {"parquet", "torch", "transformers", "wandb"} <= {extra for extra, _ in extras}
    assert extras["parquet", "pyarrow"]


def test_an_extra_that_is_missing_is_shown_as_missing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda _: ['no-such-package>=1; extra == "imagined"', "rich>=13"]
    )
    assert lab.json("doctor", "--json")["extras"] == [
        {"extra": "imagined", "package": "no-such-package", "version": None}
    ]
    assert "not installed: pip install 'nodetrack[imagined]'" in lab.out("doctor")


def version_row(lab: Lab) -> list[str]:
    """The cells of the setting `version`."""
    (line,) = [line for line in lab.out("doctor").splitlines() if line.startswith("version ")]
    return re.split(r" {2,}", line.strip())


def test_the_version_that_a_node_would_have_is_shown_with_where_it_is_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodetrack's own version, whose program this is, says nothing about it."""
    assert version_row(lab) == ["version", "0+unknown", "not found"]
    for command in ("init -q", "commit -q --allow-empty -m first", "tag v1.2.0"):
        who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        subprocess.run(["git", *who, *command.split()], check=True)
    assert version_row(lab) == ["version", "1.2.0", "found: git describe"]
    assert lab.json("doctor", "--json")["version"] == {"value": "1.2.0", "origin": "git describe"}
    monkeypatch.setenv("NODETRACK_PACKAGE", "msgspec")
    assert version_row(lab) == ["version", msgspec.__version__, "found: installed package msgspec"]
    monkeypatch.setenv("NODETRACK_VERSION", "3.0")
    assert version_row(lab) == ["version", "3.0", "NODETRACK_VERSION"]
    assert lab.json("doctor", "--json")["version"] == {"value": "3.0", "origin": "NODETRACK_VERSION"}


def test_runs_are_counted_by_project(lab: Lab) -> None:
    assert "not there yet" in lab.out("doctor")
    for project, uid in (("p", 1), ("p", 2), ("q", 1)):
        lab.start(project=project, uid=uid).finish()
    assert "runs: 2 of p, 1 of q" in lab.out("doctor")
    assert lab.json("doctor", "--json")["runs_by_project"] == {"p": 2, "q": 1}


def test_looking_makes_no_folder(lab: Lab) -> None:
    lab.out("doctor")
    assert not Path(".nodetrack").exists()


def test_a_folder_that_cannot_be_written_is_found_wrong(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".nodetrack").mkdir()

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    result = lab.run("doctor")
    assert result.exit_code == 1
    assert ".nodetrack cannot be written: Read-only file system." in result.stdout


def test_a_folder_that_cannot_be_made_is_found_wrong(lab: Lab) -> None:
    Path("taken").write_text("a file")
    result = lab.run("doctor", "--dir", "taken/below")
    assert result.exit_code == 1
    assert f"{Path('taken').absolute()} is no folder" in result.stdout
    assert list(Path().iterdir()) == [Path("taken")]


def judged(lab: Lab, backends: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, str | None]]:
    """The exit code, and what is wrong by backend. The page says the same as the JSON."""
    monkeypatch.setenv("NODETRACK_BACKENDS", backends)
    result = lab.run("doctor", "--json")
    problems = {each["backend"]: each["problem"] for each in json.loads(result.stdout)["backends"]}
    page = lab.run("doctor")
    assert page.exit_code == result.exit_code
    for problem in filter(None, problems.values()):
        assert problem in page.stdout
    return result.exit_code, problems


def test_backends_that_can_be_used_are_fine(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(lab, "log,null", monkeypatch) == (0, {"log": None, "null": None})
    assert judged(lab, "none", monkeypatch) == (0, {})


def test_all_that_is_wrong_with_backends_is_found_at_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    written = ["tensorbord", {"kind": "log", "levl": "DEBUG"}, {"kind": "aim"}, "mlflow", "log", "null"]
    code, problems = judged(lab, json.dumps(written), monkeypatch)
    assert code == 1
    assert "Did you mean 'tensorboard'? The name comes from NODETRACK_BACKENDS." in problems["tensorbord"]
    assert "needs the option 'repo'" in problems["aim"]
    assert "MLFLOW_TRACKING_URI" in problems["mlflow"]
    assert "'log' is named twice" in problems["log"]
    assert problems["null"] is None


def test_a_missing_package_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "find_spec", lambda name: None)
    code, problems = judged(lab, "tensorboard", monkeypatch)
    assert code == 1
    assert "pip install 'nodetrack[tensorboard]'" in problems["tensorboard"]


def test_missing_credentials_are_found(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """W&B lets nobody in without; of an InfluxDB server only the server knows."""
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    code, problems = judged(lab, "wandb", monkeypatch)
    assert (code, problems["wandb"]) == (1, "W&B has no credentials: set WANDB_API_KEY or run `wandb login`.")
    assert judged(lab, "influxdb", monkeypatch) == (0, {"influxdb": None})
    assert "INFLUXDB_TOKEN, INFLUXDB_V2_TOKEN: not set here" in lab.out("doctor")
    Path(".env").write_text("WANDB_API_KEY=0123456789012345678901234567890123456789\n")
    assert judged(lab, "wandb", monkeypatch) == (0, {"wandb": None})


def test_a_plug_ins_secret_is_masked_whatever_it_is_called(
    lab: Lab, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "secret_options", lambda _: {"path"})
    monkeypatch.setenv("NODETRACK_BACKENDS", json.dumps([jsonlines.config]))
    assert str(jsonlines.path) not in lab.out("doctor") + lab.out("doctor", "--json")
