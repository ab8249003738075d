"""Where a setting comes from, and what is said of a wrong one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodetrack.errors import SettingsError
from nodetrack.settings import PREFIX, Backends, environment, resolve, resolve_backends


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what keeps other tests quiet."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def test_without_anything_every_value_is_the_default(tmp_path: Path) -> None:
    resolved = resolve(start=tmp_path)
    assert (resolved.settings.project, resolved.settings.role, resolved.settings.uid) == (
        "default",
        "trainer",
        "0",
    )
    assert set(resolved.origins.values()) == {"default"}


def test_argument_wins_over_environment_over_dotenv_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.nodetrack]\nproject = "file"\nrole = "file"\nuid = 3\ngroup = "file"\n'
    )
    (tmp_path / ".env").write_text(
        "NODETRACK_ROLE=dotenv\nNODETRACK_UID=4\nNODETRACK_GROUP=dotenv\nOTHER=1\n"
    )
    monkeypatch.setenv("NODETRACK_UID", "5")
    monkeypatch.setenv("NODETRACK_GROUP", "environment")
    settings, origins = resolve({"group": "argument", "project": None}, tmp_path)
    assert (settings.project, settings.role, settings.uid, settings.group) == (
        "file",
        "dotenv",
        "5",
        "argument",
    )
    assert origins["project"] == str(tmp_path / "pyproject.toml")
    assert origins["role"] == f"NODETRACK_ROLE in {tmp_path / '.env'}"
    assert origins["uid"] == "NODETRACK_UID"
    assert origins["group"] == "argument"


def test_the_nearest_file_counts(tmp_path: Path) -> None:
    (tmp_path / "nodetrack.toml").write_text('project = "far"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert resolve(start=inner).settings.project == "far"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\n")
    assert resolve(start=inner).settings.project == "far", "a pyproject without our table is passed over"
    (inner / "nodetrack.toml").write_text('project = "near"\n')
    assert resolve(start=inner).settings.project == "near"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NODETRACK_MODE", "onlin", "'mode' cannot be 'onlin' (from NODETRACK_MODE)"),
        ("NODETRACK_FINISH_TIMEOUT", "soon", "'finish_timeout' cannot be 'soon'"),
        ("NODETRACK_FINISH_TIMEOUT", "-1", "greater than 0"),
        ("NODETRACK_PROJECT", "", "'project' cannot be ''"),
        ("NODETRACK_SEGMENT_BYTES", "1", "4096"),
        (
            "NODETRACK_BACKENDS",
            "[log",
            "'[log' (from NODETRACK_BACKENDS): it begins as JSON and goes wrong at",
        ),
        ("NODETRACK_BACKENDS", "[7]", "each entry is a name, or a mapping with a kind and options"),
        ("NODETRACK_RANK", "first", "a whole number is needed"),
        ("NODETRACK_CONSOLE", "maybe", "true or false is needed"),
        (
            "NODETRACK_MAX_BYTES",
            "5 apples",
            "a number of bytes is needed, such as 500000000, 500 MB or 2 GiB",
        ),
        ("NODETRACK_MAX_BYTES", "5,000", "a number of bytes is needed"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        resolve(start=tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "parse" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NODETRACK_BACKENDS", '[{"kind": "influxdb", "token": "hunter2secret"'),
        ("NODETRACK_BACKENDS", '[{"kind": "influxdb", "token": "hunter2secret'),
        ("NODETRACK_BACKENDS", '[["http://admin:hunter2secret@127.0.0.1:8428"]]'),
        ("NODETRACK_MODE", "http://admin:hunter2secret@127.0.0.1:8428"),
    ],
)
def test_no_message_about_a_setting_tells_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"from {variable}") as raised:
        resolve(start=tmp_path)
    assert "hunter2secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("5000", 5000),
        ("500 MB", 500_000_000),
        ("5GB", 5_000_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("64k", 64_000),
        (7000, 7000),
    ],
)
def test_a_size_in_bytes_may_have_a_unit(tmp_path: Path, value: object, count: int) -> None:
    settings = resolve({"keep_bytes": value, "max_bytes": value, "segment_bytes": value}, tmp_path).settings
    assert (settings.keep_bytes, settings.max_bytes, settings.segment_bytes) == (count, count, count)


def test_a_backend_that_is_only_named_has_the_options_of_the_layers_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = [{"kind": "influxdb", "url": "http://toml"}, {"kind": "log", "level": "DEBUG"}]
    text = ", ".join(
        f'{{ kind = "{each["kind"]}", {list(each)[1]} = "{list(each.values())[1]}" }}' for each in toml
    )
    (tmp_path / "nodetrack.toml").write_text(f"backends = [{text}]\n")
    argument = {"backends": [{"kind": "influxdb", "url": "http://argument"}, "log"]}
    monkeypatch.setenv("NODETRACK_BACKENDS", "influxdb,log,null")
    assert resolve({}, tmp_path).settings.backends == (*toml, "null")
    assert resolve(argument, tmp_path).settings.backends == (argument["backends"][0], toml[1], "null")
    assert resolve_backends("log", "--backends", tmp_path) == (toml[1],)
    monkeypatch.setenv("NODETRACK_BACKENDS", '{"kind": "influxdb"}')
    assert resolve(argument, tmp_path).settings.backends == ({"kind": "influxdb"},)
    monkeypatch.delenv("NODETRACK_BACKENDS")
    backends = resolve(argument, tmp_path).settings.backends
    assert isinstance(backends, Backends)
    assert backends.origins == ("argument", f"argument, with the options of {tmp_path / 'nodetrack.toml'}")


def test_a_mistyped_variable_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NODETRACK_PROJCT", "x")
    monkeypatch.setenv("NODETRACK_HPARAMS__lr", "1")
    resolve(start=tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        (
            "NODETRACK_PROJCT (in the environment) is not a setting and is ignored; "
            "did you mean NODETRACK_PROJECT?"
        )
    ]


def test_a_mistyped_key_in_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nodetrack.toml").write_text('projct = "x"\n')
    with pytest.raises(SettingsError, match="sets 'projct', which is not a setting; did you mean 'project'"):
        resolve(start=tmp_path)


def test_a_broken_file_of_ours_is_an_error_and_a_broken_pyproject_is_not(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[")
    assert resolve(start=tmp_path).settings.project == "default"
    (tmp_path / "nodetrack.toml").write_text("[")
    with pytest.raises(SettingsError, match=r"nodetrack\.toml cannot be read"):
        resolve(start=tmp_path)


def test_lists_may_be_words_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODETRACK_TAGS", "a, b")
    monkeypatch.setenv("NODETRACK_NAME_FIELDS", '["x", "y"]')
    monkeypatch.setenv("NODETRACK_BACKENDS", "none")
    settings = resolve(start=tmp_path).settings
    assert (settings.tags, settings.name_fields, settings.backends) == (("a", "b"), ("x", "y"), ())


def test_a_folder_in_a_file_is_relative_to_that_file(tmp_path: Path) -> None:
    """A node finds its run from wherever in its project it is started."""
    (tmp_path / "nodetrack.toml").write_text('dir = "tracking"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert resolve(start=inner).settings.dir == tmp_path / "tracking"
    assert resolve({"dir": "mine"}, inner).settings.dir == Path("mine")


def test_a_single_underscore_before_a_hyper_parameter_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NODETRACK_HPARAMS_learning_rate", "3")
    resolve(start=tmp_path)
    assert "did you mean NODETRACK_HPARAMS__ with two underscores?" in caplog.text


def test_a_dotenv_that_is_no_utf8_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"NODETRACK_UID=4\nNAME=caf\xe9\n")
    assert resolve(start=tmp_path).origins["uid"] == "default"


@pytest.mark.parametrize("name", [".env", "nodetrack.toml", "pyproject.toml"])
def test_a_file_that_may_not_be_looked_for_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A folder above may not be searched by this user."""
    look = Path.is_file

    def refuse(path: Path) -> bool:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert set(resolve(start=tmp_path).origins.values()) == {"default"}


