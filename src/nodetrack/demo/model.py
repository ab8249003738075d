"""A byte-level language model: a decoder-only transformer that reads bytes and predicts the next one.

Plain pre-norm blocks with learned positions, small enough for two CPU cores. Shapes are written as
`batch, sequence, hidden`; a token is a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nodetrack.demo.shape import ModelShape

INITIAL_SPREAD = 0.02
_ACTIVATIONS = {"silu": nn.SiLU, "gelu": nn.GELU, "relu": nn.ReLU}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.queries_keys_values = nn.Linear(shape.hidden_size, 3 * shape.hidden_size, bias=False)
        self.output = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, size = hidden.shape
        projected = self.queries_keys_values(hidden).view(batch, sequence, 3, self.heads, size // self.heads)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, size))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class Block(nn.Module):
    """Attention, then a two-layer network, each added to what came in."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden_size)
        self.attention = Attention(shape)
        self.network_norm = nn.LayerNorm(shape.hidden_size)
        self.network = nn.Sequential(
            nn.Linear(shape.hidden_size, shape.intermediate_size),
            _ACTIVATIONS[shape.activation_function](),
            nn.Linear(shape.intermediate_size, shape.hidden_size),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.network(self.network_norm(hidden))  # type: ignore[no-any-return]  # as above


class ByteTransformer(nn.Module):
    """Bytes in (`batch, sequence`), scores of the next byte out (`batch, sequence, vocab_size`)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.sequence_length, shape.hidden_size)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.num_hidden_layers)))
        self.norm = nn.LayerNorm(shape.hidden_size)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(hidden)), self.bytes.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy (nats per byte) of predicting `tokens[:, 1:]` from what stands before."""
        scores = self(tokens[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def build_model(shape: ModelShape, seed: int) -> ByteTransformer:
    """The same parameters for the same shape and seed, without touching torch's global random state."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return ByteTransformer(shape)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_SPREAD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
