"""Labels of aligned rows at the label party, and calibration."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError, check_name
from flower_vfl.objectives import Objective
from flower_vfl.randomness import Noise
from flower_vfl.specs import build_from_spec

from .calibration import WHEN, Calibration, When
from .feature_imputer import FeatureImputer
from .labels import LABEL_SYNTHESIZERS, RandomPred, UnlabelledBatch, class_counts
from .row_index import RowIndex


@dataclass
class BatchLabels:
    """Labels of a training batch."""

    used: Tensor  # class numbers, shares of classes, or values
    classes: Tensor
    real: Tensor | None = None  # which of them are real; None if all are


class LabelImputer:
    """Returns the labels of the rows of a run and imputes missing ones."""

    def __init__(self, rows: FeatureImputer, labels: str, calibration: str) -> None:
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
        expect: Callable[[], Tensor],
        join: Callable[[], Tensor],
    ) -> BatchLabels:
        """Return the labels of a training batch of aligned rows."""
        numbers = self._rows.local.index_select(0, rows)
        absent = (numbers < 0).nonzero().flatten()
        labels = self._own.index_select(0, numbers.clamp_min(0))
        if not len(absent):
            return BatchLabels(labels, labels)
        stream = self._stream("step", step)
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
    return labelled * prod(row_index.shares.get(party, 1.0) for party in parties)
