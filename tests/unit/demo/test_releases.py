"""The two versions: they differ in what they say they differ in, and the difference shows in the loss."""

from __future__ import annotations

import itertools

import pytest
import torch

from nodetrack.demo.batches import as_tokens, sample_batch, seeded_generator
from nodetrack.demo.corpus import load_corpus
from nodetrack.demo.model import build_model
from nodetrack.demo.releases import load_release
from nodetrack.demo.shape import ModelShape
from nodetrack.demo.versions import VERSIONS
from nodetrack.errors import DemoError

TINY = ModelShape(256, 32, 32, 1, 2, 64)
TEXT = as_tokens(bytes(range(256)) * 40)


def batches(version: str, window: int = 0, uid: str = "0") -> list[torch.Tensor]:
    endless = load_release(version).window_batches(TEXT, 7, uid, window, 4, 32)
    return list(itertools.islice(endless, 3))


def test_0_1_0_gives_one_batch_again_and_again() -> None:
    first, *rest = batches("0.1.0")
    assert all(torch.equal(first, batch) for batch in rest)


def test_0_1_1_gives_another_batch_in_every_step() -> None:
    first, *rest = batches("0.1.1")
    assert not any(torch.equal(first, batch) for batch in rest)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_repeated_window_has_the_same_batches(version: str) -> None:
    """So a miner that was killed and takes the window again trains on the same text."""
    assert all(map(torch.equal, batches(version), batches(version)))


@pytest.mark.parametrize("version", VERSIONS)
def test_miners_and_windows_have_batches_of_their_own(version: str) -> None:
    assert not torch.equal(batches(version)[0], batches(version, window=1)[0])
    assert not torch.equal(batches(version)[0], batches(version, uid="1")[0])


def test_the_mistake_of_0_1_0_flatters_the_training_loss_and_hurts_the_held_out_loss() -> None:
    """The claim that the demo's report makes, from the same start, with the same steps."""
    losses = {version: trained_losses(version) for version in VERSIONS}
    assert losses["0.1.0"]["train"] < losses["0.1.1"]["train"]
    assert losses["0.1.0"]["held out"] > losses["0.1.1"]["held out"]


def trained_losses(version: str) -> dict[str, float]:
    corpus = load_corpus()
    model = build_model(TINY, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    endless = load_release(version).window_batches(as_tokens(corpus.train), 7, "0", 0, 4, 32)
    for batch in itertools.islice(endless, 60):
        loss = model.loss(batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    held_out = sample_batch(as_tokens(corpus.held_out), seeded_generator("held out"), 32, 32)
    return {"train": loss.item(), "held out": model.loss(held_out).item()}


def test_a_version_that_was_never_released_is_an_error_that_names_those_that_were() -> None:
    with pytest.raises(DemoError, match=r"0\.1\.0 and 0\.1\.1"):
        load_release("0.2.0")
