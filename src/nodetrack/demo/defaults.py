"""The demo's own hyper-parameters: the project's, with built-in values that two CPU cores can train.

They are what the demo runs with where there is no `hparams.json`; a file's values come on top as always.
"""

from __future__ import annotations

from pydantic import Field

from nodetrack.hparams.defaults import Compression, Hparams, Validator


class DemoCompression(Compression):
    """How a pseudo-gradient is made small enough to exchange."""

    topk_fraction: float = Field(
        default=0.1, gt=0, le=1, description="share of each pseudo-gradient's entries that is sent"
    )


class DemoValidator(Validator):
    """What a validator does at the end of each window."""

    gather_timeout_seconds: float = Field(
        default=4.0, gt=0, description="how long a window waits for the other miners after the first"
    )


class DemoHparams(Hparams):
    """`Hparams`, small."""

    project: str = Field(default="demo", min_length=1, description="the name under which runs are compared")
    windows: int = Field(default=12, ge=4, description="windows of the whole demo, over both versions")
    inner_steps: int = Field(default=40, gt=0, description="optimizer steps a miner takes in one window")
    batch_size: int = Field(default=8, gt=0, description="cuts of text in one inner step")
    sequence_length: int = Field(default=128, gt=0, description="bytes the model reads at once")
    learning_rate: float = Field(default=2e-3, gt=0, description="peak rate of the inner AdamW")
    warmup_steps: int = Field(default=20, ge=0, description="inner steps until the peak rate is reached")
    outer_momentum: float = Field(default=0.6, ge=0, lt=1, description="Nesterov momentum of the outer step")
    hidden_size: int = Field(default=128, gt=0, description="width of the model")
    num_hidden_layers: int = Field(default=3, gt=0, description="blocks of the model")
    num_attention_heads: int = Field(default=4, gt=0, description="heads of a block")
    intermediate_size: int = Field(default=384, gt=0, description="width of a block's feed-forward part")
    compression: Compression = Field(default=DemoCompression(), description=Compression.__doc__)
    validator: Validator = Field(default=DemoValidator(), description=Validator.__doc__)
