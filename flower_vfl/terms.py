"""What parties say about themselves, and what they agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["passive", "label"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Terms:
    """What all parties agree on before the first step.

    Parameters
    ----------
    seed : int
        The shared seed.
    batch_size : int
        Rows of a training batch; 0 for all of them.
    evaluation_rows : int
        Rows that travel in one message of an evaluation.
    test_fraction, valid_fraction : float
        Held-out shares, where the parties bring no split of their own.
    parties : Mapping[str, Shape]
        Shape of one row of each passive party's embedding, in the order in which they
        are joined.
    aggregation : str (default: "")
        Name of the aggregation; empty leaves it to the label party.
    learning_rate : float (default: 0.0)
        For this party; 0 keeps the optimizer's own.
    defended : str (default: "")
        Where gradients are defended: ``"strategy"``, ``"label"``, or nowhere if empty.
    defense : str (default: "")
        The defense that the label party is to apply, as text.
    leakage : str (default: "")
        What the label party is to measure about the gradients that leave, as text.
    noise_seed : str (default: "")
        What it is to draw noise from, in hexadecimal digits; empty leaves it to the
        label party to draw a secret.
    """

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
class Description:
    """What a party says about itself in the hello.

    Parameters
    ----------
    name : str
        The party's name.
    role : Role
        ``"passive"`` or ``"label"``.
    rows : int
        Number of samples.
    shape : Shape
        Shape of one row of its embedding; empty if it makes none.
    task : str (default: "")
        The label party's task.
    ids_digest, split_digest : str (default: "")
        Keyed digests of the ordered ids and of the party's own split; they show whether
        two parties have the same and nothing else. Empty where it has none.
    checkpoints : tuple[str, ...] (default: ())
        Checkpoints that it could be restored to.
    aligned : str (default: "")
        Keyed digest of the alignment that it keeps, if it was asked for.
    """

    name: str
    role: Role
    rows: int
    shape: Shape
    task: str = ""
    ids_digest: str = ""
    split_digest: str = ""
    checkpoints: tuple[str, ...] = ()
    aligned: str = ""
