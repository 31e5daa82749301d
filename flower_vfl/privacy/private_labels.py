"""The label party's labels: the true ones, and what training sees instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, require
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.imputation.label_imputer import BatchLabels, Calibration
from flower_vfl.parties.policies import AT_LABEL
from flower_vfl.parties.schedule import keyed_digest
from flower_vfl.randomness import Noise, derive_key

from .accountant import Guarantee, Ledger
from .label_privacy import (
    DEFAULT_LOSS,
    Gaussian,
    LabelPrivacy,
    Loss,
    RandomizedResponse,
)

if TYPE_CHECKING:
    from flower_vfl.leakage.canaries import Canaries
    from flower_vfl.objectives import Objective
    from flower_vfl.protocol.config import PartyDescription, TrainingConfig
    from flower_vfl.transform import Defender


class PrivateLabels:
    """The label party's labels: the true ones, and what training sees instead."""

    def __init__(
        self,
        privacy: LabelPrivacy,
        objective: Objective,
        labels: Tensor,
        ids: Iterable[object],
    ) -> None:
        self.privacy, self.true = privacy, labels
        self.used = labels  # class numbers, or values
        self.soft: Tensor | None = None  # what the loss takes instead, if anything
        self.canaries: Canaries | None = None
        self.loss: Loss = "plain"
        self.key = 0
        self._objective, self._ids = objective, list(ids)
        if len(set(map(str, self._ids))) < len(self._ids):
            text = "two ids are the same text, such as 7 and '7', and would share noise"
            raise ConfigError(f"{text}; give each row an id of its own")
        self._noisy = labels
        self._known = labels  # those of canaries included, for the meter
        classes = int(getattr(objective, "classes", 2))
        self.mechanism = privacy.mechanism_for(objective.task, classes)
        self._ledger = Ledger(privacy.ledger) if privacy.ledger else None

    def guarantee(
        self,
        note: bool = False,
        check: Callable[[Guarantee], None] = lambda found: None,
    ) -> Guarantee:
        """Return what is promised and not refused, with `note` also in the ledger."""
        release = None if self.mechanism is None else self.mechanism.release
        if release is None or self._ledger is None:
            found = Guarantee("none") if release is None else Guarantee.of([release])
            check(found)
            return found
        values = [*self._ids, *self.true.tolist()]
        digest = keyed_digest(values, derive_key(self._ledger.key, "digest"))
        return self._ledger.register(release, digest, note, check)

    def describe(self, party: PartyDescription) -> PartyDescription:
        """Return a label party's description with what its labels are protected by."""
        losses = ",".join(self.losses) if self.privacy.loss == "auto" else ""
        return replace(party, privacy=self.guarantee().to_text(), losses=losses)

    def check_run(self, config: TrainingConfig, defender: Defender) -> None:
        """Refuse a run that would act on true labels, or that breaks the budget."""
        leakage = Leakage.from_text(config.leakage) if config.leakage else None
        if self.privacy.canaries and leakage is None:
            attacks = "name attacks in Leakage(...) (attack in the run config)"
            raise ConfigError(f"canaries are measured with the leakage: {attacks}")
        if self.mechanism is not None and leakage is not None:
            if leakage.limit is not None:
                problem = "a leak limit depends on true labels and tells about them"
                raise ConfigError(f"{problem}; remove it: label privacy has a bound")
            if leakage.shows_labels:
                reveal = "layers, and membership with labels, reveal true labels"
                raise ConfigError(f"{reveal}; measure them without label privacy")
        if config.defended == "strategy" and leakage is not None:
            where = "a defense at the strategy is measured there, without true labels"
            raise ConfigError(f"{where}; have this node apply it: {AT_LABEL}")
        if self.privacy.budget:
            # What uses labels again after a bound ends it, and so do several trainings.
            using = [each for each in defender.transforms if each.requires_labels]
            last = using[-1] if using and self.mechanism is None else None
            promised = getattr(last, "run_auc", None)
            self.guarantee(note=True, check=partial(self._check_budget, promised))
        else:
            self.guarantee(note=True)

    def _check_budget(self, promised: float | None, found: Guarantee) -> None:
        """Refuse a run whose labels, or whose defense, cannot promise the budget."""
        kind, most = self.privacy.budget_limit()
        value = found.auc_bound if kind == "auc" else found.epsilon
        if promised is not None and kind == "auc":
            value = min(promised, value or 1.0)
        if value is None or value > most + 1e-9:
            bound = f"{kind} {value:.3g}" if found.epsilon is not None else "no bound"
            would = f"label-dp with {kind}={most:g} (label-dp in the settings)"
            if kind == "auc":
                would += f", or marvell:auc={most:g},over=run,epochs=... at this node"
            raise ConfigError(
                f"the budget of its labels is {kind} {most:g} for all training runs "
                f"on them, but this run has {bound}; use {would}"
            )

    @property
    def losses(self) -> list[Loss]:
        """The losses that fit the mechanism and the objective."""
        mechanism, known = self.mechanism, self._objective.label_losses
        fitting: list[Loss] = ["plain"]
        response = isinstance(mechanism, RandomizedResponse) and mechanism.invertible
        if response and "unbiased" in known:
            fitting.append("unbiased")
        normal = isinstance(mechanism, Gaussian) and not mechanism.classes
        if mechanism is not None and "forward" in known and not normal:
            fitting.append("forward")
        return fitting

    @property
    def _fixed_key(self) -> int | None:
        return self.privacy.key if self._ledger is None else self._ledger.key

    def own_key(self, secret: int, trusted: bool) -> int:
        """Return the key of the draws; a server that is not trusted gets no others."""
        known = self._fixed_key
        if known is None and not trusted:
            known = self.key or None
        return secret if known is None else known

    def draw(self, key: int, training: Tensor, numbers: Tensor) -> None:
        """Randomise all labels; `numbers` are those of the own `training` rows."""
        start, self.key = self.true.clone(), key
        if count := self.privacy.canaries:
            from flower_vfl.leakage.canaries import Canaries

            allowed = f"at most half of the {len(training)} training rows"
            require(count <= len(training) // 2, "canaries", allowed, count)
            stream = Noise(key, "canaries")
            chosen = stream.permutation(len(training))[:count].to(training.device)
            sides = (stream.uniform((count,), torch.float64) < 0.5).long().to(chosen)
            audited = training[chosen]
            start[audited] = self._two_labels()[sides]
            self.canaries = Canaries(numbers[chosen], sides)
        self.used = self._noisy = self._known = start
        if self.mechanism is None:
            return
        noisy = self.mechanism.randomise(start, self._ids, key).to(start.device)
        if count:  # draws of their own: else they tell more about the true label
            other = int.from_bytes(derive_key(key, "labels of canaries"))
            apart = self.mechanism.randomise(start, self._ids, other)
            noisy[audited] = apart.to(noisy)[audited]
        self._noisy = noisy.float() if noisy.is_floating_point() else noisy
        if noisy.dim() == 2:
            self.used = noisy.argmax(dim=1).to(start.dtype)
        elif self._objective.task == "binary":
            self.used = (noisy > 0.5).to(start.dtype)
        else:
            self.used = noisy.to(start.dtype)

    def _two_labels(self) -> Tensor:
        """Return the two labels of canaries: the ends of the range, or two classes."""
        if self._objective.task != "regression":
            return torch.arange(2).to(self.true)
        ends = self.true.aminmax()
        low = ends.min if self.privacy.low is None else self.privacy.low
        high = ends.max if self.privacy.high is None else self.privacy.high
        return torch.tensor([float(low), float(high)]).to(self.true)

    def batch(self, labels: BatchLabels, rows: Tensor | None) -> BatchLabels:
        """Return the labels of a batch as the loss, transforms and meter take them."""
        assert rows is not None  # numbers of own rows, -1 where it holds none
        rows = rows.clamp_min(0)
        used = labels.used if self.soft is None else self.soft[rows]
        return replace(labels, used=used, true=self._known[rows])

    def state_dict(self) -> dict[str, str]:
        """Return what a resumed run must draw and learn with."""
        drawn = "" if self.mechanism is None else self.mechanism.text
        return {"label_key": f"{self.key:x}", "label_draws": drawn, "loss": self.loss}

    def saved(self, state: Mapping[str, Any]) -> tuple[str, int]:
        """Return loss and key of a saved state; refuse one with other draws."""
        key, own = int(state.get("label_key", "0"), 16), self.state_dict()
        same = state.get("label_draws") == own["label_draws"]
        if not same or self._fixed_key not in (None, key):
            raise ConfigError("the resumed run drew labels by another key or mechanism")
        return str(state["loss"]), key

    def choose(self, loss: str, gaps: bool) -> None:
        """Set the loss; `gaps` says whether some rows have a synthetic label."""
        objective, mechanism = self._objective, self.mechanism
        if gaps and isinstance(mechanism, Gaussian) and mechanism.classes:
            problem = "Gaussian noise would tell which labels are synthetic"
            raise ConfigError(f"{problem}; use the mechanism 'randomised-response'")
        fitting = [each for each in self.losses if not gaps or each != "unbiased"]
        known = objective.calibration
        if known is not None:  # it says already whether the loss or the prediction
            fitting = ["forward" if known.when == "tr" else "plain"]
        if loss not in fitting and "auto" in (loss, self.privacy.loss):
            loss = DEFAULT_LOSS if DEFAULT_LOSS in fitting else fitting[0]
        if loss not in fitting:
            problem = f"the loss '{loss}' of private labels does not fit here"
            raise ConfigError(f"{problem}; use {', '.join(fitting)}")
        self.loss, self.soft = loss, None
        objective.label_loss = loss
        if isinstance(mechanism, Gaussian) and objective.takes_shares:
            self.soft = self._noisy
        elif loss == "unbiased":
            self.soft = self._shares()
        if objective.calibrates and mechanism is not None:
            objective.calibration = self._calibration(known)

    def _shares(self) -> Tensor | None:
        """Return class shares whose mean over the noise is the label, if there are."""
        mechanism = self.mechanism
        if isinstance(mechanism, Gaussian) and mechanism.classes:
            return self._noisy
        if not isinstance(mechanism, RandomizedResponse) or not mechanism.invertible:
            return None
        inverse = torch.linalg.inv(mechanism.channel).to(self._noisy.device)
        soft: Tensor = inverse[self._noisy.long()].float()
        return soft if mechanism.classes > 2 else soft[:, 1]

    def validation(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the labels that choices are made by, and their class shares."""
        shares = self._shares()
        return self.used[rows].cpu(), None if shares is None else shares[rows]

    def _calibration(self, known: Calibration | None) -> Calibration | None:
        """Return what turns predictions into those of true labels, if it is needed."""
        mechanism, forward = self.mechanism, self.loss == "forward"
        none = torch.zeros(int(getattr(self._objective, "classes", 2)))
        known = known or Calibration("tr" if forward else "te", 1.0, none)
        if isinstance(mechanism, RandomizedResponse) and self.loss != "unbiased":
            return replace(known, channel=mechanism.channel)
        if isinstance(mechanism, Gaussian) and forward:
            distance = 2.0 if mechanism.classes == 2 else 1.0
            return replace(known, scale=1.0 / (distance * mechanism.sigma**2))
        return known if known.weight < 1.0 else None
