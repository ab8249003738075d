"""The outer step, checked against torch's own SGD."""

from __future__ import annotations

import pytest
import torch

from nodetrack.demo.outer import OuterStep, alone, average, zeros_like


def test_the_outer_step_is_torchs_nesterov_sgd() -> None:
    start = {"weight": torch.tensor([1.0, -2.0, 0.5])}
    gradients = [{"weight": torch.tensor([0.1, 0.2, -0.3]) * factor} for factor in (1.0, -0.5, 2.0)]
    reference = start["weight"].clone().requires_grad_()
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.6, nesterov=True)
    outer, parameters = OuterStep(0.7, 0.6, zeros_like(start)), start
    for gradient in gradients:
        reference.grad = gradient["weight"].clone()
        optimizer.step()
        parameters = outer.apply(parameters, gradient)
    assert torch.allclose(parameters["weight"], reference.detach())


def test_the_outer_step_leaves_its_arguments_alone() -> None:
    parameters, gradient = {"weight": torch.ones(2)}, {"weight": torch.ones(2)}
    OuterStep(1.0, 0.5, zeros_like(parameters)).apply(parameters, gradient)
    assert parameters["weight"].tolist() == gradient["weight"].tolist() == [1.0, 1.0]


def test_momentum_from_a_checkpoint_goes_on_as_if_never_stopped() -> None:
    parameters, gradient = {"weight": torch.zeros(2)}, {"weight": torch.ones(2)}
    unbroken = OuterStep(0.1, 0.9, zeros_like(parameters))
    middle = unbroken.apply(parameters, gradient)
    resumed = OuterStep(0.1, 0.9, unbroken.momentum)
    assert torch.equal(resumed.apply(middle, gradient)["weight"], unbroken.apply(middle, gradient)["weight"])


def test_the_average_is_plain() -> None:
    mean = average([{"weight": torch.tensor([1.0, 3.0])}, {"weight": torch.tensor([3.0, 5.0])}])
    assert mean["weight"].tolist() == [2.0, 4.0]


def test_nothing_has_no_average() -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        average([])


def test_one_pseudo_gradient_alone_gives_back_what_its_miner_had() -> None:
    before, after = {"weight": torch.tensor([1.0])}, {"weight": torch.tensor([0.25])}
    assert alone(before, {"weight": before["weight"] - after["weight"]})["weight"].tolist() == [0.25]
