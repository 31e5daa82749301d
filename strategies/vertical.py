"""The strategy that swaps embeddings for gradients."""

import time
from collections.abc import Iterable, Mapping
from logging import INFO
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError, PartyError, unknown_name
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.aggregation import AGGREGATIONS
from flower_vfl.parties.local_updates import LocalUpdates
from flower_vfl.protocol.codecs import Compression
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.protocol.messages import Verb, to_tensor
from flower_vfl.strategies.defenses.registry import Defense, DefenseLike

from .alignment import Alignment
from .checkpoints import Checkpoints
from .evaluation import EarlyStopping, ask_about, choose_label_loss, serve
from .messenger import Messenger
from .setup import check_sealed, check_table, learning_rates, setup
from .state import EvaluateFunction, VerticalResult
from .tracking import Tracker
from .training import Training


class VerticalStrategy(Strategy):
    """Trains one model over parties that hold different columns of the same rows.

    Parameters
    ----------
    batch_size : int (default: 256)
        Rows of a training batch; 0 for all training rows in one batch.
    seed : int (default: 0)
        Decides splits, batches and the parties' random states.
    aggregation : str | None (default: None)
        How embeddings are joined: ``"concat"``, ``"sum"``, ``"mean"``, ``"max"`` or
        ``"product"``; None leaves it to the label party.
    learning_rate : float | Mapping[str, float] | None (default: None)
        For all parties, or by name (``"*"`` for the others); None keeps those of the
        parties' optimizers.
    test_fraction, valid_fraction : float (defaults: 0.2, 0.0)
        Held-out shares of the rows, where the parties bring no split of their own.
    evaluate_every : int (default: 1)
        Epochs between evaluations on the held-out rows; 0 for none. The last epoch is
        always evaluated.
    early_stopping : EarlyStopping | None (default: None)
        Stop when the validation rows no longer improve.
    defense : Defense | str | GradientTransform | Sequence[GradientTransform]
        What is done to every gradient before it leaves, e.g. ``"marvell:s=4"`` or
        ``Defense("marvell:s=4", at="label")``.
    leakage : Leakage | None (default: None)
        Attacks on every gradient that leaves, run where the defense runs or at the
        label party, and a limit on what they may find.
    compression : Compression | str (default: "")
        Codec of embeddings and gradients, such as ``"int8"``, or a
        :class:`flower_vfl.strategies.Compression` with one for each.
    local_steps : int | LocalUpdates (default: 1)
        Updates of every party for each exchanged batch; all but the first use cached
        embeddings and gradients (:class:`flower_vfl.strategies.LocalUpdates`).
    alignment : Alignment | str (default: "none")
        How the parties' ids are aligned before training: ``"psu"``, ``"psi"``,
        ``"none"``, or ``Alignment("psu", padding=100)``.
    pipeline : int (default: 0)
        Batches of the same epoch that the passive parties embed ahead, so that a step
        need not wait for two round trips: with the weights of step s - 1 - `pipeline`
        and a prediction of the missing updates. 0 trains exactly.
    sealed : bool (default: False)
        Whether embeddings and gradients are encrypted between the parties, so that the
        server cannot read them. Needs pinned keys, and a defense at the label party.
    checkpoints : Checkpoints (default: Checkpoints())
        When and where the run is saved.
    parties : int | None (default: None)
        Number of parties to wait for, the label party included.
    nodes : Mapping[str, str] | None (default: None)
        Role and node of every party in a deployment, by the node's name or public key
        at the SuperLink: ``{"bank": "label bank-node", "shop": "passive shop-node"}``.
        Without it every node names itself.
    retries : int (default: 1)
        How often a request without a reply is sent again.
    threads : int (default: 0)
        Number of torch threads of every party, on which floating-point sums depend;
        0 leaves it alone.
    evaluation_rows : int (default: 8192)
        Rows that travel in one message of an evaluation.
    progress : bool | None (default: None)
        Whether a progress bar is shown; None shows it on a terminal.
    trackers : Iterable[Tracker] (default: ())
        Where metrics go during the run: :class:`flower_vfl.strategies.TensorBoard`.
    notes : Mapping[str, Any] | None (default: None)
        What trackers show beside these settings, such as the name of the data.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
    >>> from flower_vfl import VerticalStrategy
    >>> x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    >>> label = LabelParty((x.sum(1) > 0).long(), CrossEntropy(nn.Linear(4, 1)))
    >>> strategy = VerticalStrategy(batch_size=32, progress=False)
    >>> with in_process([label, PassiveParty(x, nn.Linear(6, 4))]) as grid:
    ...     result = strategy.start(grid, num_rounds=2)
    >>> sorted(result.train_metrics_clientapp)
    [1, 2]
    """

    _training: Training | None = None

    def __init__(
        self,
        *,
        batch_size: int = 256,
        seed: int = 0,
        aggregation: str | None = None,
        learning_rate: float | Mapping[str, float] | None = None,
        test_fraction: float = 0.2,
        valid_fraction: float = 0.0,
        evaluate_every: int = 1,
        early_stopping: EarlyStopping | None = None,
        defense: Defense | DefenseLike = (),
        leakage: Leakage | None = None,
        compression: Compression | str = "",
        local_steps: int | LocalUpdates = 1,
        alignment: Alignment | str = "none",
        pipeline: int = 0,
        sealed: bool = False,
        checkpoints: Checkpoints | None = None,
        parties: int | None = None,
        nodes: Mapping[str, str] | None = None,
        retries: int = 1,
        threads: int = 0,
        evaluation_rows: int = 8192,
        progress: bool | None = None,
        trackers: Iterable[Tracker] = (),
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        if aggregation is not None and aggregation not in AGGREGATIONS:
            raise unknown_name("aggregation", aggregation, AGGREGATIONS)
        if early_stopping is not None and not evaluate_every:
            raise ConfigError("early stopping needs evaluations: set evaluate_every")
        self.batch_size, self.seed, self.aggregation = batch_size, seed, aggregation
        self.rates = learning_rates(learning_rate)
        self.test_fraction, self.valid_fraction = test_fraction, valid_fraction
        self.evaluate_every, self.early_stopping = evaluate_every, early_stopping
        self.defense = defense if isinstance(defense, Defense) else Defense(defense)
        self.leakage = leakage
        if isinstance(compression, str):
            compression = Compression(compression, compression)
        if isinstance(local_steps, int):
            local_steps = LocalUpdates(local_steps)
        self.compression, self.local_updates = compression, local_steps
        if isinstance(alignment, str):
            alignment = Alignment(alignment)
        self.alignment, self.pipeline, self.sealed = alignment, pipeline, sealed
        if sealed:
            check_sealed(self.defense, leakage)
        self.checkpoints = checkpoints or Checkpoints()
        self.parties, self.nodes = parties, check_table(nodes or {})
        self.retries, self.threads = retries, threads
        self.evaluation_rows, self.progress = evaluation_rows, progress
        self.trackers, self.notes = list(trackers), dict(notes or {})
        sizes = ("batch_size", "evaluate_every", "evaluation_rows")
        for name in (*sizes, "retries", "threads", "pipeline"):
            if (number := getattr(self, name)) < 0:
                raise ConfigError(f"{name} must not be negative, got {number}")

    def summary(self) -> None:
        """Log the settings."""
        fraction = f"test {self.test_fraction:g}, valid {self.valid_fraction:g}"
        names = ", ".join(type(t).__name__ for t in self.defense.transforms)
        defenses = f"{names} (at the {self.defense.at})" if names else "none"
        if names and self.defense.noise_seed is not None:
            defenses += ", noise known to whoever knows noise_seed"
        log(INFO, "\t├──> batch size: %s, seed: %d", self.batch_size, self.seed)
        log(INFO, "\t├──> aggregation: %s", self.aggregation or "the label party's")
        log(INFO, "\t├──> alignment: %s", self.alignment.method)
        log(INFO, "\t├──> sealed: %s", "yes" if self.sealed else "no")
        log(INFO, "\t├──> codecs: %s", str(self.compression) or "none")
        log(INFO, "\t├──> held out (unless the data says): %s", fraction)
        log(INFO, "\t└──> defenses: %s", defenses)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
        *,
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
        evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] | None
            Called after each evaluated epoch, with its number and no arrays.
        resume : bool (default: False)
            Continue from the newest checkpoint that every party has.

        Returns
        -------
        VerticalResult
            Flower's result: training and evaluation metrics by epoch. Its arrays are
            empty, because no model leaves its party. What defenses and attacks report
            about each party at each step is in ``records``.
        """
        if initial_arrays or train_config or evaluate_config:
            raise ConfigError(
                "leave initial_arrays, train_config and evaluate_config empty: parties "
                "keep their models, and settings are arguments of VerticalStrategy"
            )
        if num_rounds < 1:
            raise ConfigError(f"num_rounds must be at least 1, got {num_rounds}")
        log(INFO, "Starting %s:", type(self).__name__)
        self.summary()
        started = time.time()
        training = self.connect(grid, num_rounds, timeout, resume=resume)
        label = training.participants.label
        if not training.participants.sizes["train"]:
            remedy = "Make the held-out parts smaller"
            raise PartyError(label.name, "has no training rows", remedy)
        if resume:
            training.resume()
        if not training.state.step:
            choose_label_loss(training)
        training.evaluate_fn = evaluate_fn
        result = VerticalResult.of(training.run(), label.task)
        log(INFO, "Finished in %.2f s", time.time() - started)
        return result

    def connect(
        self,
        grid: Grid,
        num_rounds: int = 1,
        timeout: float = 3600,
        *,
        resume: bool = False,
    ) -> Training:
        """Set up the parties without training; `resume` reuses their alignment."""
        messenger = Messenger(grid, timeout, self.retries)
        participants = setup(self, messenger, reuse=resume)
        if self.early_stopping is not None and not participants.sizes["valid"]:
            raise ConfigError(
                "early stopping needs validation rows, but there are none; set "
                "valid_fraction, or give every party a split with VALID rows"
            )
        self._training = Training(self, messenger, participants, num_rounds)
        return self._training

    def config(self) -> TrainingConfig:
        """Return what the parties are told, still without their names."""
        defense, noise_seed = self.defense, self.defense.noise_seed
        placed = defense.at if defense.transforms else ""
        return TrainingConfig(
            seed=self.seed,
            batch_size=self.batch_size,
            evaluation_rows=self.evaluation_rows,
            test_fraction=self.test_fraction,
            valid_fraction=self.valid_fraction,
            aggregation=self.aggregation or "",
            leakage="" if self.leakage is None else self.leakage.to_text(),
            sealed=self.sealed,
            pipeline=self.pipeline,
            compress_embeddings=self.compression.embeddings,
            compress_gradients=self.compression.gradients,
            local_steps=self.local_updates.steps,
            local_cache=self.local_updates.cache,
            local_threshold=self.local_updates.threshold,
            noise_seed="" if noise_seed is None else f"{noise_seed:x}",
            defended=placed,
            defense=defense.spec if placed == "label" else "",
        )

    def predict(self, split: str = "test") -> NDArray[Any]:
        """Return predictions for ``"train"``, ``"valid"`` or ``"test"``, in order."""
        replies = ask_about(self._running(), Verb.PREDICT, split)
        parts = [to_tensor(reply.arrays["predictions"]).numpy() for reply in replies]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)

    def serve(self, party: str, hide: int = 0) -> None:
        """Have the label party answer what a passive party asks.

        The party's node says what it asks about (``party.questions``, its own row
        numbers) and finds the predictions in ``party.answers``. Each row hides in a
        batch of `hide` rows; 0 sends embeddings alone, for one passive party and a
        label party without features. See :mod:`flower_vfl.protocol.serving`.
        """
        serve(self._running(), party, hide)

    def _running(self) -> Training:
        if self._training is None:
            raise ConfigError("call start or connect first: no party is known yet")
        return self._training

    def _not_in_rounds(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse Flower's loop over rounds: a step needs two rounds of messages."""
        remedy = "call VerticalStrategy.start(grid, num_rounds=epochs)"
        raise ConfigError(f"vertical training has no rounds like Flower's: {remedy}")

    configure_train = aggregate_train = _not_in_rounds
    configure_evaluate = aggregate_evaluate = _not_in_rounds
