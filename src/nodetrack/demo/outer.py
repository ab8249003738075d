"""The outer step of a window: SGD with Nesterov momentum on the miners' averaged pseudo-gradients.

As in DiLoCo (Douillard et al. 2023, arXiv:2311.08105): a pseudo-gradient is the window's first parameters
minus what a miner made of them, so stepping against it moves towards the miners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nodetrack.demo.compression import Tensors


def average(pseudo_gradients: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """The plain mean, name by name. Raises ValueError for none."""
    if not pseudo_gradients:
        raise ValueError("There is nothing to average.")
    return {
        name: torch.stack([gradient[name] for gradient in pseudo_gradients]).mean(dim=0)
        for name in pseudo_gradients[0]
    }


class OuterStep:
    """Keeps the momentum between windows; `momentum` is what a checkpoint needs."""

    def __init__(self, learning_rate: float, momentum_ratio: float, momentum: Tensors) -> None:
        self.learning_rate = learning_rate
        self.momentum_ratio = momentum_ratio
        self.momentum = momentum

    def apply(self, parameters: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> Tensors:
        """The next window's parameters; neither argument is changed."""
        ratio = self.momentum_ratio
        self.momentum = {name: ratio * self.momentum[name] + gradient[name] for name in parameters}
        return {
            name: parameter - self.learning_rate * (gradient[name] + ratio * self.momentum[name])
            for name, parameter in parameters.items()
        }


def alone(parameters: Mapping[str, Tensor], pseudo_gradient: Mapping[str, Tensor]) -> Tensors:
    """What the parameters become with one miner's pseudo-gradient and nothing else, to score it by."""
    return {name: parameter - pseudo_gradient[name] for name, parameter in parameters.items()}


def zeros_like(parameters: Mapping[str, Tensor]) -> Tensors:
    """Momentum at rest."""
    return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
