"""nodetrack: the tracker for long-lived distributed training nodes.

    run = nodetrack.init(project="my-network", role="miner", uid=7, config=hparams)
    run.log({"train/loss": loss}, step=step)

Names are loaded when they are first used, so that `import nodetrack` costs a training process next to
nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodetrack.active import config, finish, log, summary
    from nodetrack.hparams.load import load_hparams
    from nodetrack.hparams.namespace import create_namespace
    from nodetrack.influx import MetricsLogger
    from nodetrack.live_run import Run
    from nodetrack.tracker import init
    from nodetrack.values import Histogram, Image, Table, Text
    from nodetrack.wandb_run import initialize_wandb

    run: Run | None
    __version__: str

__all__ = [
    "Histogram",
    "Image",
    "MetricsLogger",
    "Run",
    "Table",
    "Text",
    "__version__",
    "config",
    "create_namespace",
    "finish",
    "init",
    "initialize_wandb",
    "load_hparams",
    "log",
    "run",
    "summary",
]

_PLACES = {
    "Histogram": "nodetrack.values",
    "Image": "nodetrack.values",
    "MetricsLogger": "nodetrack.influx",
    "Run": "nodetrack.live_run",
    "Table": "nodetrack.values",
    "Text": "nodetrack.values",
    "config": "nodetrack.active",
    "create_namespace": "nodetrack.hparams.namespace",
    "finish": "nodetrack.active",
    "init": "nodetrack.tracker",
    "initialize_wandb": "nodetrack.wandb_run",
    "load_hparams": "nodetrack.hparams.load",
    "log": "nodetrack.active",
    "summary": "nodetrack.active",
}


def __getattr__(name: str) -> object:
    if name == "run":  # changes with every init and finish, so it is never kept here
        from nodetrack.active import active_run

        return active_run()
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("nodetrack")
    if name not in _PLACES:
        raise AttributeError(f"module 'nodetrack' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
