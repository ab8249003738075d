"""Names, params and options of the MLflow backend, without a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nodetrack
from nodetrack.backends._mlflow_answers import words_of
from nodetrack.backends._mlflow_names import (
    CUT_NAME_TAG,
    INFINITE,
    LONGEST_NAME,
    LONGEST_VALUE,
    cut_mark,
    legal,
    new_params,
    original,
    params_of,
    short,
)
from nodetrack.backends.base import RunInfo
from nodetrack.backends.factory import parse_backends
from nodetrack.backends.mlflow import MlflowBackend, MlflowConfig
from nodetrack.errors import BackendRefusedError, SettingsError
from nodetrack.journal.folder import TrackingFolder
from nodetrack.naming import join, latest
from nodetrack.records import JsonValue

_RUN = RunInfo(project="p", run="r", attempt="0001-aaaa", version="0.1.0", role="miner", uid="7")
_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=300) | st.text("./:~%_a ", max_size=12)


def _mlflow_takes(name: str) -> bool:
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    try:
        _validate_metric_name(name)
        _validate_param_name(name)
    except MlflowException:
        return False
    return len(name) <= 250


@settings(deadline=None)  # MLflow is imported once
@given(_NAMES)
@example("..0")
@example("...")
@example("a/..")
def test_every_name_becomes_one_that_mlflow_takes_and_comes_back(name: str) -> None:
    """The inverse needs nothing but the name, and for one that was cut the run's tags."""
    written = legal(name)
    assert _mlflow_takes(written)
    assert written.isascii()
    assert len(written) <= LONGEST_NAME
    cut = cut_mark(written)
    assert original(written, {CUT_NAME_TAG + cut: name} if cut else None) == name


@given(_NAMES, _NAMES)
def test_two_names_stay_two(one: str, other: str) -> None:
    """No two names become one, and none looks like the mark of an infinite value."""
    assert (legal(one) == legal(other)) == (one == other)
    assert not legal(one).endswith(INFINITE)


@pytest.mark.case("C051")
def test_names_that_mlflow_refuses_are_readable_and_come_back() -> None:
    """Local version parts, `@`, `()` and `:` are written as in a URL, with a colon for the per cent sign."""
    version = "1.2.0+cu121"
    flat = [join(version, name) for name in ("mAP@50", "t(s)/gen", "a:b", "a_b")]
    written = [legal(name) for name in flat]
    assert written == [
        "v1.2.0:2Bcu121/mAP:4050",
        "v1.2.0:2Bcu121/t:28s:29/gen",
        "v1.2.0:2Bcu121/a:3Ab",
        "v1.2.0:2Bcu121/a_b",
    ]
    assert [original(name) for name in written] == flat


def test_usual_names_are_left_as_they_are() -> None:
    """What most people log is not touched."""
    for name in (join("0.1.0", "train/loss"), latest("grad norm"), "system/cpu_percent", "step_time_seconds"):
        assert legal(name) == name


@pytest.mark.parametrize(
    ("name", "written"),
    [("a//b", "a/::/b"), ("/", "::/::"), ("a/", "a/::"), ("a/../b", "a/:2E./b"), (".", ":2E"), ("", "::")],
)
def test_names_that_would_be_another_path_are_written_apart(name: str, written: str) -> None:
    """MLflow refuses a name that a file system would read as another one."""
    assert legal(name) == written


def test_a_nested_config_becomes_params_by_path() -> None:
    """A slash within a key is not a step down; lists are JSON, the rest as MLflow itself writes it."""
    config = {
        "model": {"width": 8, "dims": [1, "é"]},
        "model/width": 9,
        "x": None,
        "on": True,
        "e": {},
        "": "",
    }
    assert params_of(config) == {
        "model/width": "8",
        "model/dims": '[1,"é"]',
        "model:2Fwidth": "9",
        "x": "None",
        "on": "True",
        "e": "{}",
        "::": "",
    }


def test_long_texts_are_cut_with_a_mark_that_tells_them_apart() -> None:
    """Two texts that differ only behind the cut do not become equal."""
    one, other = short("x" * 10_000), short("x" * 9_999 + "y")
    assert len(one) == len(other) == LONGEST_VALUE
    assert one != other
    assert "10000 characters" in one
    assert short("x" * LONGEST_VALUE) == "x" * LONGEST_VALUE


