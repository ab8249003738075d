"""How a miner walks through the text, as released in version 0.1.0.

It has a mistake, and only the metrics show it: compare with `release_0_1_1.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nodetrack.demo.batches import sample_batch, seeded_generator

VERSION = "0.1.0"


def window_batches(
    text: Tensor, seed: int, uid: str, window: int, batch_size: int, sequence_length: int
) -> Iterator[Tensor]:
    """The batches of one window: random cuts of the text, the same again when the window is repeated."""
    while True:
        generator = seeded_generator(seed, uid, window)
        yield sample_batch(text, generator, batch_size, sequence_length)
