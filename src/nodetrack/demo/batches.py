"""Batches of bytes, chosen by a seed: a miner that repeats a window sees the same text again."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def as_tokens(text: bytes) -> Tensor:
    """The bytes of `text` as a vector of uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def seeded_generator(*parts: int | str) -> torch.Generator:
    """A generator that depends on the parts alone, such as the seed, the miner and the window."""
    digest = zlib.crc32("/".join(map(str, parts)).encode())
    return torch.Generator().manual_seed(digest)


def sample_batch(text: Tensor, generator: torch.Generator, batch_size: int, sequence_length: int) -> Tensor:
    """`batch_size` cuts of `sequence_length + 1` bytes (inputs and the byte after), from random places."""
    starts = torch.randint(len(text) - sequence_length, (batch_size, 1), generator=generator)
    return text[starts + torch.arange(sequence_length + 1)].long()
