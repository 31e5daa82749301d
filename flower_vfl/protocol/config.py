"""What parties say about themselves, and what they agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["passive", "label"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TrainingConfig:
    """What all parties agree on before the first step."""

    seed: int
    batch_size: int
    evaluation_rows: int = 8192
    test_fraction: float = 0.2
    valid_fraction: float = 0.0
    parties: Mapping[str, Shape] = field(default_factory=dict)
    aggregation: str = ""
    learning_rate: float = 0.0
    defended: str = ""
    defense: str = ""
    leakage: str = ""
    noise_seed: str = ""


@dataclass(frozen=True)
class PartyDescription:
    """What a party says about itself in the hello."""

    name: str
    role: Role
    rows: int
    shape: Shape
    task: str = ""
    ids_digest: str = ""
    split_digest: str = ""
    checkpoints: tuple[str, ...] = ()
    aligned: str = ""
