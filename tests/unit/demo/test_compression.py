"""Top-k compression: the largest entries arrive exactly, and what is left behind is known exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.demo.compression import compress, decompress, global_norm, sparse_bytes

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@given(shape=shapes, seed=st.integers(0, 2**16), fraction=st.floats(0.01, 1.0))
def test_what_is_sent_and_what_is_not_add_up_to_everything(
    shape: list[int], seed: int, fraction: float
) -> None:
    dense = {"weight": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}
    compressed = compress(dense, fraction)
    sent = decompress(compressed.sparse)
    assert torch.equal(sent["weight"] + compressed.error["weight"], dense["weight"])
    assert sent["weight"].shape == dense["weight"].shape


def test_the_largest_magnitudes_are_sent_whatever_their_sign() -> None:
    compressed = compress({"weight": torch.tensor([[0.1, -5.0], [3.0, -0.2]])}, 0.5)
    assert decompress(compressed.sparse)["weight"].tolist() == [[0.0, -5.0], [3.0, 0.0]]
    assert compressed.error["weight"].flatten().tolist() == pytest.approx([0.1, 0.0, 0.0, -0.2])


def test_keeping_all_loses_nothing() -> None:
    compressed = compress({"weight": torch.randn(7, 3)}, 1.0)
    assert global_norm(compressed.error) == 0.0


def test_at_least_one_entry_of_each_tensor_is_sent() -> None:
    compressed = compress({"bias": torch.tensor([0.0, 2.0, 1.0])}, 0.001)
    assert decompress(compressed.sparse)["bias"].tolist() == [0.0, 2.0, 0.0]


def test_the_size_counts_positions_and_values() -> None:
    compressed = compress({"weight": torch.ones(100)}, 0.1)
    assert sparse_bytes(compressed.sparse) == 10 * (4 + 4)


def test_the_norm_is_over_all_tensors_together() -> None:
    assert global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}) == pytest.approx(5.0)
