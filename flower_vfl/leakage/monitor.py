"""Leakage as a training metric: attacks on every gradient that leaves, and a limit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from logging import WARNING
from typing import Any

from flwr.supercore import log
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks.membership import membership_aucs
from flower_vfl.leakage.attacks.success import direct_success
from flower_vfl.objectives import Task

from .meter import LeakageMeter
from .settings import Leakage as Leakage

# Centers of the batch itself find a leak even in noise: such a limit would never hold.
FOR_A_LIMIT = ("norm", "cosine", "mean:held_out=true")
LEAK, FLIPPED, LIMIT = "leak", "leak_flipped", "leak_limit"
LATE = "late_"  # before the name of what the step before measured
DIRECT_SUCCESS = "success_direct"
MEMBER = "member_"
MEMBER_GRADIENT, MEMBER_EMBEDDING = f"{MEMBER}spectral", f"{MEMBER}embedding"


class LeakageMonitor:
    """Measures every batch of gradients that leaves."""

    def __init__(self, settings: Leakage, task: Task) -> None:
        self.settings = settings
        attacks = settings.attacks or None
        if attacks is None and settings.limit is not None and task != "regression":
            attacks = FOR_A_LIMIT
        if settings.membership_only:
            attacks = ()
        wider = settings.layers or settings.coalitions
        names = [text.partition(":")[0] for text in attacks or ()]
        self._reads_labels = "direct" in names and task != "regression"
        if wider and "direct" in names and task != "regression":
            raise ConfigError(
                "the direct attack reads one party's summed logits; measure it without "
                "layers and coalitions"
            )
        self.meter = LeakageMeter(attacks, task, settings.baseline, keep=False)
        self._recent: dict[str, deque[float]] = {}
        self._late: Future[dict[str, float]] | dict[str, float] = {}
        self._worker: ThreadPoolExecutor | None = None

    def measure_late(
        self,
        gradients: Mapping[str, Tensor],
        clean: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        real: Tensor | None = None,
    ) -> dict[str, float]:
        """Return what the step before measured, and measure this one meanwhile.

        A limit has to act before anything else leaves: with one, this step is waited
        for.
        """
        found = self.outstanding()
        if self.settings.limit is not None:
            return found | self.measure(gradients, clean, labels, step, real)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "leakage")
        given = dict(gradients), dict(clean), labels, step, real
        self._late = self._worker.submit(self.measure, *given)
        return found

    def outstanding(self) -> dict[str, float]:
        """Wait for what :meth:`measure_late` has begun; return it, named as there."""
        found = self._wait()
        self._late = {}
        return {f"{LATE}{name}": value for name, value in found.items()}

    def _wait(self) -> dict[str, float]:
        late = self._late
        return late if isinstance(late, dict) else late.result()

    def measure(
        self,
        gradients: Mapping[str, Tensor],
        clean: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        real: Tensor | None = None,
    ) -> dict[str, float]:
        """Return the leak AUC of every attack on what each party gets."""
        if not gradients or step % self.settings.every:
            return {}
        metrics = {}
        if self.settings.membership and real is not None:
            metrics = self._members(gradients, real)
        if not self.meter.attacks:
            return metrics
        if real is not None:
            gradients = {name: part[real] for name, part in gradients.items()}
            clean = {name: part[real] for name, part in clean.items()}
            labels = labels[real]
        together = self._coalitions(gradients)
        found = self.meter.pairs(gradients, labels, step, clean, coalitions=together)
        for party, values in found.items():
            for attack, (raw, flipped) in values.items():
                metrics[f"{LEAK}_{attack}/{party}"] = raw
                metrics[f"{FLIPPED}_{attack}/{party}"] = flipped
        if self._reads_labels:
            for party, gradient in gradients.items():
                success = direct_success(gradient, labels)
                if not math.isnan(success):
                    metrics[f"{DIRECT_SUCCESS}/{party}"] = success
        if self.settings.limit is not None:
            metrics |= self._exceeded(metrics, step)
        return metrics

    def measure_layers(
        self, gradients: Mapping[str, Tensor], labels: Tensor, step: int
    ) -> dict[str, float]:
        """Return the leak AUC of every attack on every layer of one party's model."""
        return {
            f"{kind}_{attack}@{layer}": value
            for layer, gradient in gradients.items()
            if gradient.ndim and len(gradient) == len(labels)
            for attack, pair in self.meter.pairs({layer: gradient}, labels, step)[
                layer
            ].items()
            for kind, value in zip((LEAK, FLIPPED), pair, strict=True)
        }

    def _members(
        self, gradients: Mapping[str, Tensor], real: Tensor
    ) -> dict[str, float]:
        """Return how well each party tells synthetic labels from real ones."""
        return {
            f"{MEMBER_GRADIENT}{kind}/{name}": auc
            for name, part in gradients.items()
            for kind, auc in membership_aucs(part, real).items()
        }

    def _coalitions(self, gradients: Mapping[str, Tensor]) -> list[list[str]]:
        coalitions = []
        for text in self.settings.coalitions:
            members = self.settings.members(text, gradients)
            if len(present := [m for m in members if m in gradients]) > 1:
                coalitions.append(present)
        return coalitions

    def _exceeded(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the worst average of each party that exceeds the limit."""
        worst: dict[str, tuple[float, str]] = {}
        settings, regression = self.settings, self.meter.task == "regression"
        assert settings.limit is not None  # the caller looked
        for name, value in metrics.items():
            kind, _, party = name.partition("/")
            skipped = kind.startswith(FLIPPED) or not kind.startswith(LEAK)
            if skipped or party.endswith("/random"):
                continue
            recent = self._recent.setdefault(name, deque(maxlen=settings.window))
            # The sign of rho is that of whichever column was the best in a batch.
            recent.append(abs(value) if regression else value)
            # Flipped after the average: chance alone would add up otherwise.
            average = sum(recent) / len(recent)
            average = average if regression else max(average, 1.0 - average)
            if len(recent) == settings.window and average > settings.limit:
                attack = kind.removeprefix(f"{LEAK}_")
                worst[party] = max((average, attack), worst.get(party, (0.0, "")))
        for party, (average, attack) in worst.items():
            log(
                WARNING,
                "step %d: the %s attack on the gradients of '%s' has a leak AUC of "
                "%.3f over %d steps; the limit is %.3f",
                *(step, attack, party, average, settings.window, settings.limit),
            )
        if worst:
            self._recent.clear()  # said once per window; what follows is measured anew
        return {f"{LIMIT}/{party}": average for party, (average, _) in worst.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the values that the limit looks at, and what is outstanding."""
        recent = {name: list(values) for name, values in self._recent.items()}
        return {"recent": recent, "late": self._wait()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        window, recent = self.settings.window, state["recent"]
        self._recent = {name: deque(v, maxlen=window) for name, v in recent.items()}
        self._late = dict(state["late"])


def split_late(
    metrics: Mapping[str, float],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what the step before measured, without the mark, and all the rest."""
    late, now = {}, {}
    for name, value in metrics.items():
        if name.startswith(LATE):
            late[name.removeprefix(LATE)] = value
        else:
            now[name] = value
    return late, now
