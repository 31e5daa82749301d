"""Vertical training as estimators of scikit-learn."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.objectives import CrossEntropy, MeanSquaredError, TopModelObjective
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.randomness import RandomState
from flower_vfl.strategies.defenses.registry import Defense, DefenseLike
from flower_vfl.strategies.fitting import fit

from .models.bottom import dense_layers


class VerticalEstimator(BaseEstimator):  # type: ignore[misc]
    """Base of the two estimators."""

    def __init__(
        self,
        parties: int | Sequence[Sequence[int | str]] = 2,
        *,
        hidden: Sequence[int] = (32,),
        width: int = 8,
        defense: DefenseLike = "",
        audit: bool | str | Leakage = False,
        epochs: int = 30,
        batch_size: int = 64,
        learning_rate: float = 0.01,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.parties = parties
        self.hidden = hidden
        self.width = width
        self.defense = defense
        self.audit = audit
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def _groups(self) -> list[NDArray[np.intp]]:
        """Return the columns of each party."""
        columns: int = self.n_features_in_
        if isinstance(self.parties, int | np.integer):
            if self.parties < 1:
                raise ConfigError(f"parties must be at least 1, got {self.parties}")
            count = min(int(self.parties), columns)  # nobody without columns
            return list(np.array_split(np.arange(columns), count))
        names = list(getattr(self, "feature_names_in_", ()))
        known = {i: i for i in range(columns)} | {n: i for i, n in enumerate(names)}
        unknown = [key for group in self.parties for key in group if key not in known]
        if unknown or not self.parties or not all(map(len, self.parties)):
            forms = f"a number, or lists of columns from 0 to {columns - 1} or of names"
            raise ConfigError(f"parties must be {forms}; unknown: {unknown}")
        return [np.array([known[key] for key in group]) for group in self.parties]

    def _train(self, X: NDArray[Any], labels: NDArray[Any], classes: int = 0) -> None:
        """Train one passive party for each group of columns, and the label party."""
        self.scaler_ = StandardScaler().fit(X)
        self.groups_ = self._groups()
        seed = int(check_random_state(self.random_state).randint(2**31))
        known = None if self.random_state is None else seed  # else the noise is secret
        with RandomState(seed):
            shapes = [(len(group), self.hidden, self.width) for group in self.groups_]
            bottoms = [nn.Sequential(*dense_layers(*shape)) for shape in shapes]
            top = nn.Linear(self.width * len(bottoms), classes if classes > 2 else 1)
        objective: TopModelObjective = MeanSquaredError(top)
        if classes:
            objective = CrossEntropy(top, classes)
        inputs = self._inputs(X, torch.float32)
        passive = [PassiveParty(*each) for each in zip(inputs, bottoms, strict=True)]
        self.result_ = fit(
            [LabelParty(labels, objective), *passive],
            defense=Defense(self.defense, noise_seed=known),
            audit=self.audit,
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            seed=seed,
            test_fraction=0.0,
            evaluate_every=0,
            progress=False,
        )
        self.result_.predictor = None  # it holds the training rows
        self.leaks_ = self.result_.leaks
        objective.optimizers = []
        self.objective_ = objective.double().eval()
        self.bottoms_ = nn.ModuleList(bottoms).double().eval()

    def _inputs(self, X: NDArray[Any], dtype: torch.dtype) -> list[Tensor]:
        """Return the scaled columns of each party."""
        scaled = torch.as_tensor(self.scaler_.transform(X), dtype=dtype)
        return [scaled[:, group] for group in self.groups_]

    def _output(self, X: ArrayLike) -> NDArray[Any]:
        """Return what the objective predicts for new rows."""
        check_is_fitted(self)
        rows: NDArray[Any] = validate_data(self, X, reset=False)
        with torch.no_grad():
            parts = zip(self.bottoms_, self._inputs(rows, torch.double), strict=True)
            joined = torch.cat([bottom(part) for bottom, part in parts], dim=1)
            return self.objective_.predict(joined).numpy()


class VerticalClassifier(ClassifierMixin, VerticalEstimator):  # type: ignore[misc]
    """A classifier whose columns belong to several parties, in one process.

    Every party standardises its columns and trains a bottom model; a label party holds
    `y` and the top model. All rows are trained on.

    Parameters
    ----------
    parties : int | Sequence[Sequence[int | str]] (default: 2)
        Number of parties that share the columns in order (no more than there are
        columns), or the columns of each party, by number or by name.
    hidden : Sequence[int] (default: (32,))
        Units of the hidden layers of each bottom model.
    width : int (default: 8)
        Columns of each party's embedding.
    defense : str | GradientTransform | Sequence[GradientTransform] (default: "")
        What is done to every gradient before it leaves, e.g. ``"marvell:s=4"``.
    audit : bool | str | Leakage (default: False)
        Whether attacks run on every gradient: True, ``"norm,cosine"`` or a `Leakage`.
    epochs, batch_size, learning_rate : int, int, float (defaults: 30, 64, 0.01)
        Of the training with Adam.
    random_state : int | RandomState | None (default: None)
        Makes a fit repeatable, with the noise of the defense. None draws the noise from
        a secret.

    Attributes
    ----------
    classes_, n_features_in_, feature_names_in_
        As in scikit-learn.
    result_ : VerticalResult
        The losses by epoch, what attacks found, and what is promised about labels.
    leaks_ : DataFrame
        The leak of each attack on each party; empty without an audit.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from flower_vfl import VerticalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = VerticalClassifier(parties=[[0, 1], [2, 3]], random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.9
    True
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train on all rows."""
        rows, given = validate_data(self, X, y)
        check_classification_targets(given)
        self.classes_, labels = np.unique(given, return_inverse=True)
        if len(self.classes_) < 2:
            raise ConfigError("y has one class only; a classifier needs two classes")
        self._train(rows, labels, len(self.classes_))
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Return the probability of each class."""
        found = self._output(X)
        return found if found.ndim == 2 else np.column_stack([1.0 - found, found])

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable class of each row."""
        found = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[found])


class VerticalRegressor(RegressorMixin, VerticalEstimator):  # type: ignore[misc]
    """A regressor whose columns belong to several parties, in one process.

    The label party standardises `y` for the training. Parameters and attributes are
    those of :class:`VerticalClassifier`, but for the classes.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from flower_vfl import VerticalRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = VerticalRegressor(audit="norm", random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.4
    True
    >>> model.leaks_.shape
    (2, 1)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train on all rows."""
        rows, values = validate_data(self, X, y, y_numeric=True)
        self.target_ = StandardScaler().fit(values[:, None])
        self._train(rows, self.target_.transform(values[:, None])[:, 0])
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the expected value of each row."""
        found = self._output(X)[:, None]
        return np.asarray(self.target_.inverse_transform(found)[:, 0])
