"""The built-in hyper-parameters: the lowest layer, and what decides the type of every declared key.

A project with keys of its own subclasses `Hparams` and passes it on, `load_hparams(defaults=MyHparams)`:
its keys then have types, descriptions and messages like these. Keys without a type go under `extra`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from nodetrack.hparams.layers import Json

_PositiveInt = Annotated[int, Field(gt=0)]
_NonNegativeInt = Annotated[int, Field(ge=0)]
_PositiveFloat = Annotated[float, Field(gt=0)]
_NonNegativeFloat = Annotated[float, Field(ge=0)]


def _unit(name: str) -> dict[str, Json]:
    return {"unit": name}


class _Group(BaseModel):
    """Closed and frozen: a key that is not declared is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Compression(_Group):
    """How a pseudo-gradient is made small enough to exchange."""

    topk_fraction: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="share of each pseudo-gradient's entries that is sent",
        json_schema_extra=_unit("ratio"),
    )
    error_feedback: bool = Field(
        default=True, description="keep what was not sent and add it to the next window"
    )


class Validator(_Group):
    """What a validator does at the end of each window."""

    eval_batches: _PositiveInt = Field(
        default=8, description="held-out batches in one evaluation", json_schema_extra=_unit("batches")
    )
    eval_every_windows: _PositiveInt = Field(
        default=1, description="windows between two evaluations", json_schema_extra=_unit("windows")
    )
    gather_timeout_seconds: _PositiveFloat = Field(
        default=20.0, description="how long a window waits for its miners", json_schema_extra=_unit("seconds")
    )


class Torchtitan(_Group):
    """How one node spreads the model over its devices, in torchtitan's words."""

    dp_replicate: _PositiveInt = Field(
        default=1, description="replicas in data parallelism", json_schema_extra=_unit("devices")
    )
    dp_shard: int = Field(
        default=1,
        ge=-1,
        description="shards in data parallelism; -1 takes all that are left",
        json_schema_extra=_unit("devices"),
    )
    tp_degree: _PositiveInt = Field(
        default=1, description="tensor parallelism", json_schema_extra=_unit("devices")
    )
    pp_degree: _PositiveInt = Field(
        default=1, description="pipeline parallelism", json_schema_extra=_unit("devices")
    )
    cp_degree: _PositiveInt = Field(
        default=1, description="context parallelism", json_schema_extra=_unit("devices")
    )
    activation_checkpoint: Literal["none", "selective", "full"] = Field(
        default="none", description="which activations are computed again in the backward pass"
    )
    compile: bool = Field(default=False, description="compile the model with torch.compile")


class Hparams(_Group):
    """Hyper-parameters of a node that trains a language model with others, window by window."""

    project: str = Field(
        default="default", min_length=1, description="the name under which runs are compared"
    )
    model_size: str | None = Field(
        default=None,
        description="names the size file: with 1b, the file 1b.json is a layer above hparams.json",
    )
    seed: _NonNegativeInt = Field(default=0, description="start of every random sequence")

    windows: _PositiveInt = Field(
        default=100,
        description="exchanges of pseudo-gradients in the whole training",
        json_schema_extra=_unit("windows"),
    )
    inner_steps: _PositiveInt = Field(
        default=30,
        description="optimizer steps a miner takes in one window",
        json_schema_extra=_unit("steps"),
    )
    batch_size: _PositiveInt = Field(
        default=8, description="sequences in one inner step", json_schema_extra=_unit("sequences")
    )
    sequence_length: _PositiveInt = Field(
        default=2048, description="longest text the model reads at once", json_schema_extra=_unit("tokens")
    )

    learning_rate: _PositiveFloat = Field(default=4e-4, description="peak rate of the inner AdamW")
    warmup_steps: _NonNegativeInt = Field(
        default=0, description="inner steps until the peak rate is reached", json_schema_extra=_unit("steps")
    )
    betas: list[float] = Field(default=[0.9, 0.95], description="decay of AdamW's two moments")
    weight_decay: _NonNegativeFloat = Field(default=0.1, description="AdamW's pull towards zero")
    gradient_clip: _PositiveFloat | None = Field(
        default=1.0, description="largest norm of a gradient; null does not clip"
    )
    outer_learning_rate: _PositiveFloat = Field(
        default=0.7, description="rate of the outer step that a window ends with"
    )
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="Nesterov momentum of the outer step")

    hidden_size: _PositiveInt = Field(
        default=2048, description="width of the model", json_schema_extra=_unit("values")
    )
    num_hidden_layers: _PositiveInt = Field(
        default=16, description="blocks of the model", json_schema_extra=_unit("layers")
    )
    num_attention_heads: _PositiveInt = Field(
        default=16, description="query heads of a block", json_schema_extra=_unit("heads")
    )
    num_key_value_heads: _PositiveInt | None = Field(
        default=None,
        description="key and value heads of a block; null: as many as query heads",
        json_schema_extra=_unit("heads"),
    )
    intermediate_size: _PositiveInt = Field(
        default=5632, description="width of a block's feed-forward part", json_schema_extra=_unit("values")
    )
    activation_function: str = Field(
        default="silu", min_length=1, description="of the feed-forward part, in transformers' words"
    )
    vocab_size: _PositiveInt | None = Field(
        default=256,
        description="tokens known; 256 reads bytes, null takes the tokenizer's size",
        json_schema_extra=_unit("tokens"),
    )
    tokenizer_name_or_path: str | None = Field(
        default=None, description="folder, or name on the Hugging Face hub, of hparams.tokenizer"
    )

    compression: Compression = Field(default=Compression(), description=Compression.__doc__)
    validator: Validator = Field(default=Validator(), description=Validator.__doc__)
    torchtitan: Torchtitan = Field(default=Torchtitan(), description=Torchtitan.__doc__)
    extra: dict[str, object] = Field(
        default_factory=dict, description="keys of the project's own, of any type"
    )
