"""The strategy that swaps embeddings for gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO
from pathlib import Path
from typing import Any, Literal, get_args

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.alignment import DEFAULT_GROUP
from flower_vfl.errors import ConfigError, PartyError, unknown_name
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.aggregation import AGGREGATIONS
from flower_vfl.transform import GradientTransform

from .alignment import RELAY_BYTES, AlignmentPlan
from .messenger import Messenger
from .rounds import VerticalRounds
from .settings import (
    log_settings,
    make_config,
    not_negative,
    not_used,
    rates_by_party,
    transform_list,
)
from .setup import Participants, setup
from .state import VerticalResult
from .stopping import EarlyStopping
from .tracking import Tracker
from .training import Training

Placement = Literal["strategy", "label"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


class VerticalStrategy(VerticalRounds):
    """Train a model that is split between a label party and passive parties.

    A round is an epoch. In each step every passive party gets the gradient of the step
    before and returns the embedding of the next batch; the label party gets the
    embeddings and returns one gradient per passive party.

    Parameters
    ----------
    batch_size : int (default: 256)
        Rows of a training batch; 0 for all training rows at once.
    seed : int (default: 0)
        Decides batches, splits, dropout and everything else that is random.
    aggregation : str | None (default: None)
        ``"concat"``, ``"sum"``, ``"mean"``, ``"max"`` or ``"product"``; None leaves it
        to the label party, which may have a module of its own for it.
    learning_rate : float | Mapping[str, float] | None (default: None)
        For all parties, or by party name with ``"*"`` for the others; None keeps what
        the parties' optimizers say.
    test_fraction, valid_fraction : float (default: 0.2, 0.0)
        Held-out shares, where the parties bring no split of their own.
    evaluate_every : int (default: 1)
        Epochs between evaluations; 0 for none. The last epoch is always evaluated.
    early_stopping : EarlyStopping | None (default: None)
        Stop when the validation rows no longer improve.
    transforms : Sequence[GradientTransform] | GradientTransform | str (default: ())
        Defenses, applied in order to every gradient before it leaves for its party; or
        one as a config string, e.g. ``"marvell:s=4"``.
    placement : Literal["strategy", "label"] (default: "strategy")
        Where they run: here, which needs a label party that trusts the server, or at
        the label party, before anything leaves it.
    noise_seed : int | None (default: None)
        What their noise is drawn from. None draws a secret for every run. A number
        makes runs repeatable, for simulations: a party that knows it can subtract the
        noise. A label party that does not trust the server does not take it.
    leakage : Leakage | None (default: None)
        Attacks on every gradient that leaves, measured where the defense runs, or at
        the label party where there is none; and a limit on what they may find.
    checkpoint_every : int (default: 0)
        Steps between checkpoints at every party; 0 for none.
    keep_final : bool (default: False)
        Whether every party keeps a checkpoint ``"final"`` at the end.
    state_dir : str | Path | None (default: None)
        Where the strategy keeps its own part of every checkpoint.
    parties : int | None (default: None)
        Number of parties to wait for, the label party included.
    retries : int (default: 1)
        How often a request without a reply is sent again.
    threads : int (default: 0)
        Number of torch threads of every party; 0 leaves it alone. Sums depend on it, so
        runs on different engines are equal to the last bit only if it is the same.
    evaluation_rows : int (default: 8192)
        Rows that travel in one message of an evaluation.
    progress : bool | None (default: None)
        Whether a progress bar is shown; None shows it on a terminal.
    alignment : str (default: "none")
        ``"psu"`` trains on the private union of the parties' ids, ``"psi"`` on their
        intersection; ``"none"`` where all have the same rows.
    group : str (default: "ristretto255")
        The group that alignment computes in, one of `flower_vfl.alignment.GROUPS`.
    padding : int (default: 0)
        Dummy ids of each party, to blur the size of the intersection.
    relay_bytes : int (default: 16 MiB)
        Most bytes of lists in one message of the alignment.
    trackers : Iterable[Tracker] (default: ())
        Who is told what every step and every epoch measured, such as
        :class:`flower_vfl.strategies.TensorBoard`.
    notes : Mapping[str, Any] | None (default: None)
        What they are to show beside these settings, such as the name of the data.
    """

    def __init__(
        self,
        batch_size: int = 256,
        seed: int = 0,
        aggregation: str | None = None,
        learning_rate: float | Mapping[str, float] | None = None,
        test_fraction: float = 0.2,
        valid_fraction: float = 0.0,
        evaluate_every: int = 1,
        early_stopping: EarlyStopping | None = None,
        transforms: Sequence[GradientTransform] | GradientTransform | str = (),
        placement: Placement = "strategy",
        noise_seed: int | None = None,
        leakage: Leakage | None = None,
        checkpoint_every: int = 0,
        keep_final: bool = False,
        state_dir: str | Path | None = None,
        parties: int | None = None,
        retries: int = 1,
        threads: int = 0,
        evaluation_rows: int = 8192,
        progress: bool | None = None,
        alignment: str = "none",
        group: str = DEFAULT_GROUP,
        padding: int = 0,
        relay_bytes: int = RELAY_BYTES,
        trackers: Iterable[Tracker] = (),
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        if aggregation is not None and aggregation not in AGGREGATIONS:
            raise unknown_name("aggregation", aggregation, AGGREGATIONS)
        not_negative(
            batch_size=batch_size,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            retries=retries,
            threads=threads,
            evaluation_rows=evaluation_rows,
            noise_seed=noise_seed or 0,
        )
        if early_stopping is not None and not evaluate_every:
            raise ConfigError("early stopping needs evaluations: set evaluate_every")
        self.batch_size = batch_size
        self.seed = seed
        self.aggregation = aggregation
        self.rates = rates_by_party(learning_rate)
        self.test_fraction, self.valid_fraction = test_fraction, valid_fraction
        self.evaluate_every = evaluate_every
        self.early_stopping = early_stopping
        self.transforms = transform_list(transforms)
        if placement not in PLACEMENTS:
            raise unknown_name("placement", placement, PLACEMENTS)
        self.placement: Placement = placement
        self.noise_seed = noise_seed
        self.leakage = leakage
        self.checkpoint_every = checkpoint_every
        self.keep_final = keep_final
        self.state_dir = state_dir
        self.parties = parties
        self.retries = retries
        self.threads = threads
        self.evaluation_rows = evaluation_rows
        self.progress = progress
        self.alignment = AlignmentPlan(alignment, group, padding, relay_bytes, progress)
        self.trackers = list(trackers)
        self.notes = dict(notes or {})

    def summary(self) -> None:
        """Log the settings."""
        log_settings(self)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        resume: bool = False,
    ) -> VerticalResult:
        """Train, and return what was measured.

        Started again on the same grid, training goes on from the weights that it
        reached; make a new grid to begin anew.

        Parameters
        ----------
        grid : Grid
            Any Flower grid whose nodes run a ``vertical_client_app``.
        initial_arrays : ArrayRecord | None (default: None)
            Must be None or empty: models stay with the parties that own them.
        num_rounds : int (default: 3)
            Number of epochs.
        timeout : float (default: 3600)
            Seconds to wait for a party's reply.
        train_config, evaluate_config : ConfigRecord | None (default: None)
            Must be None or empty: parties are configured by this strategy.
        evaluate_fn : Callable | None (default: None)
            Called after the run for every evaluated epoch, with no arrays.
        resume : bool (default: False)
            Continue from the newest checkpoint that every party has.

        Returns
        -------
        VerticalResult
            Flower's result: training and evaluation metrics by epoch. Its arrays are
            empty, because no model leaves its party. What defenses report about a
            party is in ``series``, step by step.
        """
        not_used(
            initial_arrays=initial_arrays,
            train_config=train_config,
            evaluate_config=evaluate_config,
        )
        if num_rounds < 1:
            raise ConfigError(f"num_rounds must be at least 1, got {num_rounds}")
        log(INFO, "Starting %s:", type(self).__name__)
        self.summary()
        started = time.time()
        training = self.connect(grid, num_rounds, timeout, resume)
        label = training.participants.label.name
        if not training.participants.sizes["train"]:
            remedy = "Make the held-out parts smaller"
            raise PartyError(label, "has no training rows", remedy)
        if resume:
            training.resume()
        state = training.run()
        result = VerticalResult.of(state)
        if evaluate_fn is not None:
            for epoch in state.evaluate:
                metrics = evaluate_fn(epoch, ArrayRecord())
                if metrics is not None:
                    result.evaluate_metrics_serverapp[epoch] = metrics
        log(INFO, "Finished in %.2f s", time.time() - started)
        return result

    def connect(
        self,
        grid: Grid,
        num_rounds: int = 1,
        timeout: float = 3600,
        resume: bool = False,
    ) -> Training:
        """Greet the parties of a grid and agree on the terms, without training."""
        messenger = Messenger(grid, timeout, self.retries)
        participants = self.meet(messenger, reuse=resume)
        if self.early_stopping is not None and not participants.sizes["valid"]:
            raise ConfigError(
                "early stopping looks at validation rows and there are none; set "
                "valid_fraction, or give every party a split with VALID rows"
            )
        self._training = Training(self, messenger, participants, num_rounds)
        return self._training

    def meet(self, messenger: Messenger, reuse: bool = True) -> Participants:
        """Hold the hello with the nodes that a messenger reaches."""
        messenger.wait_for_nodes(self.parties)
        plan, threads, terms = self.alignment, self.threads, make_config(self)
        return setup(messenger, terms, self.rates, threads, plan, reuse)
