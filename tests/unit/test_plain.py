from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import json
import math
import subprocess
import sys
import types
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack import plain as plain_module
from nodetrack.errors import UsageError
from nodetrack.plain import plain, plain_config


class Precision(enum.Enum):
    HALF = "bf16"
    ODD = object()


class Level(enum.IntEnum):
    HIGH = 2


@dataclasses.dataclass
class Optimizer:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    layers: int
    optimizer: Optimizer
    key: pydantic.SecretStr = pydantic.SecretStr("hunter2")


class Point(NamedTuple):
    x: int
    y: int


class Shape(msgspec.Struct):
    width: int


class Unknown:
    pass


class Rude:
    """Raises for whatever is asked of it."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("no")


class Interpolated(Mapping[str, object]):
    """A mapping one of whose entries leads nowhere, as in OmegaConf."""

    def __getitem__(self, key: str) -> object:
        return {"good": 1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["good", "dangling"])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (2**64 - 1, 2**64 - 1),
        (2**64, "0x10000000000000000"),
        (0.5, 0.5),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        (math.inf, "Infinity"),
        ("größe", "größe"),
        ("a\ud800", "a\\ud800"),
        (b"text", "text"),
        (b"\xff\x00", "ff00"),
        (Path("/data/x"), "/data/x"),
        (datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC), "2024-05-01T12:00:00+00:00"),
        (datetime.date(2024, 5, 1), "2024-05-01"),
        (datetime.timedelta(minutes=1), 60.0),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (decimal.Decimal("0.10"), "0.10"),
        (range(3), "range(0, 3)"),
        (Precision.HALF, "bf16"),
        (Precision.ODD, "ODD"),
        (Level.HIGH, 2),
        (Optimizer, f"{__name__}.Optimizer"),
        (json.dumps, "json.dumps"),
        (print, "builtins.print"),
    ],
)
def test_a_value_without_parts_becomes_a_plain_one(value: object, expected: object) -> None:
    result = plain(value)

    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (argparse.Namespace(lr=1, sub=argparse.Namespace(a=2)), {"lr": 1, "sub": {"a": 2}}),
        (types.SimpleNamespace(lr=1), {"lr": 1}),
        (Optimizer(0.1), {"lr": 0.1, "betas": [0.9, 0.95]}),
        (types.MappingProxyType({"a": (1, {2})}), {"a": [1, [2]]}),
        (OrderedDict(a=1), {"a": 1}),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Shape(3), {"width": 3}),
        (deque([1, 2]), [1, 2]),
        ({"b", "a", "c"}, ["a", "b", "c"]),
        (frozenset([1, "1"]), ["1", 1]),
        ([(), [], {}], [[], [], {}]),
    ],
)
def test_a_value_with_parts_becomes_dicts_and_lists(value: object, expected: object) -> None:
    assert plain(value) == expected


def test_a_pydantic_model_becomes_a_dict_and_its_secrets_stay_covered() -> None:
    result = plain_config(Model(layers=2, optimizer=Optimizer(0.1)))

    assert result["layers"] == 2
    assert result["optimizer"] == {"lr": 0.1, "betas": [0.9, 0.95]}
    assert "hunter2" not in json.dumps(result)


def test_a_pydantic_model_that_was_never_validated_is_read_without_a_warning() -> None:
    model = Model.model_construct(layers="two", optimizer=Optimizer(0.1))

    assert plain_config(model)["layers"] == "two"


def test_a_data_frame_is_described_and_not_copied() -> None:
    class DataFrame:
        shape = (1_000_000, 3)

        def to_dict(self) -> dict[str, object]:
            raise AssertionError("this would be a million rows")

        def __str__(self) -> str:
            return "a table"

    assert str(plain(DataFrame())).endswith("DataFrame: a table>")


def test_what_has_a_to_dict_of_its_own_is_read_by_it() -> None:
    class PretrainedConfig:
        def to_dict(self) -> dict[str, object]:
            return {"hidden_size": 8}

    assert plain(PretrainedConfig()) == {"hidden_size": 8}


def test_keys_become_text_and_stay_apart() -> None:
    assert plain({1: "a", "1": "b", None: "c", Level.HIGH: "d", ("x", 2): "e"}) == {
        "1": "a",
        "1 (str)": "b",
        "None": "c",
        "2": "d",
        "('x', 2)": "e",
    }


def test_an_unknown_object_is_described_without_its_address() -> None:
    """Two starts of one program have to give one config, or every attempt would look changed."""
    assert plain(Unknown()) == f"<{__name__}.Unknown>"
    assert plain([Unknown()]) == plain([Unknown()])
    assert "0x" not in str(plain(iter([1])))


def test_an_object_that_raises_when_looked_at_costs_only_itself() -> None:
    assert plain({"rude": Rude(), "n": 1}) == {"rude": f"<{__name__}.Rude: unreadable, RuntimeError>", "n": 1}
    assert plain(Interpolated()) == {"good": 1, "dangling": "<unreadable, KeyError>"}


def test_what_contains_itself_is_cut_and_what_is_shared_is_not() -> None:
    shared = {"n": 1}
    config: dict[str, object] = {"a": shared, "b": shared}
    config["self"] = config

    assert plain(config) == {"a": {"n": 1}, "b": {"n": 1}, "self": "<cycle>"}


def test_depth_is_bounded() -> None:
    value: object = 1
    for _ in range(100_000):
        value = [value]

    assert json.dumps(plain(value)).count("[") == plain_module.DEEPEST


def test_the_number_of_entries_is_bounded_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_module, "MOST_ENTRIES", 3)

    assert plain([0, 1, 2, 3, 4]) == [0, 1, 2, "<2 more>"]
    assert plain(dict.fromkeys("abcd", 0)) == {"a": 0, "b": 0, "c": 0, "…": "<1 more>"}
    assert plain([[0, 1], 2]) == [[0, 1], "<1 more>"]


def test_long_text_is_cut_and_says_how_long_it_was() -> None:
    result = plain("x" * 100_000)

    assert isinstance(result, str)
    assert len(result) < plain_module.LONGEST_TEXT + 50
    assert result.endswith("… (100000 characters)")


def test_scalars_and_arrays_of_numpy_become_numbers() -> None:
    import numpy as np

    assert plain({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.array([1, 2])}) == {
        "a": 0.5,
        "b": 3,
        "c": True,
        "d": [1, 2],
    }
    assert plain(np.float64("nan")) == "NaN"
    assert plain(np.array(7)) == 7
    assert plain(np.dtype("float32")) == "float32"
    assert plain(np.float32) == "numpy.float32"
    assert plain(np.zeros((100, 100))) == "<numpy.ndarray: float64 100x100>"


@pytest.mark.slow
def test_scalars_dtypes_and_devices_of_torch_become_plain() -> None:
    import torch

    assert plain({"a": torch.tensor(0.5, dtype=torch.bfloat16), "b": torch.tensor([1, 2])}) == {
        "a": 0.5,
        "b": [1, 2],
    }
    assert plain(torch.bfloat16) == "torch.bfloat16"
    assert plain(torch.device("cpu")) == "cpu"
    assert plain(torch.zeros(100, 100)) == "<torch.Tensor: torch.float32 100x100>"
    assert plain(torch.Size([2, 3])) == [2, 3]


@pytest.mark.parametrize("config", [[1], 3, "text", {1}, object()])
def test_a_config_without_names_is_the_callers_mistake(config: object) -> None:
    with pytest.raises(UsageError, match="pass a mapping"):
        plain_config(config)


def test_no_config_is_an_empty_one() -> None:
    assert plain_config(None) == {}


def test_plain_values_need_no_heavy_package() -> None:
    code = (
        "import sys; from nodetrack.plain import plain; plain([{1, 2}, object()]);"
        "print([name for name in ('numpy', 'torch', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(leaves, inner, max_size=3),
    max_leaves=10,
)


@given(trees)
def test_whatever_goes_in_strict_json_comes_out(tree: object) -> None:
    result = plain(tree)

    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert msgspec.json.decode(msgspec.json.encode(result)) == result


@given(trees)
def test_plain_values_stay_as_they_are(tree: object) -> None:
    once = plain(tree)

    assert plain(once) == once
