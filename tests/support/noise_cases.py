"""Noise as the package once drew it, and runs in which a passive party looks on."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from mersenne import WORDS, twister
from torch import Tensor, nn
from vertical_cases import HookedGrid

from flower_vfl import (
    Batch,
    InProcessGrid,
    LabelParty,
    Objective,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.leakage.attacks import (
    cosine_attack,
    leak_auc,
    norm_attack,
    spectral_attack,
)
from flower_vfl.objectives import GAFM, GAFMOriginal
from flower_vfl.protocol import replay as sessions
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.randomness import Noise, RandomState, derive_seed
from flower_vfl.strategies import Checkpoints, Defense, Iso, VerticalStrategy
from flower_vfl.strategies.defenses.iso import iso
from flower_vfl.transform import GradientTransform

SEED, ROWS, COLUMNS = 5, 256, 6
NODES: list[dict[str, Any]] = [
    {"role": "label", "name": "label"},
    {"role": "passive", "name": "passive-1"},
]
BySteps = dict[int, list[Tensor]]


def old_words(*parts: int | str) -> list[int]:
    """Return the state of a twister that depends on the parts, as 624 words."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    raw = hashlib.shake_256(text.encode()).digest(4 * WORDS)
    return [int(word) for word in np.frombuffer(raw, dtype="<u4")]


