"""Training of parties in this process with one call, for notebooks and scripts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from importlib import import_module
from logging import WARNING, getLogger
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.grids.in_process import in_process
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.base import Features, Party, as_tensors
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.specs import split_specs

from .defenses.registry import Defense, DefenseLike, Placement, build_defense
from .state import EvaluateFunction, VerticalResult
from .vertical import VerticalStrategy

_ROWS = 8192  # that are predicted at once


def fit(
    parties: Sequence[Party],
    *,
    defense: Defense | DefenseLike = "",
    audit: bool | str | Leakage = False,
    epochs: int = 10,
    batch_size: int = 64,
    learning_rate: float | Mapping[str, float] | None = None,
    seed: int | None = None,
    test_fraction: float = 0.2,
    valid_fraction: float = 0.0,
    evaluate_fn: EvaluateFunction | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> VerticalResult:
    """Train parties that are in this process, and return what was measured.

    The parties keep what they learn: called again, training goes on from there. Nobody
    has to trust a server, because there is none: a defense gets what it needs.

    Parameters
    ----------
    parties : Sequence[Party]
        One :class:`LabelParty` and at least one :class:`PassiveParty`.
    defense : Defense | str | GradientTransform | Sequence[GradientTransform]
        What is done to every gradient before it leaves, e.g. ``"marvell:auc=0.65"``.
    audit : bool | str | Leakage (default: False)
        Whether attacks run on every gradient that leaves: True for those that fit the
        task, ``"norm,cosine"`` for some, or a :class:`Leakage` with a limit.
    epochs : int (default: 10)
        Number of epochs.
    batch_size, learning_rate, test_fraction, valid_fraction
        As for :class:`VerticalStrategy`.
    seed : int | None (default: None)
        Makes a run repeatable, with the noise of its defense: whoever knows the seed
        can subtract that noise. None draws the noise from a secret.
    evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] | None
        Called after each epoch, as by Flower's strategies.
    progress : bool | None (default: None)
        Whether a progress bar is shown; None shows it in notebooks and terminals.
    **settings
        Further arguments of :class:`VerticalStrategy`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> import flower_vfl
    >>> from flower_vfl import CrossEntropy, LabelParty, PassiveParty
    >>> x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    >>> label = LabelParty((x.sum(1) > 0).long(), CrossEntropy(nn.Linear(4, 1)))
    >>> shop = PassiveParty(x, nn.Linear(6, 4), name="shop")
    >>> result = flower_vfl.fit([label, shop], audit="norm", epochs=2, progress=False)
    >>> result.predict("test").shape, result.predict({"shop": x[:5]}).shape
    ((40,), (5,))
    >>> list(result.leaks.columns)
    ['norm']
    """
    label = _label_party(parties)
    label.defense_policy.build = label.defense_policy.build or build_defense
    if not isinstance(defense, Defense):
        at: Placement = "strategy" if label.label_privacy is None else "label"
        defense = Defense(defense, at=at, noise_seed=seed)
    leakage = audit if isinstance(audit, Leakage) else None
    if leakage is None and audit:
        leakage = Leakage(tuple(split_specs(audit)) if isinstance(audit, str) else ())
    trackers = list(settings.pop("trackers", ()))
    if progress is not False and Console().is_jupyter:
        progress = False
        trackers.append(_NotebookProgress(epochs))
    strategy = VerticalStrategy(
        defense=defense,
        leakage=leakage,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed or 0,
        test_fraction=test_fraction,
        valid_fraction=valid_fraction,
        progress=progress,
        trackers=trackers,
        **settings,
    )
    logger = getLogger("flwr")
    level, trusted = logger.level, label.trust_server
    logger.setLevel(max(level, WARNING))
    label.trust_server = True  # the server is this process, which has all data anyway
    try:
        grid = in_process(parties)  # stays open, for predictions
        result = strategy.start(grid, num_rounds=epochs, evaluate_fn=evaluate_fn)
    finally:
        logger.setLevel(level)
        label.trust_server = trusted  # the party may be used elsewhere later
    by_name = {party.name: party for party in parties}
    result.predictor = partial(_predict, strategy, label, by_name)
    return result


def _label_party(parties: Sequence[Party]) -> LabelParty:
    """Return the one label party, or say which parties are needed."""
    labels = [party for party in parties if isinstance(party, LabelParty)]
    passive = [party for party in parties if isinstance(party, PassiveParty)]
    if len(labels) != 1 or not passive or len(labels) + len(passive) != len(parties):
        kinds = ", ".join(type(party).__name__ for party in parties) or "none"
        raise ConfigError(
            "fit takes a list of one LabelParty(labels, objective) and at least one "
            f"PassiveParty(features, model); got {kinds}"
        )
    return labels[0]


def _predict(
    strategy: VerticalStrategy,
    label: LabelParty,
    parties: Mapping[str, Party],
    rows: str | Mapping[str, Features],
) -> NDArray[Any]:
    """Return predictions for a split, or for new rows of every party."""
    if isinstance(rows, str):
        return strategy.predict(rows)
    wanted = {name: p for name, p in parties.items() if p.model is not None}
    if rows.keys() != wanted.keys():
        needed, given = ", ".join(wanted), ", ".join(rows)
        raise ConfigError(f"new rows are needed of {needed}; got {given}")
    held = {name: party.features for name, party in wanted.items()}
    try:
        for name, party in wanted.items():
            party.features = tuple(t.to(party.device) for t in as_tensors(rows[name]))
        counts = {name: len(party.features[0]) for name, party in wanted.items()}
        if len(set(counts.values())) != 1:
            raise ConfigError(f"the parties' new rows differ in number: {counts}")
        found = []
        passive = {n: p for n, p in wanted.items() if isinstance(p, PassiveParty)}
        for part in torch.split(torch.arange(min(counts.values())), _ROWS):
            embeddings = {
                n: p.embed_for_use(part.to(p.device)) for n, p in passive.items()
            }
            predicted = label.predict_rows(part.to(label.device), (), embeddings)
            found.append(predicted.cpu().numpy())
        return np.concatenate(found)
    finally:
        for name, features in held.items():
            wanted[name].features = features


class _NotebookProgress:
    """A progress bar in HTML: rich's needs ipywidgets in a notebook."""

    def __init__(self, epochs: int) -> None:
        self._epochs, self._epoch, self._shown = epochs, 0, 0.0
        self._known: dict[str, float] = {}
        ipython: Any = import_module("IPython.display")
        self._html = ipython.HTML
        self._display = ipython.display(ipython.HTML(), display_id=True)

    def _show(self) -> None:
        self._shown = time.monotonic()
        known = ", ".join(f"{name} {value:.4f}" for name, value in self._known.items())
        bar = f'<progress value="{self._epoch}" max="{self._epochs}"></progress>'
        text = f" epoch {self._epoch}/{self._epochs} {escape(known)}"
        self._display.update(self._html(bar + text))

    def begin(self, settings: Mapping[str, Any], step: int) -> None:
        self._show()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if time.monotonic() - self._shown > 0.5:
            self._known |= {"step": step, "loss": metrics.get("loss", np.nan)}
            self._show()

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self._epoch = epoch
        shown = {k: v for k, v in metrics.items() if k.startswith(("loss", "test_"))}
        self._known |= shown
        self._show()

    def end(self, reason: str) -> None:
        self._display.update(self._html(escape(reason)))
