"""The model: causal, deterministic, and of the size that its shape says."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from nodetrack.demo.defaults import DemoHparams
from nodetrack.demo.model import build_model
from nodetrack.demo.shape import ModelShape
from nodetrack.errors import DemoError
from nodetrack.hparams.namespace import create_namespace

TINY = ModelShape(256, 16, 32, 2, 4, 48)


def test_the_shape_counts_the_parameters_that_the_model_has() -> None:
    model = build_model(TINY, seed=0)
    assert TINY.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_no_byte_is_predicted_from_those_after_it() -> None:
    model = build_model(TINY, seed=0)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    assert torch.allclose(model(tokens)[0, :10], model(changed)[0, :10], atol=1e-6)
    assert not torch.allclose(model(tokens)[0, 10:], model(changed)[0, 10:], atol=1e-6)


def test_an_untrained_model_knows_nothing() -> None:
    loss = build_model(TINY, seed=0).loss(torch.randint(256, (8, 17)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_the_seed_alone_decides_the_first_parameters() -> None:
    """And torch's own random state is as it was before."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, second, other = (build_model(TINY, seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["bytes.weight"], other["bytes.weight"])


def test_the_demos_own_hyper_parameters_make_a_model_for_two_cores() -> None:
    shape = ModelShape.from_hparams(create_namespace(DemoHparams().model_dump()))
    assert shape.parameters < 1_000_000


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"vocab_size": 32000, "hidden_size": 4096}, "million parameters"),
        ({"vocab_size": 100}, "vocab_size"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"activation_function": "swish2"}, "silu, gelu, relu"),
    ],
)
def test_a_shape_that_cannot_be_trained_here_is_an_error_that_says_what_to_change(
    wrong: dict[str, int], words: str
) -> None:
    with pytest.raises(DemoError, match=words):
        ModelShape.from_hparams(create_namespace({**DemoHparams().model_dump(), **wrong}))


def test_the_activation_is_the_one_asked_for() -> None:
    tokens = torch.randint(256, (1, 16))
    silu, relu = (
        build_model(dataclasses.replace(TINY, activation_function=name), 0) for name in ("silu", "relu")
    )
    assert not torch.allclose(silu(tokens), relu(tokens))


def test_a_vocabulary_left_open_is_bytes() -> None:
    hparams = create_namespace({**DemoHparams().model_dump(), "vocab_size": None})
    assert ModelShape.from_hparams(hparams).vocab_size == 256
