"""The first form of GAFM against its three updates written out."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor

from flower_vfl import ConfigError
from flower_vfl.objectives import GAFMOriginal

SGD = partial(torch.optim.SGD, lr=0.1)
TASKS = ("binary", "regression")


def batch(task: str, width: int = 1) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(4)
    embedding = torch.randn(30, width, generator=stream)
    if task == "binary":
        return embedding, torch.randint(0, 2, (30,), generator=stream).float()
    return embedding, torch.randn(30, generator=stream) * 9 + 22


def made(task: str, **settings: object) -> GAFMOriginal:
    torch.manual_seed(3)
    if task == "regression":
        settings = {"center": 22.0, "scale": 9.0, **settings}
    return GAFMOriginal(task, **settings)  # type: ignore[arg-type]


def leaky(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.01 * x)


def aggregated(task: str, embedding: Tensor) -> Tensor:
    summed = embedding.sum(dim=1, keepdim=True)
    return leaky(summed) if task == "binary" else summed


def reference_step(
    objective: GAFMOriginal, embedding: Tensor, labels: Tensor, weights: list[float]
) -> tuple[Tensor, Tensor]:
    decoder, layer = objective.decoder, objective.discriminator[0]
    if objective.task == "regression":
        labels = (labels - 22.0) / 9.0
    noise = objective.own_noise().normal((len(labels), 1))
    real = labels[:, None] + objective.sigma * noise

    def l_gan(made: Tensor) -> Tensor:
        return leaky(layer(real)).mean() - leaky(layer(made)).mean()

    def l_recon(made: Tensor) -> Tensor:
        output = decoder(made)[:, 0]
        if objective.task == "regression":
            return ((output - labels) ** 2).mean()
        share = torch.sigmoid(output)
        return -(labels * share.log() + (1 - labels) * (1 - share).log()).mean()

    made = aggregated(objective.task, embedding)
    up = torch.autograd.grad(l_gan(made), list(layer.parameters()))
    for weight, slope in zip(layer.parameters(), up, strict=True):
        bound = objective.clip
        weight.data = (weight.data + 0.1 * slope).clamp(-bound, bound)
    down = torch.autograd.grad(l_recon(made), list(decoder.parameters()))
    for weight, slope in zip(decoder.parameters(), down, strict=True):
        weight.data = weight.data - 0.1 * slope
    leaf = embedding.clone().requires_grad_()
    made = aggregated(objective.task, leaf)
    loss = weights[0] * l_gan(made) + weights[1] * l_recon(made)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_a_step_is_the_papers_three_updates(
    task: str, literal: bool, width: int
) -> None:
    objective = made(task, gamma=30.0, sigma=0.25, literal=literal)
    twin = copy.deepcopy(objective)
    objective.configure(SGD)
    embedding, labels = batch(task, width)
    weights = [1.0, 30.0] if literal else [30.0, 1.0]
    for _ in range(3):
        torch.manual_seed(9)
        leaf = embedding.clone().requires_grad_()
        outcome = objective.step(leaf, objective.encode(labels))
        torch.manual_seed(9)
        loss, gradient = reference_step(twin, embedding, labels, weights)
        torch.testing.assert_close(outcome.loss, loss)
        torch.testing.assert_close(outcome.gradient, gradient, atol=1e-6, rtol=1e-4)
    for ours, theirs in zip(objective.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for weight in objective.discriminator.parameters():
        assert float(weight.detach().abs().max()) <= objective.clip * (1 + 1e-6)


def test_the_parts_add_up() -> None:
    objective = made("binary")
    embedding, labels = batch("binary")
    outcome = objective.step(embedding.requires_grad_(), labels)
    parts = objective.gradient_parts
    assert set(parts) == {"gan", "recon"}
    assert torch.equal(outcome.gradient, parts["gan"] + parts["recon"])
    for name, part in parts.items():
        size = float(part.abs().mean())
        assert outcome.metrics[f"{name}_gradient"] == pytest.approx(size)


@pytest.mark.parametrize("task", TASKS)
def test_predictions(task: str) -> None:
    objective = made(task)
    embedding, _ = batch(task, 2)
    weight, bias = objective.decoder.weight.item(), objective.decoder.bias.item()
    output = weight * aggregated(task, embedding)[:, 0] + bias
    expected = 1 / (1 + torch.exp(-output)) if task == "binary" else output * 9 + 22
    torch.testing.assert_close(objective.predict(embedding).detach(), expected)


def test_gamma_is_ten_and_as_printed_that_of_the_paper() -> None:
    assert made("binary").gamma == made("regression").gamma == 10.0
    assert made("binary", literal=True).gamma == 300.0
    assert made("regression", literal=True).gamma == 800.0
    assert made("regression", gamma=2.0).gamma == 2.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "multiclass"}, "binary"),
        ({"gamma": -1.0}, "gamma"),
        ({"sigma": -1.0}, "sigma"),
        ({"clip": 0.0}, "clip"),
        ({"task": "regression", "scale": 0.0}, "scale"),
        ({"scale": 2.0}, "regression"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GAFMOriginal(**settings)  # type: ignore[arg-type]


def test_labels_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="2 classes"):
        made("binary").encode(torch.tensor([0.0, 0.5]))
    with pytest.raises(ConfigError, match="missing"):
        made("regression").encode(torch.tensor([0.0, float("nan")]))
