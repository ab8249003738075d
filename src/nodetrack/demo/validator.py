"""A validator: opens a window, gathers what the miners made of it, takes the outer step, and judges.

Its axis is the miners': a window's row stands at the window's last inner step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import TypedDict

import torch

from nodetrack import Run
from nodetrack.demo.batches import as_tokens, sample_batch, seeded_generator
from nodetrack.demo.checkpoint import Checkpoint
from nodetrack.demo.compression import Tensors, decompress, global_norm, is_sound
from nodetrack.demo.corpus import load_corpus
from nodetrack.demo.exchange import Contribution, Exchange
from nodetrack.demo.life_line import LifeLine
from nodetrack.demo.model import build_model
from nodetrack.demo.outer import OuterStep, alone, average, zeros_like
from nodetrack.demo.shape import ModelShape
from nodetrack.hparams.namespace import Namespace

START_UP_SECONDS = 60.0
"""How long the first window waits for miners to be ready; a window's own deadline is much shorter."""


class ValidatorState(TypedDict):
    """What a validator's checkpoint holds."""

    next_window: int
    parameters: Tensors
    momentum: Tensors
    tracking: dict[str, object]


class Validator:
    """One validator, from a start of its process to the next. All it must remember is in its checkpoint."""

    def __init__(
        self,
        run: Run,
        hparams: Namespace,
        exchange: Exchange,
        checkpoint: Checkpoint[ValidatorState],
        miners: Collection[str],
    ) -> None:
        self.run = run
        self.hparams = hparams
        self.exchange = exchange
        self.checkpoint = checkpoint
        self.miners = miners
        self.model = build_model(ModelShape.from_hparams(hparams), hparams.seed)
        self.held_out = self._held_out_batches()
        self.next_window = 0
        self.parameters: Tensors = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }
        self.outer = OuterStep(
            hparams.outer_learning_rate, hparams.outer_momentum, zeros_like(self.parameters)
        )
        self._come_back()

    def work(self, stop_before_window: int, life_line: LifeLine) -> None:
        """Runs window after window, until `stop_before_window` or until the life line is cut."""
        self.exchange.wait_for_nodes(self.miners, self.run.version, START_UP_SECONDS, life_line)
        loss = self.evaluate(self.parameters)
        while self.next_window < stop_before_window and not life_line.is_cut():
            loss = self._run_window(loss, life_line)

    def evaluate(self, parameters: Tensors) -> float:
        """Mean loss (nats per byte) on text that no miner trains on; the same text every time."""
        self.model.load_state_dict(parameters)
        with torch.no_grad():
            losses = [self.model.loss(batch).item() for batch in self.held_out]
        return sum(losses) / len(losses)

    def _run_window(self, loss_before: float, life_line: LifeLine) -> float:
        """One window; returns the loss after it, or `loss_before` when interrupted."""
        window, opened_at = self.next_window, time.monotonic()
        self.exchange.open_window(window, self.parameters)
        contributions = self._gather(window, life_line)
        if life_line.is_cut():
            return loss_before
        self.exchange.close_window(window)
        gathered_seconds = time.monotonic() - opened_at
        scores = {item["miner"]: loss_before - self._loss_alone(item) for item in contributions}
        update_norm = self._outer_step(contributions)
        loss = self.evaluate(self.parameters)
        self._log(window, loss, loss_before, scores, gathered_seconds, update_norm)
        self._go_on_after(window)
        return loss

    def _gather(self, window: int, life_line: LifeLine) -> list[Contribution]:
        """The window's contributions, unsound ones left out: a validator must not be spoilt by a miner."""
        patience_seconds = self.hparams.validator.gather_timeout_seconds
        gathered = self.exchange.gather(window, self.miners, patience_seconds, life_line)
        return [item for item in gathered if is_sound(item["pseudo_gradient"], self.parameters)]

    def _loss_alone(self, contribution: Contribution) -> float:
        return self.evaluate(alone(self.parameters, decompress(contribution["pseudo_gradient"])))

    def _outer_step(self, contributions: list[Contribution]) -> float:
        """Moves the parameters, and returns how far. A window without contributions moves nothing."""
        if not contributions:
            return 0.0
        before = self.parameters
        gradients = [decompress(contribution["pseudo_gradient"]) for contribution in contributions]
        self.parameters = self.outer.apply(before, average(gradients))
        return global_norm({name: self.parameters[name] - before[name] for name in before})

    def _log(
        self,
        window: int,
        loss: float,
        loss_before: float,
        scores: dict[str, float],
        gathered_seconds: float,
        update_norm: float,
    ) -> None:
        """The window's row, and one row a miner that carries its name as context."""
        step = (window + 1) * self.hparams.inner_steps - 1
        self.run.log(
            {
                "eval/loss": loss,
                "eval/bits_per_byte": loss / math.log(2),
                "eval/loss_improvement": loss_before - loss,
                "gather/contributions": len(scores),
                "gather/time_seconds": gathered_seconds,
                "outer/update_norm": update_norm,
                "window": window,
            },
            step=step,
        )
        for miner, score in scores.items():
            self.run.bind(miner=miner).log({"score/loss_improvement": score}, step=step)
        missing = sorted(set(self.miners) - set(scores))
        late = f" without {', '.join(missing)}" if missing else ""
        print(f"step {step} window {window} loss {loss:.4f}{late}", flush=True)

    def _go_on_after(self, window: int) -> None:
        """Puts the next window's start into the checkpoint: then this window is behind us for good."""
        self.next_window = window + 1
        state = ValidatorState(
            next_window=self.next_window,
            parameters=self.parameters,
            momentum=self.outer.momentum,
            tracking=self.run.state_dict(),
        )
        self.checkpoint.save(state)
        self.exchange.forget_before(window)

    def _held_out_batches(self) -> list[torch.Tensor]:
        text = as_tokens(load_corpus().held_out)
        generator = seeded_generator(self.hparams.seed, "held out")
        return [
            sample_batch(text, generator, self.hparams.batch_size, self.hparams.sequence_length)
            for _ in range(self.hparams.validator.eval_batches)
        ]

    def _come_back(self) -> None:
        state = self.checkpoint.load()
        if state is not None:
            self.next_window = state["next_window"]
            self.parameters = state["parameters"]
            self.outer.momentum = state["momentum"]
            self.run.load_state_dict(state["tracking"])
