"""What trainings can reveal about one label, and the file that adds it up.

The formulas are in docs/guarantees.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
from filelock import FileLock

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.parties.checkpoints import write_private
from flower_vfl.randomness import draw_secret

NONE, MARVELL, GAUSSIAN, LAPLACE = "none", "marvell", "gaussian", "laplace"
RESPONSE = "randomised-response"
SUM_KL = "sum_kl"  # metric of a step and a party: Marvell's divergence
RUN_AUC_BOUND = "run_auc_bound"  # metric of an epoch: the bound from the first one on
_LINES = 4000  # of a trade-off curve
_PROVEN = (
    "for every party, all of them together, the server and the trained model, over all "
    "epochs: two trainings that differ in the label of one row. Not for metrics of "
    "true labels that the label party reports, nor for what features tell about labels"
)
_ASSUMED = (
    "for one passive party alone, over all epochs, about the labels that Marvell gets, "
    "if its gradients are normal given the class and independent from epoch to epoch"
)


@dataclass(frozen=True)
class Guarantee:
    """What the labels of a run are protected by.

    Parameters
    ----------
    mechanism : str
        ``"randomised-response"``, ``"laplace"``, ``"gaussian"``, ``"marvell"`` or
        ``"none"``.
    epsilon : float | None (default: None)
        Of label differential privacy; None where there is none.
    delta : float (default: 0.0)
        Of label differential privacy.
    auc_bound : float (default: 1.0)
        Largest AUC with which anybody can tell two labels of a row apart.
    scope : str (default: "")
        For whom it holds, and under which assumptions.
    others : tuple[Guarantee, ...] (default: ())
        What else protects the labels.

    Examples
    --------
    >>> from flower_vfl.privacy import Guarantee
    >>> known = Guarantee("randomised-response", epsilon=1.1, auc_bound=0.75)
    >>> Guarantee.from_text(known.to_text()) == known
    True
    >>> Guarantee("none").sentence
    'no bound for the whole training'
    """

    mechanism: str
    epsilon: float | None = None
    delta: float = 0.0
    auc_bound: float = 1.0
    scope: str = ""
    others: tuple[Guarantee, ...] = ()

    @classmethod
    def of(cls, releases: Sequence[Release], delta: float = 0.0) -> Guarantee:
        """Return what holds for labels that were randomised before training."""
        names = dict.fromkeys(each.mechanism for each in releases)
        return cls(" + ".join(names), *compose(releases, delta), _PROVEN)

    def to_text(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Guarantee:
        """Return what :meth:`to_text` wrote; an empty text is no protection."""
        try:
            return cls.from_dict(json.loads(text)) if text else cls(NONE)
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"not a statement about label privacy: {error}") from None

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any] | None) -> Guarantee:
        """Return the guarantee of a result document; an old one has none."""
        if entries is None:
            return cls(NONE)
        others = tuple(map(cls.from_dict, entries.get("others", ())))
        found = cls(**{**entries, "others": others})
        numbers = [found.delta, found.auc_bound]
        if found.mechanism not in (NONE, MARVELL) or found.epsilon is not None:
            numbers.append(cast(float, found.epsilon))
        texts = all(isinstance(text, str) for text in (found.mechanism, found.scope))
        if not (texts and all(map(math.isfinite, numbers))):
            raise ConfigError("a statement about label privacy has unknown entries")
        return found

    @property
    def sentence(self) -> str:
        """The guarantee in words, with the others after it."""
        text, bound = "no bound for the whole training", f"{self.auc_bound:.3f}"
        if self.mechanism == MARVELL:
            text = "Marvell's bounds of single steps add up to none (too many epochs, "
            text += "or a batch without a bound, e.g. of one class)"
            if self.auc_bound < 1.0:
                text = "under Marvell's assumptions, no attack by a single passive "
                text += f"party exceeds an AUC of {bound} over all epochs"
        elif self.mechanism != NONE:
            text = f"{self.mechanism.replace('-', ' ')}, epsilon {self.epsilon:.3g}"
            text += f", delta {self.delta:.0e}" if self.delta else ""
            text += ": over the whole training, no attack can distinguish two possible "
            text += f"labels of a row with an AUC above {bound}"
        return "; ".join([text, *(each.sentence for each in self.others)])


@dataclass(frozen=True)
class Release:
    """What one set of draws reveals, in however many trainings it is used.

    Parameters
    ----------
    mechanism : str
        ``"randomised-response"``, ``"laplace"`` or ``"gaussian"``.
    epsilon : float | None (default: None)
        Of a mechanism that is not Gaussian.
    mu : float | None (default: None)
        Of a Gaussian mechanism: distance of two labels over the standard deviation.
    classes : int (default: 2)
        Number of classes; for the record, since two classes reveal most.
    delta : float (default: 0.0)
        The delta at which epsilon of a Gaussian mechanism is stated.
    draws : str (default: "")
        What else the draws depend on, e.g. a range or a prior.

    Examples
    --------
    >>> from flower_vfl.privacy import Release, compose
    >>> epsilon, delta, auc = compose([Release("gaussian", mu=1.0, delta=1e-5)])
    >>> print(f"{epsilon:.2f} {auc:.3f}")
    4.38 0.760
    """

    mechanism: str
    epsilon: float | None = None
    mu: float | None = None
    classes: int = 2
    delta: float = 0.0
    draws: str = ""

    def __post_init__(self) -> None:
        """Refuse a release that nothing is known about."""
        given = self.mu if self.mechanism == GAUSSIAN else self.epsilon
        what = "mu" if self.mechanism == GAUSSIAN else "epsilon"
        known = isinstance(given, int | float) and 0.0 <= given < math.inf
        require(known, what, "a number from 0", given)
        require(0.0 <= self.delta < 1.0, "delta", "from 0 and below 1", self.delta)
        check_name("mechanism", self.mechanism, (RESPONSE, LAPLACE, GAUSSIAN))

    @property
    def amount(self) -> float:
        """Mu of a Gaussian mechanism, epsilon of any other."""
        return float((self.mu if self.mechanism == GAUSSIAN else self.epsilon) or 0.0)


def compose(
    releases: Sequence[Release], delta: float = 0.0
) -> tuple[float, float, float]:
    """Return epsilon, delta and AUC bound of releases of the same labels together.

    One release, or Gaussian ones only, have a closed form. Others are composed by the
    package dp-accounting; randomised response counts as that of two classes, which no
    mechanism of its epsilon exceeds. Without a delta the epsilons add up.

    Parameters
    ----------
    releases : Sequence[Release]
        Their draws must be independent.
    delta : float (default: 0.0)
        Of the epsilon that is returned; 0 takes the largest of the releases.

    Examples
    --------
    >>> from flower_vfl.privacy import Release, compose
    >>> epsilon, delta, auc = compose([Release("randomised-response", epsilon=1.0)])
    >>> print(f"{epsilon} {delta} {auc:.3f}")
    1.0 0.0 0.731
    """
    delta = max([delta, *(each.delta for each in releases)])
    mus = [each.amount for each in releases if each.mechanism == GAUSSIAN]
    pure = [each for each in releases if each.mechanism != GAUSSIAN]
    if mus and not delta:
        raise ConfigError("a Gaussian mechanism needs a delta above 0, e.g. 1e-6")
    mu, total = math.hypot(*mus), sum(each.amount for each in pure)
    if not pure:
        return gaussian_epsilon(mu, delta), delta, math.erfc(-mu / 2.0) / 2.0
    if len(releases) > 1:
        return _composed(pure, mu, delta)
    is_laplace = pure[0].mechanism == LAPLACE
    auc = laplace_auc(total) if is_laplace else 1.0 / (1.0 + math.exp(-total))
    return total, 0.0, auc


def laplace_auc(epsilon: float) -> float:
    """Return the AUC between the ends of a range under Laplace noise."""
    return 1.0 - (2.0 + epsilon) * math.exp(-epsilon) / 4.0


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2.0))


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the δ of μ-GDP for an ε (Dong et al., corollary 1)."""
    first = _normal_cdf(mu / 2.0 - epsilon / mu)
    return first - math.exp(epsilon) * _normal_cdf(-mu / 2.0 - epsilon / mu)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the ε of μ-GDP for a δ; 0 if δ alone suffices."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    most = mu * mu / 2.0 + mu * math.sqrt(2.0 * math.log(1.0 / delta)) + 1.0
    return root(lambda e: gaussian_delta(e, mu) - delta, 0.0, most)


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function is 0, between two numbers."""
    from scipy.optimize import brentq  # a second, which few runs need

    return float(brentq(function, low, high))


def _composed(
    pure: Sequence[Release], mu: float, delta: float
) -> tuple[float, float, float]:
    """Compose releases by their privacy loss distributions."""
    try:
        from dp_accounting.pld import privacy_loss_distribution as pld
    except ImportError as error:
        remedy = "pip install 'flower-vfl[privacy]'"
        problem = "composing several releases of labels needs dp-accounting"
        raise ConfigError(f"{problem}: {remedy}") from error
    parts = [pld.from_gaussian_mechanism(1.0 / mu)] if mu else []
    for each in pure:
        if each.mechanism == LAPLACE:
            parts.append(pld.from_laplace_mechanism(1.0 / each.amount))
        else:
            kept = 2.0 / (1.0 + math.exp(each.amount))
            parts.append(pld.from_randomized_response(kept, 2))
    whole = reduce(lambda some, part: some.compose(part), parts)
    total = math.inf if mu else sum(each.amount for each in pure)
    epsilon = whole.get_epsilon_for_delta(delta) if delta else total
    reach = min(total, whole.get_epsilon_for_delta(1e-12))
    epsilons = np.linspace(0.0, reach, _LINES)
    deltas = np.array(whole.get_delta_for_epsilon(epsilons.tolist()))
    auc = min(_auc(epsilons, deltas), 1.0 / (1.0 + math.exp(-total)))
    return (epsilon, delta, auc) if epsilon < total else (total, 0.0, auc)


def _auc(epsilons: np.ndarray[Any, Any], deltas: np.ndarray[Any, Any]) -> float:
    """Return the AUC above the trade-off curve of symmetric (epsilon, delta) pairs."""
    # No test with false positives x misses less than 1 − δ − e^ε·x, or with both errors
    # exchanged; the largest of these lines is the curve.
    steep = np.exp(epsilons)
    slopes = np.concatenate([steep[::-1], 1.0 / steep[1:]])
    height = np.concatenate([(1.0 - deltas)[::-1], ((1.0 - deltas) / steep)[1:]])
    x = np.diff(height) / np.diff(slopes)  # where two neighbours meet
    y = height[:-1] - slopes[:-1] * x
    x = np.concatenate([[0.0], x, [height[-1] / slopes[-1]]])
    y = np.concatenate([height[:1], y, [0.0]])
    return float(1.0 - np.trapezoid(y, x))


def composed_auc(sum_kls: Iterable[float]) -> float:
    """Return Marvell's bound for independent gradients: their divergences add up."""
    total = math.fsum(sum_kls)
    return 0.5 + math.sqrt(total) / 2.0 - total / 8.0 if total < 4.0 else 1.0


