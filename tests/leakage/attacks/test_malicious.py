"""The malicious optimizers against numpy, torch's own, and a resumed run."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks.malicious import (
    MaliciousAdam,
    MaliciousSGD,
    amplification,
)
from flower_vfl.strategies import VerticalStrategy

STEPS = 8
Floats = NDArray[np.float64]


def some_gradients(steps: int = STEPS) -> list[Tensor]:
    stream = torch.Generator().manual_seed(3)
    shape = (4, 3)
    # A common part, so that many entries keep their sign from step to step.
    common = torch.randn(shape, generator=stream, dtype=torch.float64)
    noise = [
        torch.randn(shape, generator=stream, dtype=torch.float64) for _ in range(steps)
    ]
    return [common + part for part in noise]


def first_weights() -> nn.Parameter:
    stream = torch.Generator().manual_seed(4)
    return nn.Parameter(torch.randn((4, 3), generator=stream, dtype=torch.float64))


def descend(
    make: Callable[[list[nn.Parameter]], Optimizer], gradients: list[Tensor]
) -> tuple[Floats, Optimizer]:
    weights = first_weights()
    optimizer = make([weights])
    for gradient in gradients:
        weights.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(weights.grad, gradient)  # it is the party's, not ours
    return weights.detach().numpy(), optimizer


def scale(step: Floats, previous: Floats | None) -> Floats:
    if previous is None:
        return step
    return step * np.clip(1 + step / (previous + 1e-7), 1, 5)


def numpy_sgd(momentum: float, decay: float, nesterov: bool, lr: float) -> Floats:
    weights = first_weights().detach().numpy().copy()
    velocity: Floats | None = None
    previous: Floats | None = None
    for gradient in some_gradients():
        step = gradient.numpy() + decay * weights
        velocity = step if velocity is None else momentum * velocity + step
        used = step + momentum * velocity if nesterov else velocity
        previous = scale(used, previous)
        weights = weights - lr * previous
    return weights


def numpy_adam(first: float, second: float, decay: float, lr: float) -> Floats:
    weights = first_weights().detach().numpy().copy()
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    previous: Floats | None = None
    for t, gradient in enumerate(some_gradients(), start=1):
        full = gradient.numpy() + decay * weights
        mean = first * mean + (1 - first) * full
        square = second * square + (1 - second) * full**2
        used = mean / (1 - first**t) / (np.sqrt(square / (1 - second**t)) + 1e-8)
        previous = scale(used, previous)
        weights = weights - lr * previous
    return weights


def test_amplification_of_single_entries() -> None:
    current = torch.tensor([1.0, 2.0, -1.0, 9.0, 0.0, -3.0])
    previous = torch.tensor([2.0, 1.0, 1.0, 1.0, 5.0, -6.0])
    expected = torch.tensor([1.5, 3.0, 1.0, 5.0, 1.0, 1.5])
    torch.testing.assert_close(amplification(current, previous), expected)
    half = torch.tensor([1.25, 2.0, 1.0, 2.5, 1.0, 1.25])
    torch.testing.assert_close(amplification(current, previous, 0.5, 2.5), half)


def test_amplification_is_finite_where_the_previous_entry_cancels_the_offset() -> None:
    current = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    previous = torch.full((3,), -1e-7, dtype=torch.float64)
    assert amplification(current, previous).tolist() == [1.0, 5.0, 1.0]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)]
)
def test_sgd_equals_numpy(momentum: float, decay: float, nesterov: bool) -> None:
    make = partial(
        MaliciousSGD, lr=0.05, momentum=momentum, weight_decay=decay, nesterov=nesterov
    )
    weights, _ = descend(make, some_gradients())
    expected = numpy_sgd(momentum, decay, nesterov, 0.05)
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_equals_numpy(decay: float) -> None:
    make = partial(MaliciousAdam, lr=0.05, betas=(0.8, 0.95), weight_decay=decay)
    weights, _ = descend(make, some_gradients())
    np.testing.assert_allclose(weights, numpy_adam(0.8, 0.95, decay, 0.05), rtol=1e-12)


HONEST: list[tuple[type[Optimizer], type[Optimizer], dict[str, Any]]] = [
    (MaliciousSGD, torch.optim.SGD, {"lr": 0.1}),
    (MaliciousSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    (
        MaliciousSGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    (MaliciousAdam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (MaliciousAdam, torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.9), "eps": 0.1}),
]


@pytest.mark.parametrize(("ours", "theirs", "settings"), HONEST)
def test_gamma_zero_is_the_honest_optimizer(
    ours: type[Optimizer], theirs: type[Optimizer], settings: dict[str, Any]
) -> None:
    malicious, _ = descend(partial(ours, gamma=0.0, **settings), some_gradients())
    honest, _ = descend(partial(theirs, **settings), some_gradients())
    np.testing.assert_allclose(malicious, honest, rtol=1e-13, atol=1e-15)
    scaled, _ = descend(partial(ours, **settings), some_gradients())
    assert np.abs(scaled - honest).max() > 0.05


@pytest.mark.parametrize("kind", [MaliciousSGD, MaliciousAdam])
def test_the_first_step_is_not_scaled(kind: type[Optimizer]) -> None:
    honest = torch.optim.SGD if kind is MaliciousSGD else torch.optim.Adam
    one = some_gradients(1)
    ours, _ = descend(partial(kind, lr=0.1), one)
    theirs, _ = descend(partial(honest, lr=0.1), one)
    np.testing.assert_allclose(ours, theirs, rtol=1e-13)


def test_scaling_does_not_reach_the_momentum_buffer() -> None:
    make = partial(MaliciousSGD, lr=0.1, momentum=0.9)
    _, optimizer = descend(make, some_gradients())
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for gradient in some_gradients():
        expected = 0.9 * expected + gradient
    (state,) = optimizer.state.values()
    torch.testing.assert_close(state["momentum_buffer"], expected)
    assert (state["scaled"].abs() > state["momentum_buffer"].abs()).any()


@pytest.mark.parametrize(
    "make",
    [
        partial(MaliciousSGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        partial(MaliciousAdam, lr=0.1, gamma=2.0),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    make: Callable[[list[nn.Parameter]], Optimizer],
) -> None:
    gradients = some_gradients()
    whole, _ = descend(make, gradients)
    half, optimizer = descend(make, gradients[:4])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    weights = nn.Parameter(torch.from_numpy(half.copy()))
    resumed = make([weights])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for gradient in gradients[4:]:
        weights.grad = gradient.clone()
        resumed.step()
    np.testing.assert_array_equal(weights.detach().numpy(), whole)


def test_parameters_without_gradient_and_closures() -> None:
    idle, busy = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = MaliciousSGD([idle, busy], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = busy.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 2.0
    assert idle.tolist() == [1.0, 1.0] and busy.tolist() == [0.0, 0.0]


def test_settings_that_cannot_work() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ConfigError, match="lr must be at least 0"):
        MaliciousSGD(weights, lr=-1.0)
    with pytest.raises(ConfigError, match="max_ratio"):
        MaliciousAdam(weights, max_ratio=0.5)
    with pytest.raises(ConfigError, match="nesterov"):
        MaliciousSGD(weights, nesterov=True)
    with pytest.raises(ConfigError, match="betas"):
        MaliciousAdam(weights, betas=(1.0, 0.9))
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        MaliciousAdam(table.parameters()).step()


def test_a_passive_party_takes_one_for_its_own() -> None:
    features = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    labels = (features.sum(dim=1) > 0).long()

    def trained(make: Any) -> list[Tensor]:
        torch.manual_seed(0)
        first = PassiveParty(features[:, :3], nn.Linear(3, 4), optimizer=make)
        second = PassiveParty(features[:, 3:], nn.Linear(3, 4))
        label = LabelParty(labels, CrossEntropy(nn.Linear(8, 1)))
        with in_process([label, first, second]) as grid:
            VerticalStrategy(batch_size=30, progress=False).start(grid, num_rounds=3)
        return [p.detach() for p in first.model.parameters()]

    honest = trained(partial(torch.optim.Adam, lr=0.01))
    torch.manual_seed(0)
    start = [p.detach() for p in nn.Linear(3, 4).parameters()]
    malicious = trained(partial(MaliciousAdam, lr=0.01))
    moved = [
        sum(float((a - b).norm()) for a, b in zip(weights, start, strict=True))
        for weights in (honest, malicious)
    ]
    assert moved[1] > 1.5 * moved[0]
