"""Top-k compression: of each tensor only the entries of largest magnitude are sent.

What is not sent need not be lost: `error` is exactly `dense - decompress(compressed)`, and a sender that adds
it to what it sends next time ("error feedback", Seide et al. 2014; Stich et al. 2018) loses nothing for good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class SparseTensor(TypedDict):
    """One tensor's largest entries, in a form that `torch.load(weights_only=True)` gives back."""

    shape: list[int]
    positions: Tensor
    values: Tensor


@dataclass(frozen=True)
class Compressed:
    """What is sent (`sparse`) and what is not (`error`, dense)."""

    sparse: dict[str, SparseTensor]
    error: Tensors


def compress(dense: Mapping[str, Tensor], kept_fraction: float) -> Compressed:
    """Keeps `kept_fraction` (0 to 1) of the entries of each tensor, at least one."""
    sparse = {name: _largest(tensor, kept_fraction) for name, tensor in dense.items()}
    sent = decompress(sparse)
    return Compressed(sparse, {name: tensor - sent[name] for name, tensor in dense.items()})


def decompress(sparse: Mapping[str, SparseTensor]) -> Tensors:
    """The dense tensors, zero wherever nothing was sent."""
    return {name: _dense(tensor) for name, tensor in sparse.items()}


def global_norm(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all entries together."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def is_sound(sparse: Mapping[str, SparseTensor], parameters: Mapping[str, Tensor]) -> bool:
    """Whether it is a change of these parameters, and a finite one: one NaN spoils a whole average."""
    shapes = {name: tensor["shape"] for name, tensor in sparse.items()}
    return shapes == {name: list(parameter.shape) for name, parameter in parameters.items()} and all(
        bool(tensor["values"].isfinite().all()) for tensor in sparse.values()
    )


def sparse_bytes(sparse: Mapping[str, SparseTensor]) -> int:
    """How many bytes of positions and values are sent."""
    return sum(tensor["positions"].nbytes + tensor["values"].nbytes for tensor in sparse.values())


def _largest(tensor: Tensor, kept_fraction: float) -> SparseTensor:
    flat = tensor.flatten()
    count = max(1, round(kept_fraction * flat.numel()))
    # Sorted, so that equal magnitudes give the same file on every machine.
    positions = torch.topk(flat.abs(), count).indices.sort().values
    return {"shape": list(tensor.shape), "positions": positions.int(), "values": flat[positions]}


def _dense(sparse: SparseTensor) -> Tensor:
    flat = torch.zeros(math.prod(sparse["shape"]))
    flat[sparse["positions"].long()] = sparse["values"]
    return flat.view(sparse["shape"])
