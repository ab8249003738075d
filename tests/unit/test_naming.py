from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack import naming
from nodetrack.naming import Flat, flatten_row, join, latest, section, split, unflatten_row, with_context

AWKWARD_NAMES = ["step", "v1/x", "v@a/x", "latest/x", "nodetrack/step", "a/b/c", "/", "a b\nc", "größe/损失"]


def _made_legal(version: str) -> str:
    return "".join(character if naming.legal_in_version(character) else "-" for character in version)


names = st.one_of(
    st.sampled_from(AWKWARD_NAMES),
    st.text(min_size=1),
    st.text("v@1/step latest", min_size=1, max_size=20),
).filter(lambda name: naming.check_name(name) is None)
versions = st.one_of(
    st.sampled_from(["0.1.0", "1.10rc1", "2.0+cu121", "0+unknown", "main", "@1", "@", "latest", "v1", "٣"]),
    st.text(min_size=1).map(_made_legal),
)
rows = st.dictionaries(names, st.integers() | st.floats(allow_nan=False) | st.none(), max_size=8)


def test_a_row_is_written_under_its_version_and_under_latest_with_the_step() -> None:
    assert flatten_row("0.1.0", 7, {"loss": 0.5, "train/lr": 1e-3}) == {
        "v0.1.0/loss": 0.5,
        "v0.1.0/train/lr": 1e-3,
        "latest/loss": 0.5,
        "latest/train/lr": 1e-3,
        "v0.1.0/step": 7,
        "latest/step": 7,
    }


@pytest.mark.case("C018")
def test_a_metric_of_the_users_own_called_step_moves_the_trackers_step_to_the_reserved_name() -> None:
    flat = flatten_row("0.1.0", 7, {"step": 3, "x": 1})

    assert (flat["v0.1.0/step"], flat["latest/step"], flat["nodetrack/step"]) == (3, 3, 7)
    assert unflatten_row(flat) == ("0.1.0", 7, {"step": 3, "x": 1})


@given(versions, st.integers(), rows)
def test_unflatten_is_the_inverse_of_flatten(version: str, step: int, values: dict[str, object]) -> None:
    assert unflatten_row(flatten_row(version, step, values)) == (version, step, values)


@given(versions, names)
def test_split_is_the_inverse_of_join(version: str, metric: str) -> None:
    assert split(join(version, metric)) == Flat("version", version, metric)


@given(names)
def test_split_is_the_inverse_of_latest(metric: str) -> None:
    assert split(latest(metric)) == Flat("latest", None, metric)


@given(st.text() | names)
def test_every_text_splits_into_parts_that_make_it_again(name: str) -> None:
    """No two flat names are read as the same metric, not even names that nodetrack did not write."""
    flat = split(name)

    if flat.view == "version":
        assert flat.version is not None
        assert join(flat.version, flat.metric) == name
    else:
        assert (latest(flat.metric) if flat.view == "latest" else flat.metric) == name


@given(versions, st.integers(), rows.filter(bool), st.text())
def test_the_metrics_of_a_row_never_share_a_flat_name(
    version: str, step: int, values: dict[str, object], stage: str
) -> None:
    flat = flatten_row(version, step, values, (("stage", stage),))

    assert len(flat) == 2 * len(values) + (1 if "nodetrack/step" in flat else 2)


@pytest.mark.parametrize(
    "name", ["val/loss", "v/loss", "vocab/1", "v 1/x", "v@/x", "v@1/x", "v1", "v1/", "latest/"]
)
def test_names_that_only_look_like_ours_are_plain(name: str) -> None:
    assert split(name) == Flat("plain", None, name)


def test_plain_names_of_other_writers_are_read_as_metrics() -> None:
    assert unflatten_row({"val/loss": 1.0, "_runtime": 2}) == (None, None, {"val/loss": 1.0, "_runtime": 2})


def test_a_row_of_latest_names_alone_still_gives_its_values() -> None:
    assert unflatten_row({"latest/loss": 1.0}) == (None, None, {"loss": 1.0})
    assert unflatten_row({"latest/loss": 1.0, "latest/step": 7}) == (None, 7, {"loss": 1.0})


def test_names_of_an_earlier_version_in_a_row_stay_flat() -> None:
    flat = {"v1.0/loss": 2.0, "v1.0/step": 3, "v1.1/loss": 1.0, "v1.1/step": 4}

    assert unflatten_row(flat) == ("1.1", 4, {"v1.0/loss": 2.0, "v1.0/step": 3, "loss": 1.0})


def test_a_context_becomes_a_prefix_in_the_order_of_its_keys() -> None:
    assert with_context("loss", {"stage": "train", "shard": 3}) == "3/train/loss"
    assert with_context("loss", ()) == "loss"
    assert flatten_row("1", 0, {"step": 5}, {"stage": "eval"}) == {
        "v1/eval/step": 5,
        "latest/eval/step": 5,
        "latest/step": 0,
        "v1/step": 0,
    }


@pytest.mark.parametrize(("name", "expected"), [("train/loss/ema", "train"), ("loss", ""), ("/loss", "")])
def test_the_section_is_what_stands_before_the_first_slash(name: str, expected: str) -> None:
    assert section(name) == expected


@pytest.mark.parametrize("name", [*AWKWARD_NAMES, "x" * 1024, "\x00"])
def test_any_text_of_up_to_1024_bytes_is_a_legal_name(name: str) -> None:
    assert naming.check_name(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "empty"), ("x" * 1025, "1025 bytes"), ("é" * 513, "1026 bytes"), ("a\ud800", "surrogate")],
)
def test_an_illegal_name_is_refused_with_its_reason(name: str, reason: str) -> None:
    found = naming.check_name(name)

    assert found is not None
    assert reason in found


@pytest.mark.parametrize("version", ["", "1/2", "1 2", "1\n", "1\u2028", "1\ud800"])
def test_a_version_that_would_break_a_flat_name_is_refused(version: str) -> None:
    assert naming.check_version(version) is not None
