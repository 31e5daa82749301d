"""GAFM: formulas against autograd and scipy, weights, orientation, secrecy."""

from __future__ import annotations

import copy
import math
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import Linear

from flower_vfl import ConfigError
from flower_vfl.objectives import GAFM, gafm
from flower_vfl.objectives.gafm import (
    ClassGenerator,
    class_weights,
    gan_loss,
    match_columns,
    randomized_response,
    response_loss,
    unit_length,
)

ADAM = partial(torch.optim.Adam, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=0.1)


def batch(rows: int = 40, width: int = 1, classes: int = 2) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(4)
    embedding = torch.sigmoid(torch.randn(rows, width, generator=stream))
    labels = torch.randint(0, classes, (rows,), generator=stream)
    return embedding, labels if classes > 2 else labels.float()


def made(width: int = 1, **settings: object) -> GAFM:
    torch.manual_seed(3)
    return GAFM(width, **settings)  # type: ignore[arg-type]


def test_the_randomized_response_of_two_classes() -> None:
    labels, shift = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.2, 0.1, 0.0])
    found = randomized_response(labels, shift)
    torch.testing.assert_close(found, torch.tensor([0.7, 0.4, 0.5]))


def test_the_randomized_response_of_more_classes() -> None:
    labels, shift = torch.tensor([2, 0]), torch.tensor([0.3, 2 / 3])
    found = randomized_response(labels, shift, classes=3)
    third = 1 / 3
    expected = [[third - 0.15, third - 0.15, third + 0.3], [1.0, 0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)
    two = randomized_response(torch.tensor([1, 0]), shift, classes=2)
    torch.testing.assert_close(two, torch.tensor([0.8, 0.5 - 2 / 3]))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("squashed", [True, False])
def test_the_cross_entropy_is_that_of_the_paper(width: int, squashed: bool) -> None:
    embedding, labels = batch(8, width)
    response = randomized_response(labels, torch.full((8,), 0.05))
    total = 0.0
    for row, wanted in zip(embedding.tolist(), response.tolist(), strict=True):
        values = row if squashed else [1 / (1 + math.exp(-x)) for x in row]
        share = sum(values) / width
        total -= wanted * math.log(share) + (1 - wanted) * math.log(1 - share)
    found = response_loss(embedding, response, squashed)
    assert float(found) == pytest.approx(total / 8, rel=1e-5)


def test_the_cross_entropy_of_several_classes_takes_the_mean_of_the_parties() -> None:
    one, two = torch.randn(5, 3), torch.randn(5, 3)
    response = torch.softmax(torch.randn(5, 3), dim=1)
    found = response_loss(torch.cat([one, two], dim=1), response)
    shares = torch.softmax((one + two) / 2, dim=1)
    torch.testing.assert_close(found, -(response * shares.log()).sum(1).mean())


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e30])
def test_unit_length_is_of_the_whole_batch(size: float) -> None:
    gradient = torch.tensor([[3.0, 0.0], [0.0, -4.0]]) * size
    expected = torch.tensor([[0.6, 0.0], [0.0, -0.8]])
    torch.testing.assert_close(unit_length(gradient), expected)
    assert torch.equal(unit_length(torch.zeros(2, 2)), torch.zeros(2, 2))


