"""Attacks that infer labels, and how much they find."""

from flower_vfl.leakage.auc import (
    assign_positives,
    attack_accuracy,
    f1_score,
    leak_auc,
    pearson_rho,
    roc_auc,
    summarise,
    top_k_accuracy,
)
from flower_vfl.leakage.completion import (
    CompletionResult,
    ModelCompletion,
    summarise_completion,
)
from flower_vfl.leakage.meter import LeakageMeter, random_baseline
from flower_vfl.metrics import adaptive_calibration_error

from .malicious import MaliciousAdam, MaliciousSGD
from .membership import membership_aucs
from .registry import DEFAULT_ATTACKS, SCORE_ATTACKS, ScoreAttack
from .scores import (
    cosine_attack,
    direct_attack,
    mean_attack,
    median_attack,
    norm_attack,
    spectral_attack,
)
from .stale import StaleGradients

__all__ = [
    "DEFAULT_ATTACKS",
    "SCORE_ATTACKS",
    "CompletionResult",
    "LeakageMeter",
    "MaliciousAdam",
    "MaliciousSGD",
    "ModelCompletion",
    "ScoreAttack",
    "StaleGradients",
    "adaptive_calibration_error",
    "assign_positives",
    "attack_accuracy",
    "cosine_attack",
    "direct_attack",
    "f1_score",
    "leak_auc",
    "mean_attack",
    "median_attack",
    "membership_aucs",
    "norm_attack",
    "pearson_rho",
    "random_baseline",
    "roc_auc",
    "spectral_attack",
    "summarise",
    "summarise_completion",
    "top_k_accuracy",
]
