"""The environment and `key=value` arguments as layers."""

from __future__ import annotations

import pytest

from nodetrack.errors import HparamsError
from nodetrack.hparams.defaults import Hparams
from nodetrack.hparams.fields import declared_fields
from nodetrack.hparams.layers import Json
from nodetrack.hparams.overrides import environment_layers, override_layers

declared = declared_fields(Hparams)


def values(*overrides: str) -> list[dict[str, Json]]:
    return [reading.layer.values for reading in override_layers(overrides, declared)]


def environment(**variables: str) -> list[dict[str, Json]]:
    return [reading.layer.values for reading in environment_layers(variables, declared)]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=3", {"seed": 3}),
        ("torchtitan.dp_shard = 2", {"torchtitan": {"dp_shard": 2}}),
        ("learning_rate=1e-5", {"learning_rate": 1e-5}),
        ("learning_rate=.5", {"learning_rate": ".5"}),
        ("gradient_clip=null", {"gradient_clip": None}),
        ("betas=[0.9, 0.99]", {"betas": [0.9, 0.99]}),
        ('validator={"eval_batches": 2}', {"validator": {"eval_batches": 2}}),
        ('seed={"$delete": true}', {"seed": {"$delete": True}}),
        ("extra.mine=blue", {"extra": {"mine": "blue"}}),
        ("extra.mine=a=b", {"extra": {"mine": "a=b"}}),
        ("extra.mine=NaN", {"extra": {"mine": "NaN"}}),
        ("extra.mine=", {"extra": {"mine": ""}}),
    ],
)
def test_an_override_is_json_when_it_reads_as_json_and_else_text(
    override: str, expected: dict[str, Json]
) -> None:
    assert values(override) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123", "123"),
        ("true", "true"),
        ("[draft", "[draft"),
        ("null", None),
        ('"null"', "null"),
        ('"', '"'),
        ('{"$delete": true}', {"$delete": True}),
        ("{x", "{x"),
    ],
)
def test_a_declared_text_takes_the_override_as_it_stands(text: str, expected: Json) -> None:
    assert values(f"project={text}") == [{"project": expected}]


def test_overrides_are_layers_of_their_own_in_the_order_given() -> None:
    readings = override_layers(["seed=1", "seed=2"], declared)
    assert [str(reading.layer.origin) for reading in readings] == ["override seed=1", "override seed=2"]


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=1", ".a=1", "a.=1", ""])
def test_an_override_without_a_key_or_an_equals_sign_is_refused(override: str) -> None:
    with pytest.raises(HparamsError, match="is not of the form key=value"):
        values(override)


def test_overrides_that_are_one_text_are_refused_rather_than_read_letter_by_letter() -> None:
    with pytest.raises(HparamsError, match=r"pass a list, such as \['seed=1'\]"):
        override_layers("seed=1", declared)


def test_a_value_that_starts_like_json_and_is_none_is_refused_with_the_fault() -> None:
    with pytest.raises(
        HparamsError, match=r"override betas=\[1,\]: the value is not JSON, line 1, column 3: a comma"
    ):
        values("betas=[1,]")


@pytest.mark.case("C069")
def test_a_repeated_key_in_an_override_is_a_problem() -> None:
    (reading,) = override_layers(['validator={"eval_batches": 1, "eval_batches": 2}'], declared)
    assert "duplicate key 'eval_batches'" in reading.problems[0].message


def test_variables_with_the_prefix_are_layers_and_others_are_not() -> None:
    assert environment(
        NODETRACK_HPARAMS__seed="3", NODETRACK_HPARAMS="4", NODETRACK_PROJECT="x", SEED="5"
    ) == [{"seed": 3}]


def test_a_variable_reaches_into_a_group() -> None:
    assert environment(NODETRACK_HPARAMS__torchtitan__dp_shard="2") == [{"torchtitan": {"dp_shard": 2}}]


def test_a_variable_may_be_in_capitals_for_declared_keys_only() -> None:
    assert environment(NODETRACK_HPARAMS__TORCHTITAN__DP_SHARD="2") == [{"torchtitan": {"dp_shard": 2}}]
    assert environment(NODETRACK_HPARAMS__EXTRA__Mine="2") == [{"extra": {"Mine": 2}}]


def test_a_variable_for_a_group_comes_before_those_for_its_members() -> None:
    assert environment(
        NODETRACK_HPARAMS__validator__eval_batches="3", NODETRACK_HPARAMS__validator='{"eval_batches": 1}'
    ) == [{"validator": {"eval_batches": 1}}, {"validator": {"eval_batches": 3}}]


@pytest.mark.parametrize("rest", ["", "__a", "a____b"])
def test_a_variable_without_a_key_is_refused(rest: str) -> None:
    with pytest.raises(HparamsError, match=rf"\$NODETRACK_HPARAMS__{rest} names no key"):
        environment(**{f"NODETRACK_HPARAMS__{rest}": "1"})