def reference_step(
    objective: GAFM, embedding: Tensor, labels: Tensor, lr: float
) -> dict[str, Tensor]:
    """The three updates, written out with plain SGD; noise from torch's stream."""
    generator, critic = objective.generator, objective.discriminator
    noise = objective.own_noise()
    real = labels[:, None] + objective.sigma * noise.normal((len(labels), 1))
    u = objective.delta * noise.uniform((len(labels),))
    target = torch.where(labels == 1, 0.5 + u, 0.5 - u)

    def l_gan(f: Tensor) -> Tensor:
        return critic(real).mean() - critic(generator(f)).mean()

    weights = list(critic.parameters())
    for weight, slope in zip(
        weights, torch.autograd.grad(l_gan(embedding), weights), strict=True
    ):
        weight.data = (weight.data + lr * slope).clamp(-objective.clip, objective.clip)
    leaf = embedding.clone().requires_grad_()
    gan, loss = torch.autograd.grad(l_gan(leaf), leaf)[0], l_gan(leaf)
    weights = list(generator.parameters())
    for weight, slope in zip(
        weights, torch.autograd.grad(l_gan(embedding), weights), strict=True
    ):
        weight.data = weight.data - lr * slope
    if not objective.released:
        gan, loss = torch.autograd.grad(l_gan(leaf), leaf)[0], l_gan(leaf)
    share = leaf.mean(dim=1)
    l_ce = -(target * share.log() + (1 - target) * (1 - share).log()).mean()
    ce = torch.autograd.grad(l_ce, leaf)[0]
    return {
        "gan": gan / gan.norm(),
        "ce": ce / ce.norm(),
        "loss": (objective.gamma * loss + l_ce).detach(),
    }


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    ("parts", "released"),
    [("both", False), ("gan", False), ("ce", False), ("both", True)],
)
def test_a_step_is_the_papers_three_updates(
    width: int, parts: str, released: bool
) -> None:
    given = {"gamma": 3.0, "delta": 0.2, "sigma": 0.3, "released": released}
    objective = made(width, parts=parts, **given)
    sizes = [m.out_features for m in objective.discriminator if isinstance(m, Linear)]
    assert sizes == ([10, 10, 1] if released else [16, 1])
    twin = copy.deepcopy(objective)
    objective.configure(SGD)
    embedding, labels = batch(40, width)
    for _ in range(3):
        torch.manual_seed(9)
        outcome = objective.step(embedding.clone().requires_grad_(), labels)
        torch.manual_seed(9)
        expected = reference_step(twin, embedding, labels, 0.1)
        wanted = 3.0 * expected["gan"] * (parts != "ce")
        wanted = wanted + expected["ce"] * (parts != "gan")
        torch.testing.assert_close(outcome.gradient, wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(outcome.loss, expected["loss"])
    pairs = zip(objective.parameters(), twin.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_the_released_code_takes_the_sum_of_a_row_as_its_logit() -> None:
    embedding, labels = batch(40, 4)
    leaf, gradients = (3.0 * embedding - 1.0).requires_grad_(), []
    for released in (False, True):
        objective = made(4, delta=0.0, parts="ce", squashed=False, released=released)
        objective.configure(SGD)
        gradients.append(objective.step(leaf, labels).gradient)
    share = 1 / (1 + torch.exp(-leaf.detach().sum(dim=1)))  # ỹ is ½ at Δ = 0
    expected = (share - 0.5).unsqueeze(1).expand(-1, 4)
    torch.testing.assert_close(gradients[1], expected / expected.norm())
    assert not torch.allclose(gradients[0], gradients[1], atol=1e-2)


def test_the_parts_and_their_sizes_are_kept() -> None:
    objective = made(gamma=2.0)
    objective.configure(ADAM)
    embedding, labels = batch()
    outcome = objective.step(embedding.requires_grad_(), labels)
    parts = objective.gradient_parts
    assert float(parts["gan"].norm()) == pytest.approx(2.0, rel=1e-5)
    assert float(parts["ce"].norm()) == pytest.approx(1.0, rel=1e-5)
    torch.testing.assert_close(outcome.gradient, parts["gan"] + parts["ce"])
    for name, part in parts.items():
        size = float(part.abs().mean())
        assert outcome.metrics[f"{name}_gradient"] == pytest.approx(size)
    a, b = parts["gan"].flatten().numpy(), parts["ce"].flatten().numpy()
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert outcome.metrics["parts_cosine"] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("clip", [0.01, 0.1])
def test_the_discriminators_weights_stay_within_the_bound(
    clip: float, classes: int
) -> None:
    width = 1 if classes == 2 else 3
    objective = made(width, classes=classes, clip=clip)
    objective.configure(partial(torch.optim.Adam, lr=0.05))
    embedding, labels = batch(60, width, classes)
    moved = copy.deepcopy(objective.discriminator)
    for _ in range(20):
        objective.step(embedding.clone().requires_grad_(), labels)
        for weight in objective.discriminator.parameters():
            assert float(weight.detach().abs().max()) <= clip * (1 + 1e-6)
    changed = zip(moved.parameters(), objective.discriminator.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in changed)


def test_without_delta_the_ce_part_knows_nothing_of_the_labels() -> None:
    """Its distribution is that of a run whose labels were permuted."""
    embedding, labels = batch(400)
    flipped = labels[torch.randperm(400, generator=torch.Generator().manual_seed(1))]
    found = {}
    for delta in (0.0, 0.4):
        for name, given in (("own", labels), ("other", flipped)):
            objective = made(delta=delta, parts="ce")
            torch.manual_seed(5)
            outcome = objective.step(embedding.clone().requires_grad_(), given)
            found[delta, name] = outcome.gradient
    assert torch.equal(found[0.0, "own"], found[0.0, "other"])
    assert not torch.equal(found[0.4, "own"], found[0.4, "other"])
    # Rows are independent of the labels here, so that only ỹ could tell them apart.
    rows = found[0.0, "own"][:, 0].numpy()
    ones, zeros = rows[labels == 1], rows[labels == 0]
    assert kstest(ones, zeros).pvalue > 0.01
    assert abs(roc_auc_score(labels, rows) - 0.5) < 0.08
    leaky = found[0.4, "own"][:, 0].numpy()
    assert abs(roc_auc_score(labels, leaky) - 0.5) > 0.1


def test_the_noise_has_the_right_size() -> None:
    seen: list[Tensor] = []
    objective = made(sigma=0.5)
    objective.discriminator.register_forward_pre_hook(
        lambda module, given: seen.append(given[0].detach())
    )
    embedding, labels = batch(5000)
    torch.manual_seed(0)
    objective.step(embedding.requires_grad_(), labels)
    noise = (seen[0][:, 0] - labels).double().numpy()
    assert kstest(noise / 0.5, "norm").pvalue > 0.01


@pytest.mark.parametrize("increasing", [True, False])
def test_predictions_have_the_orientation_of_the_training_labels(
    increasing: bool,
) -> None:
    labels = torch.tensor([0.0, 1.0]).repeat(100)
    noise = 0.05 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    embedding = (0.4 + 0.2 * labels + noise).unsqueeze(1).clamp(0, 1)
    objective = made()  # not configured: nothing is trained
    sign = 1.0 if increasing else -1.0
    first, last = objective.generator[0], objective.generator[2]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    for layer, weight in ((first, 1.0), (last, sign)):
        nn.init.constant_(layer.weight, weight)
        nn.init.zeros_(layer.bias)
    objective.step(embedding.requires_grad_(), labels)
    scores = objective.predict(embedding).detach()
    assert roc_auc_score(labels, scores) > 0.9
    assert ((scores >= 0) & (scores <= 1)).all()


def test_columns_are_matched_with_classes() -> None:
    means = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.6, 0.3], [0.9, 0.05, 0.05]])
    assert match_columns(means) == [1, 2, 0]
    assert match_columns(torch.zeros(4, 4)) == [0, 1, 2, 3]


