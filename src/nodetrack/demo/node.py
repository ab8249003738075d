"""One node of the demo: `python -m nodetrack.demo.node --role miner --uid 0 --version 0.1.0 ...`

The whole life of a tracked node is in `main`: hyper-parameters, `init`, work, `finish`.
Its standard input is its life line (see `life_line.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import nodetrack
from nodetrack.demo.checkpoint import Checkpoint
from nodetrack.demo.exchange import Exchange
from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.life_line import LifeLine
from nodetrack.demo.miner import Miner
from nodetrack.demo.validator import Validator
from nodetrack.hparams.namespace import Namespace


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one node until its part is done or its life line is cut."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    folder = DemoFolder(options.folder)
    hparams = nodetrack.load_hparams(folder.path)
    with nodetrack.init(
        project=hparams.project,
        role=options.role,
        uid=options.uid,
        version=options.version,
        group="demo",
        config=hparams.to_dict(),
        dir=folder.journals,
        rank=0,  # each node is a run of its own, whatever launcher the demo was started by
    ) as run:
        print(f"run {run.id} attempt {run.attempt} version {run.version} step {run.step}", flush=True)
        node = _build(run, hparams, folder, options.miners)
        node.work(options.stop_before_window, LifeLine())


def _build(run: nodetrack.Run, hparams: Namespace, folder: DemoFolder, miners: int) -> Miner | Validator:
    exchange = Exchange(folder.exchange)
    path = folder.checkpoint(f"{run.role}-{run.uid}")
    if run.role == "miner":
        return Miner(run, hparams, exchange, Checkpoint(path))
    return Validator(run, hparams, exchange, Checkpoint(path), [f"miner-{uid}" for uid in range(miners)])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nodetrack.demo.node", description=__doc__)
    parser.add_argument("--role", choices=("miner", "validator"), required=True)
    parser.add_argument("--uid", required=True, help="the node's number within its role")
    parser.add_argument("--version", required=True, help="the release of the training step to run")
    parser.add_argument("--folder", type=Path, required=True, help="the demo's folder")
    parser.add_argument("--miners", type=int, required=True, help="how many miners a validator expects")
    parser.add_argument("--stop-before-window", type=int, required=True, help="the window not to start")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
