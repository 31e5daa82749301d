"""Every attack finds the labels of an undefended run, and nothing in noise."""

from __future__ import annotations

from typing import Any

import pytest

from flower_vfl.leakage.attacks import SCORE_ATTACKS
from flower_vfl.simulations.attacks import COMPLETIONS
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import tables
from flower_vfl.simulations.runtime.engines import run_and_attack
from flower_vfl.simulations.studies.run_metrics import completions, leaks
from flower_vfl.specs import split_specs

# Where their papers claim success: gradients of a rare class, summed logits, embeddings
# and models that separate the classes.
GRADIENTS = "norm,cosine,mean:held_out=true,median:held_out=true,spectral,stale,"
GRADIENTS += "similarity,similarity:known=false,exploit:steps=100,pooled:score=cosine"
EMBEDDINGS = "embedding,similarity:on=embedding,similarity:on=embedding,known=false,"
COMPLETION = "labels=20,steps=100,lambda_u=5,freeze_bottom=true,metric=auc"
SETTINGS: dict[str, dict[str, Any]] = {
    "gradients": {"dataset": "credit-default", "limit": 1200, "attack": GRADIENTS},
    "embeddings": {"attack": f"{EMBEDDINGS}passive:{COMPLETION}", "epochs": 8},
    "malicious": {
        "attack": f"active:{COMPLETION}",
        "epochs": 8,
        "leak_baseline": False,
    },
    "logits": {
        "attack": "direct",
        "width": 1,
        "aggregation": "sum",
        "top": "none",
    },
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_attack_finds_the_labels_and_nothing_in_noise(
    kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "gradients":
        request.getfixturevalue("data_folder")
    given = {"epochs": 3, "batch_size": 128, "leak_baseline": True, **SETTINGS[kind]}
    config = RunConfig(**given, reproducible_noise=True, evaluate_every=100)
    records = tables({"run": run_and_attack(config, "in-process")})
    found = leaks(records)
    found = found.groupby(["attack", "random"])["leak"].max().unstack()
    if len(found):
        assert found[False].min() >= 0.95, found
        assert found[True].max() <= 0.6, found
    success = completions(records).query("split == 'train'")["value"]
    assert (success >= 0.95).all(), success
    assert len(found) + len(success) == len(split_specs(config.attack))


def test_no_attack_is_missing() -> None:
    texts = " ".join(settings["attack"] for settings in SETTINGS.values())
    assert all(name in texts for name in [*SCORE_ATTACKS, *COMPLETIONS])
