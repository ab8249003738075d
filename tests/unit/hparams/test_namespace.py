"""The namespace behaves as a `SimpleNamespace` and gives plain dicts back."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.errors import UsageError
from nodetrack.hparams.namespace import Namespace, create_namespace

names = st.text() | st.sampled_from(
    ["to_dict", "tokenizer", "model_config", "__class__", "__dict__", "_built", "a b", "class", "self", "1"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars | st.dictionaries(st.integers(), scalars, max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=15,
)
dicts = st.dictionaries(names, values, max_size=5)


@given(dicts)
def test_to_dict_is_the_inverse_of_create_namespace(original: dict[str, Any]) -> None:
    untouched = copy.deepcopy(original)
    namespace = create_namespace(original)
    assert namespace.to_dict() == original
    assert list(namespace.to_dict()) == list(original)
    assert create_namespace(namespace.to_dict()) == namespace
    assert original == untouched


@given(dicts)
def test_copies_and_pickles_are_equal_and_of_the_same_type(original: dict[str, Any]) -> None:
    namespace = create_namespace(original)
    for other in (copy.copy(namespace), copy.deepcopy(namespace), pickle.loads(pickle.dumps(namespace))):
        assert other == namespace
        assert type(other) is Namespace
        assert other.to_dict() == original


def test_objects_are_namespaces_at_every_depth_and_in_lists() -> None:
    namespace = create_namespace({"a": {"b": {"c": 1}}, "l": [{"d": 2}, [{"e": 3}]]})
    assert namespace.a.b.c == 1
    assert namespace.l[0].d == 2
    assert namespace.l[1][0].e == 3


def test_it_compares_and_prints_as_a_simple_namespace() -> None:
    namespace = create_namespace({"b": 1, "a": {"c": "x"}})
    assert namespace == SimpleNamespace(b=1, a=SimpleNamespace(c="x"))
    assert namespace != create_namespace({"b": 1})
    assert repr(namespace) == "Namespace(b=1, a=Namespace(c='x'))"
    with pytest.raises(TypeError, match="unhashable"):
        hash(namespace)


def test_attributes_can_be_set_and_deleted_and_are_in_to_dict() -> None:
    namespace = create_namespace({"a": 1})
    namespace.b = SimpleNamespace(c=2)
    del namespace.a
    assert namespace.to_dict() == {"b": {"c": 2}}


def test_a_deep_copy_shares_nothing_and_a_copy_shares_what_is_inside() -> None:
    namespace = create_namespace({"a": {"b": [1]}})
    deep, shallow = copy.deepcopy(namespace), copy.copy(namespace)
    namespace.a.b.append(2)
    assert deep.a.b == [1]
    assert shallow.a is namespace.a


def test_to_dict_gives_new_lists_and_dicts_at_every_call() -> None:
    namespace = create_namespace({"a": [1], "o": {}})
    first = namespace.to_dict()
    assert isinstance(first["a"], list)
    first["a"].append(2)
    assert namespace.to_dict() == {"a": [1], "o": {}}


def test_the_dict_that_was_given_is_not_shared() -> None:
    original: dict[str, Any] = {"l": [1]}
    namespace = create_namespace(original)
    original["l"].append(2)
    assert namespace.l == [1]


def test_a_key_called_to_dict_does_not_take_the_method_away() -> None:
    namespace = create_namespace({"to_dict": 1})
    assert namespace.to_dict() == {"to_dict": 1}
    namespace.to_dict = 2  # type: ignore[method-assign, assignment]  # what is tested
    assert namespace.to_dict() == {"to_dict": 2}
    assert vars(namespace)["to_dict"] == 2


def test_a_key_called_tokenizer_is_an_ordinary_value() -> None:
    namespace = create_namespace(
        {"tokenizer": "mine", "tokenizer_name_or_path": "x", "model_config": {"a": 1}}
    )
    assert namespace.tokenizer == "mine"
    assert namespace.model_config.a == 1


def test_a_missing_attribute_suggests_the_nearest_name() -> None:
    namespace = create_namespace({"learning_rate": 1, "torchtitan": {"dp_shard": 2}})
    with pytest.raises(
        AttributeError, match=r"have no 'learning_rte' here; did you mean 'learning_rate'\?"
    ) as caught:
        _ = namespace.learning_rte
    assert (caught.value.name, caught.value.obj) == ("learning_rte", namespace)
    with pytest.raises(AttributeError, match=r"did you mean 'dp_shard'\?"):
        _ = namespace.torchtitan.dp_shrad
    with pytest.raises(AttributeError, match=r"have no 'zzz' here\.$"):
        _ = namespace.zzz


def test_missing_attributes_work_with_hasattr_and_getattr() -> None:
    namespace = create_namespace({})
    assert not hasattr(namespace, "seed")
    assert not hasattr(namespace, "tokenizer")
    assert getattr(namespace, "model_config", None) is None


@pytest.mark.parametrize("values", [[1], "text", 3, None, {1: 2}])
def test_what_is_no_dict_with_text_keys_is_refused(values: Any) -> None:
    with pytest.raises(UsageError, match="needs a dict with text keys"):
        create_namespace(values)
