"""How a miner walks through the text, as released in version 0.1.1.

Fixed: 0.1.0 seeded its generator anew in every step, so a window trained on one batch over and over. That
makes `train/loss` look splendid and `eval/loss`, measured on text that no miner has seen, get worse.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nodetrack.demo.batches import sample_batch, seeded_generator

VERSION = "0.1.1"


def window_batches(
    text: Tensor, seed: int, uid: str, window: int, batch_size: int, sequence_length: int
) -> Iterator[Tensor]:
    """The batches of one window: random cuts of the text, the same again when the window is repeated."""
    generator = seeded_generator(seed, uid, window)
    while True:
        yield sample_batch(text, generator, batch_size, sequence_length)