def test_the_running_means_leave_out_classes_that_a_batch_lacks() -> None:
    objective = made(3, classes=3)
    embedding, _ = batch(10, 3)
    with torch.no_grad():
        output = objective.generator(embedding)
    labels = torch.tensor([0, 2]).repeat(5)
    objective.step(embedding.clone().requires_grad_(), labels)
    assert objective.known.tolist() == [True, False, True]
    torch.testing.assert_close(objective.means[2], output[labels == 2].mean(dim=0))
    assert torch.equal(objective.means[1], torch.zeros(3))
    objective.step(embedding.clone().requires_grad_(), labels.roll(1))
    mixed = 0.9 * output[labels == 2].mean(dim=0) + 0.1 * output[labels == 0].mean(0)
    torch.testing.assert_close(objective.means[2], mixed)


def test_several_classes_are_points_of_the_simplex() -> None:
    objective = made(6, classes=3, delta=0.4)
    objective.configure(ADAM)
    embedding, labels = batch(30, 6, 3)
    outcome = objective.step(embedding.requires_grad_(), objective.encode(labels))
    assert outcome.gradient.shape == (30, 6)
    scores = objective.predict(embedding).detach()
    torch.testing.assert_close(scores.sum(dim=1), torch.ones(30))
    assert objective.task == "multiclass"