class OldNoise(Noise):
    """Normal numbers of torch's own generator."""

    def __init__(self, words: Sequence[int]) -> None:
        self._twister = twister(words)

    def normal(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return torch.randn(tuple(shape), generator=self._twister, dtype=dtype)


class TwistedNoise(Noise):
    """The package's normal numbers, made of a Mersenne twister and not of a cipher."""

    def __init__(self, words: Sequence[int], used: int = WORDS) -> None:
        self._bits = np.random.MT19937()
        state = {"key": np.array(words, dtype=np.uint32), "pos": used}
        self._bits.state = {"bit_generator": "MT19937", "state": state}

    def integers(self, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        assert dtype == torch.int32
        words = self._bits.random_raw(count).astype(np.uint32)
        return torch.from_numpy(words.view(np.int32))


class OldIso(Iso):
    """Iso with noise that depends on secret, stage, party and step only."""

    def __init__(
        self, t: float, kind: Callable[[Sequence[int]], Noise] = OldNoise
    ) -> None:
        super().__init__(t)
        self.kind = kind

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        parts = batch.seed, batch.stage, batch.party, batch.step
        return iso(rows, self.t, self.kind(old_words(*parts)))


class GlobalNoise(Noise):
    """Whatever torch's global generator gives."""

    def __init__(self) -> None:
        pass

    def normal(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return torch.randn(tuple(shape), dtype=dtype)

    def uniform(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return torch.rand(tuple(shape), dtype=dtype)


class OldGAFM(GAFM):
    """GAFM whose responses come from the label party's state of torch."""

    def own_noise(self) -> Noise:
        return GlobalNoise()


class OldGAFMOriginal(GAFMOriginal):
    """The first form of GAFM, likewise."""

    def own_noise(self) -> Noise:
        return GlobalNoise()


class OldLabelParty(LabelParty):
    """A label party whose state of torch comes from the run's seed."""

    def training_seed(self, config: TrainingConfig) -> int:
        return derive_seed(config.seed, "training", self.name)


# A run, and what its passive party sees


def repeatable_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the keys of 256 bits be the same in every run of a test."""
    draw, stream = secrets.randbits, random.Random(4)

    def randbits(count: int) -> int:
        return stream.getrandbits(count) if count == 256 else draw(count)

    monkeypatch.setattr(secrets, "randbits", randbits)


@dataclass
class View:
    """What the passive party has, by step; labels and `clean` are for the score only.

    A step that was repeated has several entries. Scores are those of `step`.
    """

    all_labels: Tensor
    step: int = 1
    order: dict[int, Tensor] = field(default_factory=dict)
    embeddings: BySteps = field(default_factory=lambda: defaultdict(list))
    gradients: BySteps = field(default_factory=lambda: defaultdict(list))
    clean: BySteps = field(default_factory=lambda: defaultdict(list))

    @property
    def labels(self) -> Tensor:
        """The labels of the batch."""
        return self.all_labels[self.order[self.step]]

    def leak(self, gradient: Tensor, rows: slice | list[int] = slice(None)) -> float:
        """Return the leak AUC of the best of three attacks."""
        known = self.clean[self.step] or [gradient]  # where a positive row is shown
        positive = known[0][self.labels == 1][0]
        scores = (
            norm_attack(gradient),
            cosine_attack(gradient, positive),
            spectral_attack(gradient, signed=True),
        )
        return max(self.auc(score, rows) for score in scores)

    def auc(self, score: Tensor, rows: slice | list[int] = slice(None)) -> float:
        """Return the leak AUC of a score, whichever way round it is."""
        return leak_auc(score[rows], self.labels[rows], flipped=True)


class Kept:
    """A transform that changes nothing and keeps the gradient for the score."""

    requires_labels = False

    def __init__(self, view: View) -> None:
        self.view = view

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        self.view.clean[batch.step].append(gradient.clone())
        return gradient

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Watching(PassiveParty):
    """A passive party that keeps what passes, and may send what it likes."""

    view: View
    change: Callable[[Tensor], Tensor] | None = None

    def forward(
        self, step: int, epoch: int, index: int, probed: bool = False
    ) -> Tensor:
        found = super().forward(step, epoch, index, probed)
        found = found if self.change is None else self.change(found)
        self.view.order[step] = self.training_rows(step, epoch, index)
        self.view.embeddings[step].append(found)
        return found

    def backward(
        self, step: int, gradient: Tensor | None, probed: bool = False
    ) -> dict[str, Tensor]:
        assert gradient is not None
        self.view.gradients[step].append(gradient.clone())
        return super().backward(step, gradient, probed)


def known_to_all(
    objective: Callable[[], Objective], seed: int = SEED
) -> Callable[[], Objective]:
    """Give an objective the first weights that everybody once knew, from a seed."""

    def make() -> Objective:
        with RandomState(derive_seed(seed, "model", "label")):
            return objective()

    return make


def observe(
    objective: Callable[[], Objective],
    bottom: Callable[[], nn.Module],
    transforms: Sequence[GradientTransform] = (),
    *,
    kind: type[LabelParty] = LabelParty,
    steps: int = 1,
    seed: int = SEED,
    change: Callable[[Tensor], Tensor] | None = None,
) -> View:
    """Train with all rows in one batch and return what the passive party saw.

    The nodes are those of a deployment, and the label party trusts the server only
    where that is needed: with `transforms`, which are applied there.

    With `change` the party claims, after the third of `steps`, to have lost its memory.
    The run goes back to the second, and the party then sends changed embeddings.
    """
    stream = torch.Generator().manual_seed(1)
    data = torch.randn(ROWS, COLUMNS, generator=stream)
    lost: list[Message] = []
    view = View((torch.rand(ROWS, generator=stream) < 0.4).long())

    def passive(context: Context) -> PassiveParty:
        party = Watching(data, bottom(), device="cpu")
        party.view, party.change = view, change if view.gradients else None
        return party

    def label(context: Context) -> LabelParty:
        given = view.all_labels, objective()
        return kind(*given, device="cpu", trust_server=bool(transforms))

    def forget(message: Message) -> None:
        if change is not None and len(view.gradients) == 3 and not lost:
            lost.append(message)
            for key, session in list(sessions.sessions.items()):
                if getattr(session.party, "view", None) is view:
                    del sessions.sessions[key]

    strategy = VerticalStrategy(
        batch_size=ROWS,
        seed=seed,
        test_fraction=0.0,
        progress=False,
        defense=Defense([Kept(view), *transforms] if transforms else ""),
        checkpoints=Checkpoints(every=2),
    )
    app = vertical_client_app(passive, label)
    with InProcessGrid(app, NODES) as grid:
        strategy.start(HookedGrid(grid, forget), num_rounds=steps)
    return view
