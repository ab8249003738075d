"""The merge rules, on plain objects."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.hparams.layers import Json, Layer, LayerKind, Origin, Setting
from nodetrack.hparams.merge import Resolved, is_delete_marker, plain, resolve

DELETE: dict[str, Json] = {"$delete": True}
KINDS: tuple[LayerKind, ...] = ("default", "project", "local", "environment", "override")


def layers(*objects: dict[str, Json]) -> list[Layer]:
    return [Layer(Origin(kind, kind), values) for kind, values in zip(KINDS, objects, strict=False)]


def merged(*objects: dict[str, Json]) -> dict[str, Json]:
    return plain(resolve(layers(*objects)))


def leaf(tree: Resolved, *names: str) -> Resolved:
    for name in names:
        assert tree.children is not None
        tree = tree.children[name]
    return tree


@pytest.mark.case("C067")
def test_objects_merge_deep_lists_replace_and_null_sets_none() -> None:
    default: dict[str, Json] = {"opt": {"lr": 1, "b": 2}, "l": [1, 2]}
    tree = resolve(layers(default, {"opt": {"lr": 3}}, {"opt": {"b": None}, "l": [9]}))
    assert plain(tree) == {"opt": {"lr": 3, "b": None}, "l": [9]}
    assert leaf(tree["opt"], "lr").origin.kind == "project"
    assert leaf(tree["opt"], "b").origin.kind == "local"
    assert leaf(tree["opt"], "b").overridden == (Setting(2, Origin("default", "default")),)
    assert tree["l"].overridden == (Setting([1, 2], Origin("default", "default")),)


def test_every_overridden_value_is_remembered_highest_first() -> None:
    node = resolve(layers({"a": 1}, {"a": 2}, {"a": None}, {"a": 4}))["a"]
    assert [setting.value for setting in node.overridden] == [None, 2, 1]


def test_null_in_the_place_of_an_object_hides_it_and_a_later_object_starts_afresh() -> None:
    assert merged({"o": {"a": 1}}, {"o": None}) == {"o": None}
    assert merged({"o": {"a": 1}}, {"o": None}, {"o": {"b": 2}}) == {"o": {"b": 2}}


def test_an_object_takes_the_place_of_a_value_and_remembers_it() -> None:
    node = resolve(layers({"o": 1}, {"o": {"b": 2}}))["o"]
    assert node.value == {"b": 2}
    assert [setting.value for setting in node.overridden] == [1]


def test_objects_in_lists_do_not_merge() -> None:
    assert merged({"l": [{"a": 1}]}, {"l": [{"b": 2}]}) == {"l": [{"b": 2}]}


@pytest.mark.case("C067")
def test_a_delete_marker_falls_back_to_the_lower_layer() -> None:
    assert merged({"lr": 1}, {"lr": 2}, {"lr": 3}, {"lr": DELETE}) == {"lr": 2}
    assert merged({"lr": 1}, {"lr": 2}, {"lr": DELETE}) == {"lr": 1}
    assert merged({"lr": 1}, {"lr": 2}, {"lr": DELETE}, {"lr": 4}) == {"lr": 4}


def test_two_delete_markers_fall_back_two_layers() -> None:
    assert merged({"lr": 1}, {"lr": 2}, {"lr": 3}, {"lr": DELETE}, {"lr": DELETE}) == {"lr": 1}


def test_what_a_marker_took_back_is_remembered_as_overridden() -> None:
    node = resolve(layers({"lr": 1}, {"lr": 2}, {"lr": DELETE}))["lr"]
    assert node.origin.kind == "default"
    assert node.overridden == (Setting(2, Origin("project", "project")),)


def test_a_default_cannot_be_taken_back() -> None:
    assert merged({"lr": 1}, {"lr": DELETE}) == {"lr": 1}


def test_a_key_without_a_default_is_gone_when_it_is_taken_back() -> None:
    assert merged({}, {"x": 1, "o": {"a": 1}}, {"x": DELETE, "o": {"a": DELETE}}) == {"o": {}}


def test_a_marker_in_the_place_of_an_object_takes_back_what_the_layer_below_said_in_it() -> None:
    default: dict[str, Json] = {"o": {"a": 1, "b": 2}}
    assert merged(default, {"o": {"a": 3}}, {"o": {"b": 4}}, {"o": DELETE}) == {"o": {"a": 3, "b": 2}}


@pytest.mark.parametrize(
    "value", [{"$delete": False}, {"$delete": 1}, {"$delete": True, "a": 1}, {}, True, None]
)
def test_only_the_exact_marker_is_one(value: Json) -> None:
    assert not is_delete_marker(value)


names = st.sampled_from("abcd")
leaves = st.none() | st.integers() | st.lists(st.integers(), max_size=2)
# Lower-case names hold values and capitals hold objects, so no key changes its kind between layers.
objects: st.SearchStrategy[dict[str, Json]] = st.recursive(
    st.dictionaries(names, leaves, max_size=3),
    lambda inner: st.builds(
        lambda flat, deep: {**flat, **{name.upper(): value for name, value in deep.items()}},
        st.dictionaries(names, leaves, max_size=3),
        st.dictionaries(names, inner, max_size=3),
    ),
    max_leaves=8,
)


@given(objects, objects, objects)
def test_merging_is_associative_where_no_key_changes_its_kind(
    low: dict[str, Json], middle: dict[str, Json], high: dict[str, Json]
) -> None:
    at_once = merged(low, middle, high)
    assert merged(merged(low, middle), high) == at_once
    assert merged(low, merged(middle, high)) == at_once


@given(objects, objects)
def test_the_empty_layer_changes_nothing_and_a_layer_over_itself_is_itself(
    low: dict[str, Json], high: dict[str, Json]
) -> None:
    assert merged(low, {}) == merged({}, low) == merged(low, low) == low
    assert merged(merged(low, high), high) == merged(low, high)


def flat(values: dict[str, Json], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Json]:
    found: dict[tuple[str, ...], Json] = {}
    for name, value in values.items():
        found |= flat(value, (*path, name)) if isinstance(value, dict) else {(*path, name): value}
    return found


@given(st.lists(objects, min_size=1, max_size=5))
def test_every_value_is_the_one_of_the_highest_layer_that_names_its_key(
    stack: Sequence[dict[str, Json]],
) -> None:
    expected: dict[tuple[str, ...], Json] = {}
    for values in stack:
        expected |= flat(values)
    assert flat(merged(*stack)) == expected
