"""The declared keys as a tree, and the name that was probably meant."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from nodetrack.hparams.fields import declared_fields, value_type


class Optimizer(BaseModel):
    """How it steps."""

    rate: float = 0.1
    warmup: int = Field(default=5, description="steps first", json_schema_extra={"unit": "steps"})


class Model(BaseModel):
    """All of it."""

    rates: list[float] = []
    momentum: float = 0.9
    optimizer: Optimizer = Optimizer()


declared = declared_fields(Model)


@pytest.mark.case("C066")
@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("momentm", "momentum"),
        ("MOMENTUM", "momentum"),
        ("optimizer.momentum", "momentum"),
        ("warmup", "optimizer.warmup"),
        ("wramup", "optimizer.warmup"),
        ("optimizer.rates", "rates"),
        ("optimizer.ratse", "optimizer.rate"),
        ("ratse", "rates"),
        ("elsewhere.warmpu", "optimizer.warmup"),
        ("zzz", None),
    ],
)
def test_the_same_name_elsewhere_comes_before_a_slip_beside_it_and_that_before_a_slip_elsewhere(
    unknown: str, meant: str | None
) -> None:
    assert declared.nearest(tuple(unknown.split("."))) == meant


def test_a_group_knows_its_members_defaults_descriptions_and_units() -> None:
    assert declared.default == {"rates": [], "momentum": 0.9, "optimizer": {"rate": 0.1, "warmup": 5}}
    warmup = declared.find(("optimizer", "warmup"))
    assert warmup is not None
    assert (warmup.description, getattr(warmup, "unit", None)) == ("steps first", "steps")
    assert (
        declared.find(("optimizer", "gone"))
        is declared.find(("rates", "x"))
        is declared.find(("a", "b"))
        is None
    )


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, int),
        (int | None, int),
        (None | str, str),
        (Annotated[float, Field(gt=0)] | None, float),
        (Literal["a", "b"], str),
        (list[int], list[int]),
        (dict[str, object], None),
        (object, None),
    ],
)
def test_the_type_of_values_is_found_behind_optional_bounds_and_choices(
    annotation: object, expected: object
) -> None:
    assert value_type(annotation) == expected
