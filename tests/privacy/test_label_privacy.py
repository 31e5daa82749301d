"""Settings of label privacy that are refused, budgets and the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from imputation_cases import REPEATABLE, aligned_app, start
from torch import Tensor, nn
from vertical_cases import WIDTH, assert_equal, features, simple_parties, train, weights

from flower_vfl import (
    ConfigError,
    LabelParty,
    LabelPrivacy,
    Leakage,
    MeanSquaredError,
    PartyError,
)
from flower_vfl.strategies import Defense


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("auc=0.4", "auc must be between 0.5 and 1, got 0.4"),
        ("auc=1.0", "auc must be between 0.5 and 1"),
        ("auc=nan", "'auc' must be a number"),
        ("epsilon=0", "epsilon must be above 0"),
        ("auc=0.65,epsilon=1", "either auc=0.65 or epsilon=1"),
        ("loss=plain", "either auc=0.65 or epsilon=1"),
        ("auc=0.65,sigma=3", "unknown parameter 'sigma'"),
        (
            "auc=0.65,mechanism=marvell",
            "'mechanism' must be one of auto, rand.*marvell",
        ),
        (
            "auc=0.65,loss=backward",
            "must be one of auto, plain, unbiased, forward, got 'backward'",
        ),
        ("auc=0.65,delta=0", "delta must be between"),
        ("auc=0.65,budget=leak", "label budget 'leak'; known: auc, epsilon"),
        ("0.65", "key=value"),
    ],
)
def test_bad_texts(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LabelPrivacy.from_text(text)


def refused(match: str, *text: str, **options: Any) -> PartyError:
    """Train with private labels; return the error of the label party."""
    own = {n: options.pop(n) for n in ("trust_server",) if n in options}
    label, passive = simple_parties(label_privacy=LabelPrivacy.from_text(*text), **own)
    before = weights(label, *passive)
    with pytest.raises(PartyError, match=match) as caught:
        train([label, *passive], **options)
    assert caught.value.party == "label" and caught.value.remedy
    assert_equal(weights(label, *passive), before)  # it was refused before a step
    return caught.value


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"leakage": Leakage(limit=0.6)},
            "leak limit depends on true labels.*remove it",
        ),
        (
            {"leakage": Leakage(("norm",), layers=True), "trust_server": True},
            "layers.*reveal true labels.*without label privacy",
        ),
        (
            {"leakage": Leakage(membership="joint"), "trust_server": True},
            "membership with labels.*without label privacy",
        ),
        (
            {
                "leakage": Leakage(("norm",)),
                "defense": Defense("iso"),
                "trust_server": True,
            },
            r"measured there.*Defense\(\.\.\., at=\"label\"\)",
        ),
    ],
)
def test_what_would_act_on_true_labels(options: dict[str, Any], match: str) -> None:
    refused(match, "auc=0.7", **options)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("auc=0.7,mechanism=laplace", "'laplace' is not for a binary task"),
        ("epsilon=1,prior=0.2+0.3+0.5", "prior must be 2 weights"),
        ("auc=0.7,mechanism=gaussian,loss=unbiased", "'unbiased'.*plain, forward"),
        ("auc=0.7,canaries=2", "canaries are measured with the leakage"),
    ],
)
def test_what_does_not_fit_classes(text: str, match: str) -> None:
    refused(match, text, valid_fraction=0.2)


def test_too_many_canaries() -> None:
    given = {"valid_fraction": 0.2, "leakage": Leakage(("norm",))}
    refused("canaries must be at most half of the 36", "auc=0.7,canaries=19", **given)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("auc=0.7", "public range, low=... and high="),
        ("auc=0.7,low=3,high=3", "public range"),
        (
            "auc=0.7,mechanism=randomised-response,low=0,high=1",
            "'randomised-response' is not for a regression",
        ),
        ("auc=0.7,low=0,high=40,loss=unbiased", "'unbiased'.*use plain, forward"),
    ],
)
def test_what_does_not_fit_a_regression(text: str, match: str) -> None:
    _, passive = simple_parties()
    objective = MeanSquaredError(nn.Linear(2 * WIDTH, 1))
    privacy = LabelPrivacy.from_text(text)
    label = LabelParty(features(0)[:, 0] + 20, objective, label_privacy=privacy)
    with pytest.raises(PartyError, match=match) as caught:
        train([label, *passive])
    assert caught.value.party == "label" and caught.value.remedy


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "auc=0.7,mechanism=gaussian",
            "Gaussian noise would tell.*randomised-response",
        ),
        ("auc=0.7,loss=unbiased", "'unbiased'.*use plain, forward"),
    ],
)
def test_what_does_not_fit_synthetic_labels(
    text: str, match: str, tmp_path: Path
) -> None:
    app = aligned_app(REPEATABLE, label_privacy=LabelPrivacy.from_text(text))
    with pytest.raises(PartyError, match=match) as caught:
        start(app, tmp_path)
    assert caught.value.party == "label" and caught.value.remedy


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "budget=auc=0.6",
            "has no bound.*label-dp with auc=0.6.*marvell:auc=0.6,over=run",
        ),
        ("budget=epsilon=1", r"has no bound; use label-dp with epsilon=1 \(label-dp"),
        ("auc=0.7,budget=auc=0.6", "auc 0.6 for all training runs.*has auc 0.7"),
        (
            "epsilon=2,budget=epsilon=1.5",
            "has epsilon 2; use label-dp with epsilon=1.5",
        ),
    ],
)
def test_a_budget_that_a_run_exceeds(text: str, match: str) -> None:
    refused(match, text)


def test_a_budget_that_a_run_keeps() -> None:
    for text in ("auc=0.6,budget=auc=0.6", "epsilon=1,budget=epsilon=1"):
        text += ",loss=plain"
        label, passive = simple_parties(label_privacy=LabelPrivacy.from_text(text))
        train([label, *passive], epochs=1)


def test_the_ledger_adds_up_trainings(tmp_path: Path) -> None:
    """The same draws again are free; another mechanism is not."""

    def trained(text: str) -> Tensor:
        given = (
            f"{text},loss=plain,ledger={tmp_path / 'ledger.json'},budget=epsilon=1.5"
        )
        label, passive = simple_parties(label_privacy=LabelPrivacy.from_text(given))
        result = train([label, *passive], epochs=1)[1]
        assert result.label_privacy["epsilon"] == 1.0  # type: ignore[attr-defined]
        assert label.private is not None
        return label.private.used

    first = trained("epsilon=1")
    assert torch.equal(trained("epsilon=1"), first)
    with pytest.raises(
        PartyError, match=r"label.*epsilon 1\.5 for all training runs.*epsilon 2"
    ):
        trained("epsilon=1.0000001")
    assert torch.equal(trained("epsilon=1"), first)  # what was refused does not count
