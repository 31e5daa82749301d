"""Attacks on all rows of an epoch: similarity, embeddings and ExPLoit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meter_cases import case, scores_case
from scipy.spatial.distance import cdist
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks import (
    LeakageMeter,
    cluster_centers,
    exploit_attack,
    similarity_attack,
)
from flower_vfl.leakage.attacks.similarity import assign

EMBEDDED = ("similarity:on=embedding", "similarity:on=embedding,known=false")
ATTACKS = (
    "similarity",
    "similarity:known=false",
    "similarity:distance=euclid",
    "similarity:distance=euclid,known=false",
    *EMBEDDED,
    "embedding",
    "embedding:method=k-means",
    "exploit",
)


def found(
    gradient: Tensor, labels: Tensor, embedding: Tensor, *attacks: str, classes: int = 2
) -> dict[str, float]:
    meter = LeakageMeter(attacks, "binary" if classes == 2 else "multiclass")
    given = {"a": gradient}
    measured = meter.measure(given, labels, 1, embeddings={"a": embedding})
    return {each.attack: each.value for each in measured if each.metric != "leak"}


@pytest.mark.parametrize("distance", ["cosine", "euclid"])
@pytest.mark.parametrize("classes", [2, 4])
def test_scores_against_scipy(distance: str, classes: int) -> None:
    rows, labels = scores_case(90, 5, classes)
    known = torch.stack([rows[labels == c][0] for c in range(classes)])
    name = "cosine" if distance == "cosine" else "euclidean"
    distances = cdist(rows.numpy(), known.numpy(), name)
    scores = similarity_attack(rows, known, distance).numpy()  # type: ignore[arg-type]
    if classes == 2:
        expected = distances[:, 0] - distances[:, 1]
        np.testing.assert_allclose(scores, expected, atol=1e-8)
    else:
        assert (scores.argmax(axis=1) == distances.argmin(axis=1)).all()


def test_known_rows_count_as_guesses() -> None:
    """A row is like itself, which says nothing about the attack."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    labels = torch.tensor([0, 1, 0, 1])
    leak = found(rows, labels, rows, "similarity")["similarity"]
    assert leak == 1.0 - 0.125  # the other two are wrong, and a tie is half a pair


def test_clusters_take_the_names_that_fit_best() -> None:
    guessed = torch.tensor([2, 2, 0, 0, 1, 1])
    labels = torch.tensor([0, 0, 1, 1, 2, 1])
    assert assign(guessed, labels, 3) == [2, 0, 1]
    rows, labels = scores_case(300, 6, 4)
    shown = rows + 30.0 * torch.eye(6, dtype=rows.dtype)[labels]
    centers = cluster_centers(shown, 4, "euclid")
    means = torch.stack([shown[labels == c].mean(dim=0) for c in range(4)])
    assert torch.cdist(centers, means).amin(dim=1).max() < 1e-6


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("attack", ATTACKS)
def test_rows_that_show_their_class(attack: str, classes: int) -> None:
    embedding, gradient, labels = split_model(classes)
    leak = found(gradient, labels, embedding, attack, classes=classes)[attack]
    assert leak > 0.95


@pytest.mark.parametrize("classes", [2, 4])
def test_noise_shows_nothing(classes: int) -> None:
    _, labels = case(600, classes=classes)
    stream = torch.Generator().manual_seed(1)
    gradient, embedding = torch.randn(2, 600, 8, generator=stream)
    leaks = found(gradient, labels, embedding, *ATTACKS, classes=classes)
    assert set(leaks) == set(ATTACKS) and max(leaks.values()) < 0.6


def split_model(classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings that show a class, and what a top model answers with."""
    with torch.random.fork_rng():
        torch.manual_seed(classes)
        labels = torch.randint(0, classes, (400,))
        centers = 4.0 * torch.eye(8)[:classes]
        embedding = (centers[labels] + torch.randn(400, 8)).requires_grad_()
        top = nn.Linear(8, classes)
        nn.functional.cross_entropy(top(embedding), labels).backward()
    assert embedding.grad is not None
    return embedding.detach(), embedding.grad, labels


def test_exploit_uses_what_the_embeddings_do_not_show() -> None:
    """Labels by chance: only gradients tell them, and the scores are probabilities."""
    stream = torch.Generator().manual_seed(0)
    embedding = torch.randn(400, 6, generator=stream, requires_grad=True)
    labels = (torch.rand(400, generator=stream) < 0.3).long()
    weight = torch.randn(6, generator=stream)
    logits = embedding @ weight
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
    (gradient,) = torch.autograd.grad(loss, embedding)
    prior = torch.tensor([0.7, 0.3])
    scores = exploit_attack(embedding.detach(), gradient, prior)
    torch.testing.assert_close(scores.exp().sum(dim=1), torch.ones(400))
    assert roc_auc_score(labels, scores[:, 1] - scores[:, 0]) > 0.95
    again = exploit_attack(embedding.detach(), gradient, prior)
    assert torch.equal(scores, again)
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        exploit_attack(embedding.detach(), gradient, prior, steps=0)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (
            "similarity:distance=manhattan",
            "'distance' must be one of cosine, euclid, got",
        ),
        ("similarity:on=weights", "'on' must be one of gradient, embedding, got"),
        ("embedding:method=pca", "'method' must be one of auto, spectral, k-means"),
        ("exploit:steps=0", "steps must be at least 1"),
    ],
)
def test_wrong_settings_are_named(attack: str, message: str) -> None:
    gradient, labels = case(40)
    with pytest.raises((ConfigError, PartyError), match=message):
        found(gradient, labels, gradient, attack)


@pytest.mark.parametrize("attack", [*EMBEDDED, "embedding", "exploit"])
def test_embeddings_must_be_given(attack: str) -> None:
    gradient, labels = case(40)
    with pytest.raises(PartyError, match=r"'a'.*embeddings, which were not given"):
        LeakageMeter((attack,)).measure({"a": gradient}, labels, 1)
    with pytest.raises(PartyError, match="got 39 embeddings for 40 rows"):
        found(gradient, labels, gradient[1:], attack)
    if attack != "embedding":
        with pytest.raises(ConfigError, match="needs classes, the task is regression"):
            LeakageMeter((attack,), "regression")