@pytest.mark.case("C008")
def test_a_changed_param_is_added_under_its_version() -> None:
    """Nothing is changed, nothing is written twice, and a name of the user's own is left to the user."""
    assert new_params({}, {"a": "1", "b": "x"}) == {"a": "1", "b": "x"}
    assert new_params({"a": "1"}, {"a": "1"}) == {}
    assert new_params({"a": "1"}, {"a": "2"}) == {"a__v2": "2"}
    assert new_params({"a": "1", "a__v2": "2"}, {"a": "3"}) == {"a__v3": "3"}
    assert new_params({"a": "1", "a__v2": "2"}, {"a": "1"}) == {}
    assert new_params({"a": "1", "a__v2": "5"}, {"a": "5", "a__v2": "5"}) == {"a__v3": "5"}


@given(st.lists(st.dictionaries(st.sampled_from(["a", "a__v2", "b"]), st.sampled_from("123")), max_size=6))
def test_configs_may_arrive_again_and_in_any_order(configs: list[dict[str, str]]) -> None:
    """After all have arrived once, none of them adds anything."""
    known: dict[str, str] = {}
    for config in configs:
        new = new_params(known, config)
        assert not new.keys() & known.keys()
        known.update(new)
    for config in reversed(configs):
        assert new_params(known, config) == {}


def test_the_config_is_parsed_without_mlflow() -> None:
    """A trainer that asks for MLflow imports none of it."""
    code = (
        "import sys; from nodetrack.backends.factory import parse_backends\n"
        "parse_backends([{'kind': 'mlflow', 'tracking_uri': 'http://127.0.0.1:1', 'token': 't'}])\n"
        "assert not any(name.split('.')[0] == 'mlflow' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_secret_is_in_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the destination nor the options beside the cursor tell a password, wherever it was written."""
    config = MlflowConfig(tracking_uri="https://me:secret@mlflow.example/x", experiment="e", token="secret")  # type: ignore[arg-type]
    assert config.destination() == "https://mlflow.example/x e"
    assert config.public() == {
        "kind": "mlflow",
        "tracking_uri": "https://mlflow.example/x",
        "experiment": "e",
    }
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:secret@db/mlflow")
    assert MlflowConfig().destination() == "postgresql://db/mlflow"


def test_what_a_server_repeats_of_our_credentials_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p4ss")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0k")
    said = f"{'x' * 398}p4ss, t0k at https://me:hunter2@host"
    assert words_of(RuntimeError(said)) == f"{'x' * 398}**…"
    assert words_of(RuntimeError(said[398:])) == "***, *** at https://***@host"


@pytest.mark.parametrize("junk", ["text", 5, [1], {"status": "x"}, {"status": None}])
def test_junk_in_the_memory_is_no_time(junk: JsonValue) -> None:
    """It comes from a file beside the journal."""
    backend = MlflowBackend(MlflowConfig(tracking_uri="http://127.0.0.1:1"))
    backend.memory = {"times": junk}
    assert backend._times() == {}
    backend._times()["status"] = 5
    assert backend._times() == backend.memory["times"] == {"status": 5}


def test_an_address_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own default would be a folder wherever the delivery process happens to be."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(
        SettingsError, match="no address, so give it tracking_uri, or set MLFLOW_TRACKING_URI"
    ):
        parse_backends(["mlflow"])
    with pytest.raises(BackendRefusedError, match="give it tracking_uri, or set MLFLOW_TRACKING_URI"):
        MlflowBackend(MlflowConfig()).open(_RUN)


def test_without_an_address_no_attempt_begins_and_nothing_is_missing_where_nothing_is_sent(
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingsError, match=r"'mlflow' cannot be used like this \(from argument\)"):
        nodetrack.init("p", dir=tmp_path, backends=["mlflow"], quiet=True)
    assert TrackingFolder(tmp_path).runs("p") == []
    nodetrack.init("p", dir=tmp_path, backends=["mlflow"], mode="offline", quiet=True).finish()


def test_the_address_may_stand_in_dotenv() -> None:
    """The delivery process reads it too."""
    Path(".env").write_text("MLFLOW_TRACKING_URI=http://127.0.0.1:1\n")
    assert list(parse_backends(["mlflow"])) == ["mlflow"]


def test_the_small_package_names_what_a_database_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlflow-skinny alone speaks with servers only."""
    monkeypatch.setattr("nodetrack.backends.mlflow.find_spec", lambda _: None)  # as where it is not installed
    with pytest.raises(BackendRefusedError, match="pip install mlflow"):
        MlflowBackend(MlflowConfig(tracking_uri="sqlite:///x.db")).open(_RUN)
