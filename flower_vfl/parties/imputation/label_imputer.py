"""Labels of aligned rows at the label party, and the calibration of predictions.

Calibration undoes the effect of synthetic data on predicted probabilities:
Sun et al., FLORIST, appendices E to G (after Chapelle et al., Simple and Scalable
Response Prediction for Display Advertising). https://arxiv.org/abs/2106.05508

With c the share of rows that all parties hold, p the share with a real label, π the
class frequencies and s the distribution of synthetic labels, the model learns

    D'(y|x) = c·D(y|x) + (p − c)·π + (1 − p)·s

This assumes that whether a party holds a row does not depend on the label. For
``random_pred`` s = D', and p cancels out; docs/alignment.md ("Calibration") has s and c
for the other cases, and what several passive parties change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, at_party, check_name
from flower_vfl.objectives import Objective
from flower_vfl.randomness import Noise
from flower_vfl.specs import build_from_spec

from .feature_imputer import FeatureImputer
from .labels import LABEL_SYNTHESIZERS, RandomPred, UnlabelledBatch, class_counts
from .row_index import Imputation, RowIndex

When = Literal["te", "tr"]
WHEN: tuple[When, ...] = get_args(When)
_BEND = 1e-3  # below it, probabilities follow a hyperbola


@dataclass(frozen=True)
class Calibration:
    """The effect of synthetic rows and private labels, and when it is undone.

    With ``when="te"`` the model learns D', and predictions are converted to D. With
    ``"tr"`` the model learns D, which the loss converts to D'. Private labels put a
    `channel` before the mixture, D' = weight·D·channel + offset, or with Gaussian noise
    a likelihood of exp(scale·label) after it.
    """

    when: When
    weight: float  # c: share of rows that are real at all parties
    offset: Tensor  # what the other rows add to each class
    channel: Tensor | None = None  # probability of each answer (column) by class
    scale: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a mixture that cannot be undone."""
        check_name("calibration", self.when, WHEN)
        if not self.weight > 0.0:
            raise ConfigError("cannot be calibrated: no row is held by all parties")

    @classmethod
    def of(
        cls,
        when: When,
        labelled: float,
        complete: float,
        frequencies: Tensor,
        synthetic: Tensor | None,
    ) -> Calibration:
        """Return the calibration of a run."""
        if synthetic is None:
            weight = complete / labelled if labelled > 0.0 else 0.0
            return cls(when, weight, (1.0 - weight) * frequencies)
        offset = (labelled - complete) * frequencies + (1.0 - labelled) * synthetic
        return cls(when, complete, offset)

    def to_real(self, probabilities: Tensor) -> Tensor:
        """Return D from the probabilities that the model predicts.

        They may lie outside of the mixture, and clipping them would make ties. The
        hyperbola stays above 0 and keeps the order.
        """
        if self.when == "tr":
            return probabilities
        found = _by_class(probabilities)
        found = (found - self.offset.to(found)) / self.weight
        if self.channel is not None:
            found = found @ torch.linalg.pinv(self.channel.to(found))
        low = _BEND**2 / (2 * _BEND - found.clamp_max(_BEND))
        bent = torch.where(found < _BEND, low, found)
        real = bent / bent.sum(dim=1, keepdim=True)
        return real if probabilities.dim() > 1 else real[:, 1]

    def to_mixture(self, probabilities: Tensor) -> Tensor:
        """Return D', which the loss compares with labels."""
        if self.when == "te":
            return probabilities
        found = _by_class(probabilities)
        if self.channel is not None:
            found = found @ self.channel.to(found)
        found = self.weight * found + self.offset.to(found)
        return found if probabilities.dim() > 1 else found[:, 1]

    def loss(self, log_probabilities: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of D', given log D."""
        mixture = log_probabilities
        if self.channel is not None:
            steps = self.channel.to(mixture).clamp_min(1e-30).log()
            mixture = (mixture.unsqueeze(2) + steps).logsumexp(dim=1)
        if self.weight < 1.0:
            scaled = mixture + math.log(self.weight)
            offset = self.offset.to(scaled).log().expand_as(scaled)
            mixture = torch.logaddexp(scaled, offset)
        if self.scale:
            return -(mixture + self.scale * labels).logsumexp(dim=1).mean()
        if labels.dim() == 1:
            return F.nll_loss(mixture, labels.long())
        return -(labels * mixture).sum(dim=1).mean()


def _by_class(values: Tensor) -> Tensor:
    return values if values.dim() > 1 else torch.stack([1.0 - values, values], dim=1)


@dataclass
class BatchLabels:
    """Labels of a training batch."""

    used: Tensor  # class numbers, shares of classes, or values
    classes: Tensor
    real: Tensor | None = None  # which of them are real; None if all are
    true: Tensor | None = None  # before they were randomised, if they were


class LabelImputer:
    """Returns the labels of the rows of a run and imputes missing ones."""

    def __init__(self, rows: FeatureImputer, imputation: Imputation) -> None:
        labels, calibration = imputation.labels, imputation.calibration
        self._rows = rows
        kind = "kind of synthetic labels"
        self._synthesizer = build_from_spec(kind, labels, LABEL_SYNTHESIZERS)
        if calibration:
            check_name("calibration", calibration, WHEN)
        self._when = cast(When, calibration)
        self._own = torch.empty(0)  # labels of all own rows
        self._known = self._own  # of those that it trains on
        self._classes = 0  # 0 for a regression

    def fit(
        self,
        own: Tensor,
        training: Tensor,
        objective: Objective,
        parties: Iterable[str],
        name: str,
    ) -> None:
        """Fit the synthesizer to the training rows, after the feature imputer."""
        objective.calibration = None
        self._own, row_index = own, self._rows.row_index
        if row_index is None:
            return
        numbers = self._rows.local[training]
        self._known = own[numbers[numbers >= 0]]
        classes = int(getattr(objective, "classes", 2))
        self._classes = 0 if objective.task == "regression" else classes
        with at_party(name, "Correct this setting"):
            if len(self._known) < len(training):
                self._check(objective)
            self._fit_synthesizer()
            if self._when:
                labelled = len(self._known) / len(training)
                complete = complete_share(row_index, parties, labelled)
                objective.calibration = self._calibrate(objective, labelled, complete)

    def _check(self, objective: Objective) -> None:
        """Refuse settings that do not work with missing labels."""
        self._synthesizer.check_task(objective.task)
        kind = type(objective).__name__
        if objective.by_row:
            problem = f"{kind} needs the label of every row, and some are missing"
            raise ConfigError(f"{problem}; use cross-entropy or gafm")
        if self._synthesizer.samples > 1 and not objective.takes_shares:
            problem = f"{kind} does not take labels that are averages of several draws"
            raise ConfigError(f"{problem}; use samples=1, or cross-entropy")
        if not len(self._known):
            raise ConfigError("it holds none of the training rows: there are no labels")

    def _fit_synthesizer(self) -> None:
        """Draw the labels of the whole run, again when the secret has changed."""
        row_index = self._rows.row_index
        if row_index is not None and len(self._known):
            given = self._known, self._classes, row_index.rows
            self._synthesizer.fit(*given, self._stream("rows"))

    def _stream(self, *at: int | str) -> Noise:
        return Noise(self._rows.secret, "labels", *at)

    def _calibrate(
        self, objective: Objective, labelled: float, complete: float
    ) -> Calibration:
        if not objective.calibrates:
            kind = type(objective).__name__
            raise ConfigError(f"{kind} cannot be calibrated; only cross-entropy can")
        counts = class_counts(self._known, self._classes).double()
        frequencies = counts / counts.sum()
        synthetic = self._synthesizer.class_shares(frequencies)
        if labelled == 1.0:  # there are no synthetic labels
            synthetic = torch.zeros_like(frequencies)
        if synthetic is None and not isinstance(self._synthesizer, RandomPred):
            kind = type(self._synthesizer).__name__
            raise ConfigError(
                f"predictions cannot be calibrated: the class shares of {kind} labels "
                "are unknown; use majority, minority, random_pos or random_pred"
            )
        return Calibration.of(self._when, labelled, complete, frequencies, synthetic)

    def state_dict(self, objective: Objective) -> dict[str, Any]:
        """Return the calibration, for a party that only predicts; empty without one."""
        known = objective.calibration
        return {} if known is None else {"calibration": dict(vars(known))}

    def load_state_dict(self, state: dict[str, Any], objective: Objective) -> None:
        """Load a saved calibration, and draw again from the saved secret."""
        if "calibration" in state:
            objective.calibration = Calibration(**state["calibration"])
        self._fit_synthesizer()

    def batch(
        self,
        rows: Tensor,
        step: int,
        parts: Sequence[Tensor],
        joiner: nn.Module,
        objective: Objective,
    ) -> BatchLabels:
        """Return the labels of a training batch of aligned rows with embeddings."""
        numbers = self._rows.local.index_select(0, rows)
        absent = (numbers < 0).nonzero().flatten()
        labels = self._own.index_select(0, numbers.clamp_min(0))
        if not len(absent):
            return BatchLabels(labels, labels)
        stream = self._stream("step", step)

        def join() -> Tensor:
            joined: Tensor = joiner([part.detach() for part in parts])
            return joined.detach()

        def expect() -> Tensor:
            objective.eval(), joiner.eval()
            with torch.no_grad():
                expected = objective.expect(join())
            objective.train(), joiner.train()
            return expected

        unlabelled = UnlabelledBatch(rows, labels, absent, expect, join, stream)
        filled = self._synthesizer.synthesize(unlabelled).to(labels.device)
        if filled.dim() == 2:
            shares = F.one_hot(labels, self._classes).to(filled)
            shares = shares.index_copy(0, absent, filled)
            return BatchLabels(shares, shares.argmax(dim=1), numbers >= 0)
        used = labels.index_copy(0, absent, filled)
        hard = used.round() if self._classes else used
        return BatchLabels(used, hard, numbers >= 0)

    def labelled(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the own rows of aligned rows with a label, and which these are."""
        if self._rows.row_index is None:
            return rows, None
        numbers = self._rows.local[rows]
        return numbers[numbers >= 0], (numbers >= 0).cpu()


def complete_share(
    row_index: RowIndex, parties: Iterable[str], labelled: float
) -> float:
    """Return the share of rows that all parties hold, estimated from sizes."""
    if row_index.common is not None:
        return min(row_index.common, labelled)
    return labelled * math.prod(row_index.shares.get(party, 1.0) for party in parties)