def test_a_dotenv_that_may_not_be_read_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> object:
        raise PermissionError(13, "Permission denied")

    (tmp_path / ".env").write_text("NODETRACK_UID=4\n")
    monkeypatch.setattr("dotenv.dotenv_values", refuse)
    assert resolve(start=tmp_path).origins["uid"] == "default"


def test_a_dotenv_without_end_is_read_as_far_as_one_has_variables_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".env").write_text("NODETRACK_UID=4\n" + "A=1\n" * 300_000 + "NODETRACK_ROLE=late\n")
    settings = resolve(start=tmp_path).settings
    assert (settings.uid, settings.role) == ("4", "trainer")
    assert caplog.messages == [f"{tmp_path / '.env'} is longer than 64 KiB: the rest is not read."]


def test_a_dotenv_gives_an_environment_that_a_process_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of values are filled in, to an end."""
    monkeypatch.setenv("OUTER", "o")
    grown = "".join(f"G{n + 1}=" + f"${{G{n}}}" * 20 + "\n" for n in range(9))
    Path(".env").write_text(
        f"HOST=h\nURL=http://${{HOST}}/${{OUTER}}/${{NONE:-d}}\nNUL=a\0b\n'a=b'=c\nEMPTY\nG0=1\n{grown}"
    )
    found = environment()
    assert found["URL"] == "http://h/o/d"
    assert not {"NUL", "a=b", "EMPTY", "G4"} & set(found)
    assert max(map(len, found.values())) <= 64 * 1024


def test_a_working_folder_that_was_removed_has_no_settings(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert set(resolve().origins.values()) == {"default"}


def test_backends_that_are_nested_without_end_are_a_settings_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODETRACK_BACKENDS", "[" * 100_000)
    with pytest.raises(SettingsError, match="nested too deeply"):
        resolve(start=tmp_path)


def test_bytes_that_are_no_text_become_their_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the folder, which must be found under its own name."""
    monkeypatch.setitem(os.environ, "NODETRACK_GROUP", os.fsdecode(b"caf\xe9"))
    monkeypatch.setitem(os.environ, "NODETRACK_DIR", os.fsdecode(b"caf\xe9"))
    settings = resolve(start=tmp_path).settings
    assert settings.group == "caf\\udce9"
    assert os.fsencode(settings.dir) == b"caf\xe9"
