"""A miner: takes a window's parameters, trains on them for some steps, and hands in the difference.

window's parameters ─▶ inner AdamW steps ─▶ pseudo-gradient ─▶ top-k ─▶ shared folder
                                                  ▲              │
                                                  └─ not sent ◀──┘   (error feedback)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import Tensor, nn

from nodetrack import Run
from nodetrack.demo.batches import as_tokens
from nodetrack.demo.checkpoint import Checkpoint
from nodetrack.demo.compression import Compressed, Tensors, compress, global_norm, sparse_bytes
from nodetrack.demo.corpus import load_corpus
from nodetrack.demo.exchange import POLL_SECONDS, Contribution, Exchange
from nodetrack.demo.life_line import LifeLine
from nodetrack.demo.model import build_model
from nodetrack.demo.releases import load_release
from nodetrack.demo.shape import ModelShape
from nodetrack.hparams.namespace import Namespace


class MinerState(TypedDict):
    """What a miner's checkpoint holds."""

    next_window: int
    not_sent: Tensors
    optimizer: dict[str, object]
    tracking: dict[str, object]


class Miner:
    """One miner, from a start of its process to the next. All it must remember is in its checkpoint."""

    def __init__(
        self, run: Run, hparams: Namespace, exchange: Exchange, checkpoint: Checkpoint[MinerState]
    ) -> None:
        self.run = run
        self.hparams = hparams
        self.exchange = exchange
        self.checkpoint = checkpoint
        self.name = f"{run.role}-{run.uid}"
        self.release = load_release(run.version)
        self.text = as_tokens(load_corpus().train)
        self.model = build_model(ModelShape.from_hparams(hparams), hparams.seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=tuple(hparams.betas), weight_decay=hparams.weight_decay
        )
        self.not_sent: Tensors = {}
        self.next_window = 0
        self._come_back()

    def work(self, stop_before_window: int, life_line: LifeLine) -> None:
        """Trains window after window, until `stop_before_window` or until the life line is cut."""
        self.exchange.join(self.name, self.run.version)
        while self.next_window < stop_before_window and not life_line.is_cut():
            window = self.exchange.newest_window()
            if window is None or window < self.next_window:
                life_line.wait(POLL_SECONDS)
            elif not self.exchange.is_open(window):
                self.next_window = window + 1  # it was closed while this miner was away
            else:
                before = self.exchange.parameters(window)
                if self._train(window, before, life_line):
                    self._hand_in(window, before)

    def _train(self, window: int, before: Tensors, life_line: LifeLine) -> bool:
        """The window's inner steps. False when broken off, because the window closed or by request."""
        self.model.load_state_dict(before)
        batches = self._batches(window)
        for inner_step in range(self.hparams.inner_steps):
            if life_line.is_cut() or not self.exchange.is_open(window):
                return False
            self._step(window, window * self.hparams.inner_steps + inner_step, next(batches))
        return True

    def _step(self, window: int, step: int, batch: Tensor) -> None:
        """One inner step, and its row in the journal."""
        started_at = time.perf_counter()
        learning_rate = self._learning_rate(step)
        loss = self.model.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._gradient_clip())
        self.optimizer.step()
        seconds = time.perf_counter() - started_at
        self.run.log(
            {
                "train/loss": loss.item(),
                "train/gradient_norm": gradient_norm.item(),
                "train/learning_rate": learning_rate,
                "train/step_time_seconds": seconds,
                "train/tokens_per_second": (batch.numel() - len(batch)) / seconds,
                "window": window,
            },
            step=step,
        )
        # Printed only now, so every printed step is one that the journal already has.
        print(f"step {step} window {window} loss {loss.item():.4f}", flush=True)

    def _hand_in(self, window: int, before: Tensors) -> None:
        """Compresses and contributes the pseudo-gradient, then makes a checkpoint."""
        compressed = self._compress(before)
        contribution = Contribution(
            miner=self.name, window=window, version=self.run.version, pseudo_gradient=compressed.sparse
        )
        in_time = self.exchange.contribute(contribution)
        if self.hparams.compression.error_feedback:
            self.not_sent = compressed.error
        self.next_window = window + 1
        self.run.log(
            {
                "exchange/in_time": in_time,
                "exchange/sent_bytes": sparse_bytes(compressed.sparse),
                "exchange/not_sent_norm": global_norm(compressed.error),
            },
            step=self.next_window * self.hparams.inner_steps - 1,
        )
        self._save()

    def _compress(self, before: Tensors) -> Compressed:
        """What this window changed, and what earlier ones could not send, made small."""
        pseudo_gradient = {
            name: before[name] - parameter.detach() + self.not_sent.get(name, 0.0)
            for name, parameter in self.model.named_parameters()
        }
        return compress(pseudo_gradient, self.hparams.compression.topk_fraction)

    def _batches(self, window: int) -> Iterator[Tensor]:
        hparams = self.hparams
        return self.release.window_batches(
            self.text, hparams.seed, self.run.uid, window, hparams.batch_size, hparams.sequence_length
        )

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up over all windows, then constant; set in the optimizer and returned."""
        warm_up = min(1.0, (step + 1) / max(1, self.hparams.warmup_steps))
        learning_rate: float = warm_up * self.hparams.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _gradient_clip(self) -> float:
        return math.inf if self.hparams.gradient_clip is None else float(self.hparams.gradient_clip)

    def _save(self) -> None:
        state = MinerState(
            next_window=self.next_window,
            not_sent=self.not_sent,
            optimizer=self.optimizer.state_dict(),
            tracking=self.run.state_dict(),
        )
        self.checkpoint.save(state)

    def _come_back(self) -> None:
        state = self.checkpoint.load()
        if state is not None:
            self.next_window = state["next_window"]
            self.not_sent = state["not_sent"]
            self.optimizer.load_state_dict(state["optimizer"])
            self.run.load_state_dict(state["tracking"])
