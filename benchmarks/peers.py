"""The trackers that are measured, each behind the same three calls. Nothing here reaches a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

Values = Mapping[str, float]

#: nodetrack first, then what is used instead of it.
PEERS: Final = ("nodetrack", "wandb", "trackio", "tensorboard")
TITLES: Final = {
    "nodetrack": "nodetrack",
    "wandb": "wandb",
    "trackio": "trackio",
    "tensorboard": "TensorBoard",
}
#: What a program imports to use the peer.
IMPORTS: Final = {
    "nodetrack": "import nodetrack",
    "wandb": "import wandb",
    "trackio": "import trackio",
    "tensorboard": "from torch.utils.tensorboard import SummaryWriter",
}
#: How it starts a run, in the working directory, and ends it again.
STARTS: Final = {
    "nodetrack": "run = nodetrack.init(project='benchmark')",
    "wandb": "run = wandb.init(project='benchmark', mode='offline')",
    "trackio": "run = trackio.init('benchmark', embed=False, auto_log_gpu=False, auto_log_cpu=False)",
    "tensorboard": "run = SummaryWriter('tensorboard')",
}
ENDS: Final = {name: "run.close()" if name == "tensorboard" else "run.finish()" for name in PEERS}
#: The files of a run that hold its values, below the folder it was opened in.
FILES: Final = {
    "nodetrack": ".nodetrack/**/*.ntj",
    "wandb": "wandb/**/*.wandb",
    "trackio": "trackio/*.db*",
    "tensorboard": "tensorboard/*",
}


class Peer(NamedTuple):
    """An open tracker: `log(values, step)`; `flush` waits for its threads, where it has a call for that."""

    log: Callable[..., object]  # each tracker names and types the two in its own way
    flush: Callable[[], object]
    finish: Callable[[], object]


def quiet_environment(folder: Path) -> dict[str, str]:
    """The environment for a peer's process: it writes below `folder` only, and calls nobody."""
    return {
        **{
            name: value for name, value in os.environ.items() if not name.startswith(("NODETRACK_", "WANDB_"))
        },
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONSOLE": "off",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def open_peer(name: str, folder: Path) -> Peer:
    """Start a run of the tracker in `folder`, as a training script would."""
    return _OPENERS[name](folder)


def _open_nodetrack(folder: Path) -> Peer:
    import nodetrack

    run = nodetrack.init(project="benchmark", dir=folder / ".nodetrack")
    return Peer(run.log, run.flush, run.finish)


def _open_delivered(folder: Path) -> Peer:
    """nodetrack with three backends; where InfluxDB's protocol is spoken says INFLUXDB_URL."""
    import nodetrack

    backends: list[dict[str, object]] = [
        {"kind": "tensorboard", "log_dir": str(folder / "tensorboard")},
        {"kind": "influxdb"},
        {"kind": "wandb", "mode": "offline", "dir": str(folder)},
    ]
    run = nodetrack.init(project="benchmark", dir=folder / ".nodetrack", backends=backends)
    return Peer(run.log, run.flush, run.finish)


def _open_wandb(folder: Path) -> Peer:
    import wandb

    run = wandb.init(project="benchmark", dir=folder, mode="offline")
    return Peer(run.log, _nothing, run.finish)


def _open_trackio(_folder: Path) -> Peer:
    import trackio

    run = trackio.init("benchmark", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return Peer(run.log, _nothing, run.finish)


def _open_tensorboard(folder: Path) -> Peer:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard")

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Peer(log, writer.flush, writer.close)


def _nothing() -> None:
    """For trackers that have no call to wait with."""


_OPENERS: Final[Mapping[str, Callable[[Path], Peer]]] = {
    "nodetrack": _open_nodetrack,
    "nodetrack_delivered": _open_delivered,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "tensorboard": _open_tensorboard,
}
