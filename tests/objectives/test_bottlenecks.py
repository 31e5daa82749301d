"""Distance correlation, MID and CoAE: formulas by hand, gradients, what they change."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import MID, CoAE, CrossEntropy, DistanceCorrelation
from flower_vfl.objectives.coae import confusion_loss
from flower_vfl.objectives.dcor import distance_correlation
from flower_vfl.objectives.mid import divergence
from flower_vfl.randomness import Noise


def by_definition(x: np.ndarray, y: np.ndarray) -> float:
    """Return the distance correlation after Székely et al. (2007), from scipy."""
    centered = []
    for rows in (x, y):
        d = squareform(pdist(rows))
        centered.append(d - d.mean(0) - d.mean(1)[:, None] + d.mean())
    a, b = centered
    return math.sqrt((a * b).mean() / math.sqrt((a * a).mean() * (b * b).mean()))


def batch(rows: int = 40, width: int = 6, classes: int = 2) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    embedding = torch.randn(rows, width, generator=stream, dtype=torch.float64)
    labels = torch.arange(rows) % classes
    return embedding, labels.double() if classes == 2 else labels


def test_the_distance_correlation_is_that_of_its_definition() -> None:
    x, _ = batch()
    y = torch.sin(x[:, :2])
    expected = by_definition(x.numpy(), y.numpy())
    assert float(distance_correlation(x, y)) == pytest.approx(expected, rel=1e-9)
    assert float(distance_correlation(x, x)) == pytest.approx(1.0)
    hand = torch.tensor([[0.0], [1.0], [1.0]])  # two rows alike, one apart
    other = torch.tensor([[0.0], [0.0], [1.0]])
    expected = by_definition(hand.numpy(), other.numpy())
    assert float(distance_correlation(hand, other)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_of_the_distance_correlation(classes: int, parts: int) -> None:
    """By finite differences, with the term of every party."""
    torch.manual_seed(0)
    embedding, labels = batch(12, 4, classes)
    outputs = 1 if classes == 2 else classes
    objective = DistanceCorrelation(nn.Linear(4, outputs), classes, 0.3, parts).double()
    truth = nn.functional.one_hot(labels.long(), classes).double()

    def total(values: Tensor) -> Tensor:
        found = objective.loss(objective.top(values), labels)
        for part in values.chunk(parts, dim=1):
            found = found + 0.3 * distance_correlation(part, truth).log()
        return found

    outcome = objective.step(embedding.clone().requires_grad_(), labels)
    step = 1e-6 * torch.randn(embedding.shape, dtype=torch.float64)
    change = float((total(embedding + step) - total(embedding - step)) / 2)
    assert float((outcome.gradient * step).sum()) == pytest.approx(change, rel=1e-4)
    assert float(outcome.loss) == pytest.approx(float(total(embedding)))


def test_without_its_weight_it_is_cross_entropy() -> None:
    embedding, labels = batch()
    top = nn.Linear(6, 1).double()
    plain = CrossEntropy(top).step(embedding.clone().requires_grad_(), labels)
    found = DistanceCorrelation(top, alpha=0.0)
    outcome = found.step(embedding.clone().requires_grad_(), labels)
    torch.testing.assert_close(outcome.gradient, plain.gradient)


def test_what_it_pulls_apart() -> None:
    """A descent on the embedding alone lowers the correlation with the labels."""
    embedding, labels = batch(60)
    embedding = embedding + 2.0 * labels[:, None]
    truth = nn.functional.one_hot(labels.long(), 2).double()
    before = float(distance_correlation(embedding, truth))
    objective = DistanceCorrelation(nn.Linear(6, 1).double(), alpha=1.0)
    for _ in range(200):
        outcome = objective.step(embedding.requires_grad_(), labels)
        embedding = embedding.detach() - 10.0 * outcome.gradient
    assert float(distance_correlation(embedding, truth)) < before - 0.1


def test_the_divergence_by_hand() -> None:
    mean = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    log_variance = torch.tensor([[0.0, 0.0], [math.log(4.0), 0.0]])
    expected = (0.5 * 4.0 + 0.5 * (4.0 - math.log(4.0) - 1.0)) / 2
    assert float(divergence(mean, log_variance)) == pytest.approx(expected)


def test_mid_lets_through_what_its_weight_allows() -> None:
    """With a large weight the gradient hardly depends on the labels any more."""
    torch.manual_seed(0)
    embedding, labels = batch(200)
    embedding = (embedding + 3.0 * labels[:, None]).float()
    spent = {}
    for weight in (0.0, 10.0):
        objective = MID(nn.Linear(6, 1), 6, weight=weight)
        objective.configure(lambda parameters: torch.optim.Adam(parameters, lr=0.02))
        for number in range(150):
            objective.noise = Noise(number)
            outcome = objective.step(embedding.clone().requires_grad_(), labels.float())
        spent[weight] = outcome.metrics["divergence"]
        found = objective.predict(embedding)
        right = float(((found > 0.5) == (labels > 0.5)).float().mean())
        assert right > 0.95 if weight == 0.0 else right > 0.4
    assert spent[10.0] < 0.1 * spent[0.0]


def test_the_same_noise_gives_the_same_step() -> None:
    torch.manual_seed(0)
    embedding, labels = batch()
    objective = MID(nn.Linear(6, 1), 6).double()
    found = []
    for number in (1, 1, 2):
        objective.noise = Noise(number)
        outcome = objective.step(embedding.clone().requires_grad_(), labels)
        found.append(outcome.gradient)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_the_confusion_by_hand() -> None:
    soft = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    decoded = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    right = math.log(1.0 + math.exp(-2.0))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = right - 0.5 * entropy
    assert float(confusion_loss(soft, decoded, 0.5)) == pytest.approx(expected)


@pytest.mark.parametrize("classes", [2, 5])
def test_coae_decodes_its_soft_labels(classes: int) -> None:
    torch.manual_seed(0)
    objective = CoAE(nn.Linear(4, 1 if classes == 2 else classes), classes)
    objective.noise = Noise(3)
    embedding, labels = batch(20, 4, classes)
    given = labels.float() if classes == 2 else labels
    objective.step(embedding.float().requires_grad_(), given)
    soft = objective.soft_labels().detach()
    entropy = -(soft * soft.log()).sum(dim=1).mean()
    assert float(entropy) > 0.6 * math.log(classes)
    decoded = objective.decoder(soft).argmax(dim=1)
    assert decoded.tolist() == list(range(classes))


def test_coae_trains_and_hides_which_class_is_which() -> None:
    """A gradient's sign follows the soft label, which secret numbers decide."""
    torch.manual_seed(0)
    embedding, labels = batch(300)
    embedding = (embedding + 2.0 * labels[:, None]).float()
    larger: set[int] = set()
    for secret in range(6):
        if larger == {0, 1}:
            break
        objective = CoAE(nn.Linear(6, 1))
        objective.configure(lambda parameters: torch.optim.Adam(parameters, lr=0.05))
        objective.noise = Noise(secret)
        for _ in range(150):
            objective.step(embedding.clone().requires_grad_(), labels.float())
        right = (objective.predict(embedding) > 0.5) == (labels > 0.5)
        assert float(right.float().mean()) > 0.9
        larger.add(int(objective.soft_labels()[:, 1].argmax()))
    assert larger == {0, 1}
    state = objective.state_dict()
    again = CoAE(nn.Linear(6, 1))
    again.load_state_dict(state)  # a restart does not train it anew
    before = again.soft_labels()
    again.step(embedding.clone().requires_grad_(), labels.float())
    assert torch.equal(before, again.soft_labels())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DistanceCorrelation(nn.Linear(2, 1), alpha=-1.0), "alpha must be at"),
        (lambda: DistanceCorrelation(nn.Linear(2, 1), parts=0), "parts must be at"),
        (lambda: MID(nn.Linear(2, 1), 2, weight=-1.0), "weight must be at least 0"),
        (lambda: CoAE(nn.Linear(2, 1), weight=-1.0), "weight must be at least 0"),
    ],
)
def test_wrong_settings_are_named(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