def test_the_gan_loss_is_a_difference_of_means() -> None:
    double = nn.Linear(1, 1, bias=False)
    nn.init.constant_(double.weight, 2.0)
    real, fake = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.5], [0.7]])
    assert gan_loss(double, real, fake).item() == pytest.approx(1.0 - 1.2)


def test_classes_have_the_same_weight_where_they_are_balanced() -> None:
    double = nn.Linear(1, 1, bias=False)
    nn.init.constant_(double.weight, 2.0)
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    weights = class_weights(labels, 2)
    torch.testing.assert_close(weights, torch.tensor([3.0, 1.0, 1.0, 1.0]) / 6)
    real, fake = labels.unsqueeze(1), torch.zeros(4, 1)
    assert gan_loss(double, real, fake, weights).item() == pytest.approx(1.0)
    assert class_weights(torch.zeros(4), 2).tolist() == [0.25] * 4  # one class only


def test_a_balanced_generator_adds_the_embedding_to_its_logit() -> None:
    objective = made(balanced=True, squashed=False)
    generator = objective.generator
    assert isinstance(generator, ClassGenerator)
    embedding, labels = batch()
    expected = torch.sigmoid(embedding + generator.learned(embedding))
    torch.testing.assert_close(generator(embedding), expected)
    objective.configure(ADAM)
    calls = mock.Mock(wraps=gafm.gan_loss)
    with mock.patch.object(gafm, "gan_loss", calls):
        objective.step(embedding.requires_grad_(), labels)
    assert calls.call_count == 5 + 2  # discriminator; generator and parties


def test_a_frozen_objective_still_gives_a_gradient() -> None:
    objective = made()
    objective.requires_grad_(False)
    objective.configure(ADAM)
    assert objective.optimizers == []
    embedding, labels = batch()
    outcome = objective.step(embedding.requires_grad_(), labels)
    assert float(outcome.gradient.norm()) > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": 0.6}, "delta must be from 0 to 0.5"),
        ({"delta": -0.1}, "delta"),
        ({"gamma": -1.0}, "gamma"),
        ({"sigma": float("nan")}, "sigma"),
        ({"clip": 0.0}, "clip"),
        ({"classes": 1}, "classes must be at least 2"),
        ({"classes": 3}, "multiple"),
        ({"hidden": 0}, "hidden"),
        ({"parts": "none"}, "both, ce, gan"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(4, **settings)


def test_embeddings_that_do_not_fit() -> None:
    labels = torch.tensor([0.0, 1.0])
    with pytest.raises(ConfigError, match="sigmoid"):
        made().step(torch.tensor([[0.5], [1.5]], requires_grad=True), labels)
    with pytest.raises(ConfigError, match="made for 1 columns"):
        made().step(torch.rand(2, 2, requires_grad=True), labels)
    free = made(squashed=False)
    free.step(torch.tensor([[0.5], [1.5]], requires_grad=True), labels)
    with pytest.raises(ConfigError, match="2 classes"):
        made().encode(torch.tensor([0, 1, 2]))
