"""Attacks that infer labels, and how much they find."""

from flower_vfl.leakage.auc import leak_auc, pearson_rho, roc_auc, summarise
from flower_vfl.leakage.completion import CompletionResult, ModelCompletion
from flower_vfl.leakage.meter import LeakageMeter
from flower_vfl.metrics import adaptive_calibration_error

from .cosine import cosine_attack
from .direct import direct_attack, direct_success
from .exploit import exploit_attack
from .known import Known
from .malicious import MaliciousAdam, MaliciousSGD
from .mean import mean_attack, median_attack, median_split
from .norm import norm_attack
from .registry import DEFAULT_ATTACKS, SCORE_ATTACKS, ScoreAttack
from .similarity import cluster_centers, similarity_attack
from .spectral import membership_aucs, spectral_attack
from .stale import StaleGradients

__all__ = [
    "DEFAULT_ATTACKS",
    "SCORE_ATTACKS",
    "CompletionResult",
    "Known",
    "LeakageMeter",
    "MaliciousAdam",
    "MaliciousSGD",
    "ModelCompletion",
    "ScoreAttack",
    "StaleGradients",
    "adaptive_calibration_error",
    "cluster_centers",
    "cosine_attack",
    "direct_attack",
    "direct_success",
    "exploit_attack",
    "leak_auc",
    "mean_attack",
    "median_attack",
    "median_split",
    "membership_aucs",
    "norm_attack",
    "pearson_rho",
    "roc_auc",
    "similarity_attack",
    "spectral_attack",
    "summarise",
]
