"""How large the model is, known without torch."""

from __future__ import annotations

from dataclasses import dataclass

from nodetrack.errors import DemoError
from nodetrack.hparams.namespace import Namespace

LARGEST_MODEL = 20_000_000
"""Parameters. Beyond it a window would take minutes on two cores."""
ACTIVATIONS = ("silu", "gelu", "relu")


@dataclass(frozen=True)
class ModelShape:
    """What has to agree between nodes for parameters to be exchanged."""

    vocab_size: int
    sequence_length: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    activation_function: str = "silu"

    @classmethod
    def from_hparams(cls, hparams: Namespace) -> ModelShape:
        """The shape that hyper-parameters ask for. Raises DemoError for one that the demo cannot train."""
        shape = cls(
            vocab_size=256 if hparams.vocab_size is None else hparams.vocab_size,
            sequence_length=hparams.sequence_length,
            hidden_size=hparams.hidden_size,
            num_hidden_layers=hparams.num_hidden_layers,
            num_attention_heads=hparams.num_attention_heads,
            intermediate_size=hparams.intermediate_size,
            activation_function=hparams.activation_function,
        )
        shape.check()
        return shape

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        size, inner = self.hidden_size, self.intermediate_size
        attention = 4 * size * size
        network = 2 * size * inner + inner + size
        norms = 4 * size
        embeddings = (self.vocab_size + self.sequence_length) * size
        return embeddings + self.num_hidden_layers * (attention + network + norms) + 2 * size

    def check(self) -> None:
        """Raises DemoError for a shape that does not fit bytes, its own heads, or two cores."""
        if self.vocab_size < 256:
            raise DemoError(f"The demo's tokens are bytes: vocab_size is {self.vocab_size} and must be 256.")
        if self.hidden_size % self.num_attention_heads:
            raise DemoError(
                f"hidden_size {self.hidden_size} cannot be split over {self.num_attention_heads} heads: "
                "make it a multiple of num_attention_heads."
            )
        if self.activation_function not in ACTIVATIONS:
            raise DemoError(
                f"The demo's model has no activation_function {self.activation_function!r}; "
                f"it knows {', '.join(ACTIVATIONS)}."
            )
        if self.parameters > LARGEST_MODEL:
            raise DemoError(
                f"These hyper-parameters size a model of {self.parameters / 1e6:,.0f} million parameters, "
                "too large for a demo on a CPU: name the folder of smaller ones with --hparams-dir."
            )
