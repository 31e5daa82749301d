"""Estimators of scikit-learn: its own checks, searches, pipelines, pickles."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
from docs_cases import ROOT
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from threadpoolctl import threadpool_limits

from flower_vfl import ConfigError, VerticalClassifier, VerticalRegressor

X, Y = load_breast_cancer(return_X_y=True)
FRAME = load_breast_cancer(as_frame=True).data
# Checks of scikit-learn that do not run, with the reason; the docs have the same list.
NOT_RUN = {
    "check_array_api_input": "SCIPY_ARRAY_API is not set: not checking array_api input"
}


@pytest.mark.parametrize(
    "kind",
    [VerticalClassifier, pytest.param(VerticalRegressor, marks=pytest.mark.extra)],
)
def test_scikit_learns_own_checks(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with threadpool_limits(1):
        done = check_estimator(
            kind(epochs=6, learning_rate=0.05), on_fail=None, on_skip=None
        )
    with capsys.disabled():
        counted = pd.Series([each["status"] for each in done]).value_counts()
        print(f"\n{kind.__name__}: {counted.to_dict()}")
        for each in done:
            if each["status"] != "passed":
                print(f"  {each['check_name']}: {each['exception']}")
    assert len(done) > 45
    missing = {e["check_name"]: str(e["exception"]) for e in done if e["exception"]}
    assert missing == NOT_RUN


def test_the_docs_list_the_checks_that_do_not_run() -> None:
    page = (ROOT / "docs" / "how-to" / "scikit-learn.md").read_text()
    assert all(f"`{name}`" in page for name in NOT_RUN)


def test_close_to_the_models_of_scikit_learn() -> None:
    linear = make_pipeline(StandardScaler(), LogisticRegression())
    model = VerticalClassifier(random_state=0, epochs=10)
    scores = [cross_val_score(m, X, Y, cv=3).mean() for m in (model, linear)]
    assert scores[0] > scores[1] - 0.02
    inputs, target = load_diabetes(return_X_y=True)
    found = VerticalRegressor(random_state=0, epochs=20).fit(inputs, target)
    ridge = Ridge().fit(inputs, target).score(inputs, target)
    assert found.score(inputs, target) > ridge


def test_search_pipeline_clone_and_pickle() -> None:
    pipeline = make_pipeline(
        StandardScaler(), VerticalClassifier(epochs=3, random_state=0)
    )
    grid = {"verticalclassifier__width": [2, 4]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X, Y)
    assert search.best_score_ > 0.9
    model = search.best_estimator_[-1]
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict_proba(X) == model.predict_proba(X)).all()
    copy = clone(model)
    assert not hasattr(copy, "result_") and copy.get_params() == model.get_params()


def test_groups_by_number_and_by_name_are_the_same() -> None:
    names = list(FRAME.columns)
    groups = [[0, 3, 5], [1, 2]]
    settings: dict[str, Any] = {"epochs": 2, "random_state": 0}
    by_number = VerticalClassifier(groups, **settings).fit(FRAME, Y)
    named = [[names[i] for i in group] for group in groups]
    by_name = VerticalClassifier(named, **settings).fit(FRAME, Y)
    assert (by_number.predict_proba(FRAME) == by_name.predict_proba(FRAME)).all()
    assert [list(group) for group in by_name.groups_] == groups
    unused = FRAME.copy()
    unused[names[10]] = 0.0  # of no party
    assert (by_name.predict_proba(unused) == by_name.predict_proba(FRAME)).all()
    assert len(VerticalClassifier(5, epochs=1).fit(X[:, :3], Y).groups_) == 3


@pytest.mark.parametrize("parties", [0, [], [[0], []], [[0], [30]], [["mean radius"]]])
def test_groups_that_cannot_be(parties: Any) -> None:
    with pytest.raises(ConfigError, match="parties"):
        VerticalClassifier(parties).fit(X, Y)


def test_defense_audit_and_random_state() -> None:
    settings: dict[str, Any] = {"epochs": 3, "audit": "cosine"}
    bare = VerticalClassifier(**settings, random_state=0).fit(X, Y)
    assert list(bare.leaks_.index) == ["passive-1", "passive-2"]
    assert bare.leaks_["cosine"].min() > 0.95
    settings["defense"] = "marvell:s=4"
    one, two = (VerticalClassifier(**settings, random_state=0) for _ in range(2))
    defended = one.fit(X, Y)
    assert defended.leaks_["cosine"].max() < 0.8
    assert (defended.predict_proba(X) == two.fit(X, Y).predict_proba(X)).all()
    assert np.isfinite(defended.result_.metrics["loss"])


def test_without_a_random_state_the_noise_is_a_secret() -> None:
    np.random.seed(0)  # the global state of numpy decides weights and batches
    first = VerticalClassifier(defense="iso", epochs=1).fit(X, Y).predict_proba(X)
    np.random.seed(0)
    second = VerticalClassifier(defense="iso", epochs=1).fit(X, Y).predict_proba(X)
    assert (first != second).any()
