"""The score attacks by name.

A score attack is a function ``(gradient, known) -> scores``. It gives each row of a
gradient one score, or for more than two classes one column per class of
``known.classes``. Parameters of its name come after these two arguments, or are fields
of a class whose objects are such functions.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.leakage.auc import Pair, leak_pair
from flower_vfl.objectives import Task
from flower_vfl.specs import build_from_spec, parse_spec, typed_arguments

from .cosine import CosineAttack
from .direct import DirectAttack
from .embedding import EmbeddingAttack
from .exploit import ExploitAttack
from .known import Known
from .mean import MeanAttack, MedianAttack
from .norm import norm_scores
from .similarity import SimilarityAttack
from .spectral import spectral_scores

STALE, POOLED = "stale", "pooled"
_HELD_OUT = {"score": "mean", "held_out": "true"}
_STALE_SCORE = {"binary": _HELD_OUT, "multiclass": _HELD_OUT}  # what finds most
_STALE_SCORE["regression"] = {"score": "direct"}
ScoreAttack = Callable[[Tensor, Known], Tensor]
SCORE_ATTACKS: dict[str, Callable[..., Any]] = {
    "norm": norm_scores,
    "cosine": CosineAttack,
    "mean": MeanAttack,
    "median": MedianAttack,
    "spectral": spectral_scores,
    "direct": DirectAttack,
    STALE: MeanAttack,  # its score, unless another one is given
    POOLED: norm_scores,  # the same
    "similarity": SimilarityAttack,
    "embedding": EmbeddingAttack,
    "exploit": ExploitAttack,
}
# Measured at the end of each epoch, on all of its rows.
OF_AN_EPOCH = (STALE, POOLED, "similarity", "embedding", "exploit")
DEFAULT_ATTACKS: dict[Task, tuple[str, ...]] = {
    "binary": ("norm", "cosine", "mean", "median"),
    "multiclass": ("norm", "cosine", "mean", "median"),
    "regression": ("norm", "direct", "spectral"),
}


def build_attack(spec: str, task: Task) -> ScoreAttack:
    """Build an attack, or its score if it has one; refuse one that needs classes."""
    kind = "score attack"
    name, raw = parse_spec(spec)
    if name in (STALE, POOLED):
        if name == STALE:
            check_name("epochs of 'over'", raw.pop("over", "all"), ("all", "best"))
        elif task != "binary":
            raise ConfigError(f"the score attack '{spec}' needs two classes")
        usual = _STALE_SCORE[task] if name == STALE else {"score": "norm"}
        inner = raw if "score" in raw else {**usual, **raw}
        score, rest = inner.pop("score"), ",".join(f"{k}={v}" for k, v in inner.items())
        return build_attack(f"{score}:{rest}" if rest else score, task)
    check_name(kind, name, SCORE_ATTACKS)
    factory = SCORE_ATTACKS[name]
    attack: ScoreAttack
    if isinstance(factory, type):
        attack = build_from_spec(kind, spec, SCORE_ATTACKS)
    else:
        attack = partial(factory, **typed_arguments(kind, name, raw, factory, given=2))
    if task not in getattr(factory, "tasks", DEFAULT_ATTACKS):
        raise ConfigError(
            f"the score attack '{spec}' needs classes, the task is {task}; choose from "
            f"{', '.join(DEFAULT_ATTACKS[task])}"
        )
    return attack


def fits(spec: str, task: Task) -> bool:
    """Return whether an attack can be built without further parameters for a task."""
    try:
        build_attack(spec, task)
    except ConfigError:
        return False
    return True


def attack_scores(
    attacks: Sequence[ScoreAttack], rows: Tensor, known: Known
) -> list[Tensor]:
    """Return the scores of each attack on one party; none for a constant label."""
    return [] if known.constant else [_checked(a, rows, known) for a in attacks]


def _checked(attack: ScoreAttack, rows: Tensor, known: Known) -> Tensor:
    """Return the scores of one attack; refuse what cannot be ranked."""
    scores = attack(rows, known)
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.to(rows)
    columns = scores.shape[1] if scores.ndim == 2 else len(known.classes)
    fitting = not known.classes or columns == len(known.classes)
    if scores.ndim not in (1, 2) or len(scores) != len(rows) or not fitting:
        raise ConfigError(
            f"an attack returned scores of the shape {tuple(scores.shape)} for "
            f"{len(rows)} rows of {len(known.classes)} classes; return one score per "
            "row, or one column per class"
        )
    if not math.isfinite(float(scores.sum())):
        raise ConfigError("an attack returned scores that are missing or infinite")
    return scores


def leaks(
    attacks: Sequence[ScoreAttack], scores: Sequence[Tensor], known: Known
) -> list[Pair]:
    """Return raw and flipped leak of each attack; known rows do not count."""
    if known.constant:
        return [(math.nan, math.nan)] * len(attacks)
    return [_leak(a, each, known) for a, each in zip(attacks, scores, strict=True)]


def _leak(attack: ScoreAttack, scores: Tensor, known: Known) -> Pair:
    """Return the raw and the flipped leak of one attack on one party."""
    labels = known.labels
    if getattr(attack, "knows_examples", False):
        rest = torch.ones_like(labels, dtype=torch.bool)
        rest[known.examples] = False
        scores, labels = scores[rest], labels[rest]
    return leak_pair(scores, labels, len(known.classes))