def guarantee_of_run(label: Guarantee, sum_kls: Mapping[str, float]) -> Guarantee:
    """Return what the label party says, and Marvell's bound.

    `sum_kls` has sums of divergences by passive party, infinite for no bound.
    """
    if not sum_kls:
        return label
    bound = composed_auc([max(sum_kls.values())])
    marvell = Guarantee(MARVELL, auc_bound=bound, scope=_ASSUMED)
    if label.mechanism == NONE and bound < 1.0:
        return marvell
    return Guarantee(**{**vars(label), "others": (*label.others, marvell)})


class Ledger:
    """A file with the key of all draws, and every release of labels made with it.

    Only its owner can read it. Two processes may use it at once, and a crash leaves the
    old file or the new one. Whoever reads it can undo the draws.

    Parameters
    ----------
    path : Path | str
        The file; it is made when it is first used.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> from flower_vfl.privacy import Ledger, Release
    >>> ledger = Ledger(f"{mkdtemp()}/labels.json")
    >>> release = Release("randomised-response", epsilon=1.0)
    >>> for labels in ("digest of labels", "digest of labels", "digest of others"):
    ...     print(ledger.register(release, labels).epsilon)
    1.0
    1.0
    2.0
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()

    @property
    def key(self) -> int:
        """The key of all draws, of 256 bits."""
        with self._lock():
            content = self._read()
            self._write(content)
        return int(content["key"], 16)

    def register(
        self,
        release: Release,
        digest: str,
        note: bool = True,
        check: Callable[[Guarantee], None] = lambda found: None,
    ) -> Guarantee:
        """Return what holds after a release; with `note`, write down a new one.

        The keyed `digest` is of labels and ids: the same draws reveal nothing new. What
        `check` refuses is not written down, and nobody else writes in between.
        """
        with self._lock():
            content = self._read()
            entry = {**asdict(release), "labels": digest}
            if entry not in content["releases"]:
                content["releases"].append(entry)
            found = Guarantee.of(_releases(content))
            check(found)
            if note:
                self._write(content)
        return found

    def _lock(self) -> FileLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{self.path}.lock", timeout=60.0, mode=0o600)

    def _write(self, content: dict[str, Any]) -> None:
        write_private(self.path, json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        """Return the content of the file, or that of a new one."""
        if not self.path.exists():
            return {"key": f"{draw_secret():064x}", "releases": []}
        try:
            content: dict[str, Any] = json.loads(self.path.read_bytes())
            if len(bytes.fromhex(content["key"])) != 32:
                raise ValueError("the key is incomplete")
            _releases(content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the ledger of label releases '{self.path}' cannot be read "
                f"({type(error).__name__}); restore it from a backup. A new one has "
                "another key, and labels that are drawn again reveal more"
            ) from None
        return content


def _releases(content: dict[str, Any]) -> list[Release]:
    names = [field.name for field in fields(Release)]
    return [Release(**{name: e[name] for name in names}) for e in content["releases"]]
