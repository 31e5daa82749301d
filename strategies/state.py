"""Where a run is, what it has measured, and the result that a user gets."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from types import FrameType
from typing import Any, cast

import pandas as pd
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks.registry import OF_AN_EPOCH
from flower_vfl.leakage.auc import summarise
from flower_vfl.leakage.monitor import FLIPPED, LEAK, MEMBERSHIP
from flower_vfl.parties.base import Features
from flower_vfl.privacy.accountant import (
    NONE,
    RUN_AUC_BOUND,
    SUM_KL,
    Guarantee,
    guarantee_of_run,
)
from flower_vfl.records import Kind, Measurement, Records, from_columns, to_columns
from flower_vfl.transform import AUC_BOUND

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
Predictor = Callable[[str | Mapping[str, Features]], NDArray[Any]]
Summary = dict[str, dict[str, dict[str, float]]]  # by party, attack and statistic
_NOTHING = Guarantee(NONE)
# What a metric says: whether a batch was flipped, and whether its rows were random.
_LEAKS = {
    LEAK: ("raw", False),
    FLIPPED: ("flipped", False),
    f"{LEAK}_random": ("raw", True),
    f"{FLIPPED}_random": ("flipped", True),
}


@dataclass
class RunState:
    """Where a run is and what it has measured; kept with every checkpoint."""

    step: int = 0
    # Of the current epoch: metrics and rows of each step, rows by step, costs.
    steps: list[tuple[dict[str, float], float]] = field(default_factory=list)
    seconds: float = 0.0
    defense_seconds: float = 0.0
    traffic: int = 0
    rows: dict[int, float] = field(default_factory=dict)
    records: Records = field(default_factory=Records)
    probed: Records = field(default_factory=Records)  # by passive parties
    first: int = 0  # record of the current epoch
    train: dict[int, dict[str, float]] = field(default_factory=dict)  # by epoch
    evaluate: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    server: dict[int, dict[str, Any]] = field(default_factory=dict)  # of evaluate_fn
    best: float | None = None
    best_tag: str = ""
    stale: int = 0
    stopped: bool = False
    reason: str = ""
    label_losses: dict[str, float] = field(default_factory=dict)
    sum_kl: dict[str, float] = field(default_factory=dict)  # of Marvell, by party
    label_privacy: dict[str, Any] = field(default_factory=lambda: asdict(_NOTHING))

    def close_epoch(self, epoch: int, label: Guarantee, parties: Iterable[str]) -> None:
        """Average over the steps of an epoch, add up what they tell, begin the next."""
        sums: dict[str, float] = {}
        rows: dict[str, float] = {}
        named = [(name, m[name], size) for m, size in self.steps for name in m]
        names: dict[Kind, str] = {}
        for kind, step, value in self.records.rows(self.first):
            if step in self.rows:
                if kind not in names:
                    names[kind] = Measurement(kind[0], 0.0, 0, *kind[1:]).name
                named.append((names[kind], value, self.rows[step]))
        for name, value, size in named:
            sums[name] = sums.get(name, 0.0) + value * size
            rows[name] = rows.get(name, 0.0) + size
        metrics = {name: total / rows[name] for name, total in sums.items()}
        metrics |= {"seconds": self.seconds, "steps": len(self.steps)}
        metrics["bytes"] = self.traffic
        if self.defense_seconds:
            metrics["defense_seconds"] = self.defense_seconds
        self._add_divergences(parties)
        found = guarantee_of_run(label, self.sum_kl)
        self.label_privacy = asdict(found)
        if found.mechanism != NONE or found.others:
            metrics[RUN_AUC_BOUND] = found.auc_bound
        self.train[epoch] = metrics
        self.steps, self.rows, self.first = [], {}, len(self.records)
        self.seconds, self.traffic, self.defense_seconds = 0.0, 0, 0.0

    def _add_divergences(self, parties: Iterable[str]) -> None:
        """Add the largest divergence of the epoch's steps to those of each party.

        A row is in one batch of an epoch. A step without a bound has no limit.
        """
        known: dict[str, dict[tuple[str, int], float]] = {AUC_BOUND: {}, SUM_KL: {}}
        for (metric, party, *_), step, value in self.records.rows(self.first):
            if metric in known:
                known[metric][party, step] = value
        if not known[AUC_BOUND] and not self.sum_kl:
            return  # no Marvell so far
        before = math.inf if self.train and not self.sum_kl else 0.0
        for party in parties:
            steps = [(party, step) for step in self.rows]
            bounded = all(step in known[AUC_BOUND] for step in steps)
            spent = [known[SUM_KL].get(step, math.inf) for step in steps]
            largest = max(spent, default=math.inf) if bounded else math.inf
            self.sum_kl[party] = self.sum_kl.get(party, before) + largest

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        records, probed = to_columns(self.records), to_columns(self.probed)
        return {**vars(self), "records": records, "probed": probed}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RunState:
        """Return the state that :meth:`state_dict` saved."""
        steps = [(metrics, rows) for metrics, rows in state["steps"]]
        both = ("records", "probed")
        measured = {key: Records(from_columns(state[key])) for key in both}
        return cls(**{**state, "steps": steps, **measured})


@dataclass
class VerticalResult(Result):
    """Flower's result, and what was measured step by step.

    Parameters
    ----------
    records : list[Measurement] (default: [])
        What defenses, attacks and limits reported about each party at each step.
    evaluations : dict[int, dict[str, dict[str, float]]] (default: {})
        Metrics of each evaluation, by epoch and by split (``"valid"``, ``"test"``).
    stopped : str (default: "")
        Why the run ended before its last epoch; empty if it did not.
    label_privacy : dict[str, Any]
        What is promised about the labels over the whole training: ``mechanism``,
        ``epsilon``, ``delta``, ``auc_bound``, ``scope``, and ``others`` beside it.
    label_losses : dict[str, float] (default: {})
        What each loss of private labels reached on validation rows, if one was chosen.
    task : str (default: "")
        ``"binary"``, ``"multiclass"`` or ``"regression"``.
    predictor : Callable | None (default: None)
        What :meth:`predict` calls; :func:`flower_vfl.fit` sets it.

    Examples
    --------
    >>> from flower_vfl.records import Measurement
    >>> from flower_vfl.strategies import VerticalResult
    >>> leak = Measurement("leak", 0.75, step=1, party="passive-1", attack="norm")
    >>> VerticalResult(records=[leak]).leakage()["passive-1"]["norm"]["mean"]
    0.75
    """

    records: list[Measurement] = field(default_factory=list)
    evaluations: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    stopped: str = ""
    label_privacy: dict[str, Any] = field(default_factory=lambda: asdict(_NOTHING))
    label_losses: dict[str, float] = field(default_factory=dict)
    task: str = ""
    predictor: Predictor | None = field(default=None, compare=False)

    def predict(self, rows: str | Mapping[str, Features] = "test") -> NDArray[Any]:
        """Return predictions of the trained model, after :func:`flower_vfl.fit`.

        Of ``"train"``, ``"valid"`` or ``"test"``, or of new rows: features by party.
        """
        if self.predictor is None:
            remedy = "call predict of the strategy while its grid is open"
            raise ConfigError(f"only the result of flower_vfl.fit predicts; {remedy}")
        return self.predictor(rows)

    @property
    def history(self) -> pd.DataFrame:
        """The loss and the metrics of held-out rows, by epoch."""
        rows = {
            epoch: {"loss": metrics.get("loss", math.nan)}
            | split_metrics(self.evaluations.get(epoch, {}))
            for epoch, metrics in self.train_metrics_clientapp.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("epoch")

    @property
    def metrics(self) -> dict[str, float]:
        """The last loss, and the last metrics of held-out rows."""
        found = self.history.ffill().iloc[-1:].dropna(axis="columns")
        return {str(name): float(values.iloc[0]) for name, values in found.items()}

    @property
    def leaks(self) -> pd.DataFrame:
        """What each attack (columns) found about each party, 0.5 (ρ: 0) for nothing.

        The mean leak AUC a over all batches, or 1 − a if larger, or the mean |ρ|.
        """
        found = mean_leaks(self.table(), self.task == "regression")
        found = found[~found["random"] & (found["layer"] == "")]
        wide = found.pivot(index="party", columns="attack", values="leak")
        names = found["party"].unique(), found["attack"].unique()
        return wide.reindex(index=names[0], columns=names[1])

    def _about(self) -> list[str]:
        """Return what a reader wants to know first, in sentences."""
        epochs = self.train_metrics_clientapp.values()
        numbers = ", ".join(f"{name} {x:.4f}" for name, x in self.metrics.items())
        lines = [f"{len(epochs)} epochs: {numbers}"]
        if self.stopped:
            lines.append(f"Stopped: {self.stopped}")
        leaks = self.leaks.melt(ignore_index=False).reset_index()
        for _, worst in leaks.nlargest(1, "value").iterrows():
            where = f"{worst['attack']} at {worst['party']}"
            lines.append(f"Largest leak: {worst['value']:.3f} ({where})")
        lines.append(f"Labels: {Guarantee.from_dict(self.label_privacy).sentence}")
        seconds = sum(cast(float, each.get("seconds", 0.0)) for each in epochs)
        return [*lines, f"Training time: {seconds:.1f} s"]

    def __repr__(self) -> str:
        return "\n".join(["VerticalResult", *(f"  {line}" for line in self._about())])

    def _repr_html_(self) -> str:
        """Show the result in a notebook: metrics by epoch, leaks, the guarantee."""
        what = "|ρ|" if self.task == "regression" else "leak AUC"
        nothing = "0" if self.task == "regression" else "0.5"
        about = f"Mean {what} over all batches ({nothing}: nothing leaks)"
        html = []
        for title, table in (("Metrics by epoch", self.history), (about, self.leaks)):
            if len(table):
                head = str(table.index.name)  # in one row with the columns
                table = table.rename_axis(index=None, columns=head).map("{:.4f}".format)
                html.append(f"<p>{title}</p>{table.to_html(max_rows=10, border=0)}")
        html += [f"<p>{escape(line)}</p>" for line in self._about()[1:]]
        return "".join(html)

    def table(self) -> pd.DataFrame:
        """Return the records: metric, party, attack, layer, step, value."""
        return pd.DataFrame(to_columns(self.records))

    def leakage(self) -> Summary:
        """Return what score attacks found, by party and attack.

        Keys are ``mean``, ``last``, ``max`` and ``q95`` over the batches, the same with
        ``flipped_`` in front, and ``batches``. An attack on a layer of a bottom model
        is called ``attack@layer``, the random gradients of a party ``party/random``.
        """
        kinds = [(LEAK, "", ""), (FLIPPED, "flipped_", "")]
        kinds += [(f"{metric}_random", mark, "/random") for metric, mark, _ in kinds]
        return self._summary(*kinds)

    def membership(self) -> Summary:
        """Return how well synthetic rows were told from real ones, by party and attack.

        ``spectral`` is what the party could tell from its gradients about the label
        party's rows, ``embedding`` what the label party could tell about the party's;
        ``_sides`` marks the attack on sides of the mean. Keys are as in `leakage`.
        """
        return self._summary((MEMBERSHIP, "", ""))

    def _summary(self, *kinds: tuple[str, str, str]) -> Summary:
        """Summarise metrics, each with a prefix of keys and a suffix of parties."""
        found: Summary = {}
        for metric, mark, about in kinds:
            series: dict[tuple[str, str], list[float]] = {}
            for each in self.records:
                if each.metric == metric:
                    layer = f"@{each.layer}" if each.layer else ""
                    key = each.party, f"{each.attack}{layer}"
                    series.setdefault(key, []).append(each.value)
            for (party, attack), values in series.items():
                entry = found.setdefault(f"{party}{about}", {}).setdefault(attack, {})
                entry |= {f"{mark}{k}": v for k, v in summarise(values).items()}
                entry["batches"] = len(values)
        return found

    @classmethod
    def of(cls, state: RunState, task: str) -> VerticalResult:
        """Return the result of a run."""
        result = cls(records=[*state.records, *state.probed], task=task)
        result.evaluations, result.stopped = state.evaluate, state.reason
        privacy, losses = state.label_privacy, state.label_losses
        result.label_privacy, result.label_losses = privacy, losses
        for epoch, metrics in state.train.items():
            result.train_metrics_clientapp[epoch] = MetricRecord(dict(metrics))
        for epoch, found in state.server.items():
            result.evaluate_metrics_serverapp[epoch] = MetricRecord(found)
        for epoch, splits in state.evaluate.items():
            record = MetricRecord({**split_metrics(splits)})
            result.evaluate_metrics_clientapp[epoch] = record
        return result


def of_an_epoch(attacks: pd.Series[str]) -> pd.Series[bool]:
    """Return which attacks look at all rows of an epoch."""
    return attacks.astype("str").str.split(":").str[0].isin(OF_AN_EPOCH)


def mean_leaks(
    records: pd.DataFrame, regression: bool | pd.Series[bool], *run: str
) -> pd.DataFrame:
    """Return the leak of every attack on every party, 0.5 (ρ: 0) where nothing leaks.

    Records of several runs have a column `run`; `regression` says which are ones.
    """
    found = records[records["metric"].isin(_LEAKS)]
    last = found.groupby([*run, "attack"])["step"].transform("max")
    found = found[~of_an_epoch(found["attack"]) | (found["step"] == last)]
    kinds = found["metric"].map(_LEAKS).astype(object)  # also where there are none
    found = found.assign(kind=kinds.str[0], random=kinds.str[1].astype(bool))
    by = [*run, "attack", "layer", "party", "random"]
    means = found.groupby([*by, "kind"], sort=False)["value"].mean()
    wide = means.unstack("kind", sort=False).reindex(columns=["raw", "flipped"])
    wide = wide.dropna(subset="raw").reset_index()
    values = pd.Series(regression, wide.index if not run else None)
    if run:
        values = wide[run[0]].map(values).eq(True)
    leak = wide["raw"].clip(lower=1.0 - wide["raw"]).mask(values, wide["flipped"])
    return wide.assign(leak=leak)


def split_metrics(splits: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several splits, named ``split_metric``."""
    return {
        f"{split}_{name}": value
        for split, metrics in splits.items()
        for name, value in metrics.items()
    }


@contextmanager
def interruptible(at_once: bool = False) -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C, so that a run ends between two steps; it is never lost."""
    hit = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield hit.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        again = hit.is_set()
        hit.set()
        if again or at_once:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield hit.is_set
    finally:
        signal.signal(signal.SIGINT, before)
        if hit.is_set():  # also after an error, and after the last step
            raise KeyboardInterrupt
