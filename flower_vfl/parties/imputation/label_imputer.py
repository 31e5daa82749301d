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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, PartyError, check_name
from flower_vfl.objectives import Objective
from flower_vfl.randomness import Noise
from flower_vfl.specs import build_from_spec

from .feature_imputer import FeatureImputer
from .labels import LABEL_SYNTHESIZERS, RandomPred, UnlabelledBatch, class_counts
from .row_index import Imputation, RowIndex

When = Literal["te", "tr"]
WHEN: tuple[When, ...] = get_args(When)
_BEND = 1e-3


def mixed(probabilities: Tensor, weight: float, offset: Tensor) -> Tensor:
    """Return D' = weight·D + offset."""
    return weight * probabilities + offset.to(probabilities)


def unmixed(probabilities: Tensor, weight: float, offset: Tensor) -> Tensor:
    """Return D = (D' − offset)/weight as probabilities.

    Predictions may lie outside of the mixture, and clipping them would make ties. A
    hyperbola bends values below 0.001 instead: it stays above 0 and keeps the order.
    """
    return as_probabilities((probabilities - offset.to(probabilities)) / weight)


def as_probabilities(inverse: Tensor) -> Tensor:
    """Bend values below 0.001, by class, and divide by their sum."""
    low = _BEND**2 / (2 * _BEND - inverse.clamp_max(_BEND))
    bent = torch.where(inverse < _BEND, low, inverse)
    return bent / bent.sum(dim=1, keepdim=True)


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
            raise ConfigError(
                "predictions cannot be calibrated: no row is held by all parties"
            )

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
        """Return D from the probabilities that the model predicts."""
        if self.when == "tr":
            return probabilities
        return self._by_class(unmixed, probabilities)

    def to_mixture(self, probabilities: Tensor) -> Tensor:
        """Return D', which the loss compares with labels."""
        if self.when == "te":
            return probabilities
        return self._by_class(mixed, probabilities)

    def _by_class(
        self, change: Callable[[Tensor, float, Tensor], Tensor], values: Tensor
    ) -> Tensor:
        both = values
        if values.dim() == 1:
            both = torch.stack([1.0 - values, values], dim=1)
        if self.channel is not None and change is mixed:
            both = both @ self.channel.to(both)
        if self.channel is None or change is mixed:
            both = change(both, self.weight, self.offset)
        else:
            answers = (both - self.offset.to(both)) / self.weight
            both = as_probabilities(answers @ torch.linalg.pinv(self.channel.to(both)))
        return both if values.dim() > 1 else both[:, 1]

    def loss(self, log_probabilities: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of D', given log D."""
        mixture = log_probabilities
        if self.channel is not None:
            paths = (
                mixture.unsqueeze(2) + self.channel.to(mixture).clamp_min(1e-30).log()
            )
            mixture = paths.logsumexp(dim=1)
        if self.weight < 1.0:
            scaled = mixture + math.log(self.weight)
            offset = self.offset.to(scaled).log().expand_as(scaled)
            mixture = torch.logaddexp(scaled, offset)
        if self.scale:
            return -(mixture + self.scale * labels).logsumexp(dim=1).mean()
        if labels.dim() == 1:
            return F.nll_loss(mixture, labels.long())
        return -(labels * mixture).sum(dim=1).mean()


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
        try:
            if len(self._known) < len(training):
                self._check(objective)
            self._fit_synthesizer()
            if self._when:
                labelled = len(self._known) / len(training)
                complete = complete_share(row_index, parties, labelled)
                objective.calibration = self._calibrate(objective, labelled, complete)
        except ConfigError as error:
            raise PartyError(name, str(error), "Correct this setting") from error

    def _check(self, objective: Objective) -> None:
        """Refuse settings that do not work with missing labels."""
        self._synthesizer.check_task(objective.task)
        kind = type(objective).__name__
        if objective.by_row:
            raise ConfigError(
                f"{kind} needs the label of every row, and some are missing; use "
                "cross-entropy or gafm"
            )
        if self._synthesizer.samples > 1 and not objective.takes_shares:
            raise ConfigError(
                f"{kind} does not take labels that are averages of several draws; use "
                "samples=1, or cross-entropy"
            )
        if not len(self._known):
            raise ConfigError(
                "it holds none of the training rows, and so has no label to learn from"
            )

    def _fit_synthesizer(self) -> None:
        """Draw the labels of the whole run, again when the secret has changed."""
        row_index = self._rows.row_index
        if row_index is not None and len(self._known):
            self._synthesizer.fit(
                self._known, self._classes, row_index.rows, self._stream("rows")
            )

    def _stream(self, *at: int | str) -> Noise:
        return Noise(self._rows.secret, "labels", *at)

    def _calibrate(
        self, objective: Objective, labelled: float, complete: float
    ) -> Calibration:
        if not objective.calibrates:
            raise ConfigError(
                f"{type(objective).__name__} cannot be calibrated; only cross-entropy "
                "can"
            )
        counts = class_counts(self._known, self._classes).double()
        frequencies = counts / counts.sum()
        synthetic = self._synthesizer.class_shares(frequencies)
        drawn = isinstance(self._synthesizer, RandomPred)
        if labelled == 1.0:  # there are no synthetic labels
            synthetic, drawn = torch.zeros_like(frequencies), False
        if synthetic is None and not drawn:
            raise ConfigError(
                "predictions cannot be calibrated, because the class shares of "
                f"synthetic labels of the kind {type(self._synthesizer).__name__} are "
                "unknown; use majority, minority, random_pos or random_pred"
            )
        return Calibration.of(self._when, labelled, complete, frequencies, synthetic)

    def state_dict(self, objective: Objective) -> dict[str, Any]:
        """Return the calibration, for a party that only predicts; empty without one."""
        known = objective.calibration
        if known is None:
            return {}
        return {"calibration": dict(vars(known))}

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
