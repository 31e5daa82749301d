"""The default methods of ``compare`` on a loan table with 5 % positives."""

from dataclasses import replace
from pathlib import Path

import pytest
from loan_cases import loan_config, loan_tables
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from flower_vfl.simulations.cli.compare import DEFAULTS
from flower_vfl.simulations.results import tables
from flower_vfl.simulations.runtime.engines import run_in_process
from flower_vfl.simulations.studies.methods import parse_method
from flower_vfl.simulations.studies.run_metrics import largest_leaks, utilities
from flower_vfl.simulations.studies.tradeoff import untrained

LARGEST_LOSS = 0.05  # of AUC
LEAKS = {"gafm": 0.97, "ladsg": 0.8}  # the largest; without a defense it is 1.0


def test_the_generated_table_has_rare_positives_and_a_signal() -> None:
    bank, telecom, shop = loan_tables()
    assert bank["default"].mean() == pytest.approx(0.05)
    joined = bank.merge(telecom, on="id").merge(shop, on="id")
    columns = joined.drop(columns=["id", "default"]).select_dtypes("number")
    model = LogisticRegression(max_iter=200).fit(columns[:4000], bank["default"][:4000])
    found = model.predict_proba(columns[4000:])[:, 1]
    assert 0.75 < roc_auc_score(bank["default"][4000:], found) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "rows", "epochs"),
    [
        (("none", "ladsg"), 3000, 10),
        pytest.param(tuple(DEFAULTS["binary"]), 5000, 16, marks=pytest.mark.extra),
    ],
    ids=["some", "all"],
)
def test_every_default_method_trains_with_rare_positives_or_is_marked(
    names: tuple[str, ...], rows: int, epochs: int, tmp_path: Path
) -> None:
    measured = {"attack": "norm,mean", "evaluate_every": epochs}
    config = replace(loan_config(tmp_path, rows), epochs=epochs, **measured)
    found = {
        name: run_in_process(parse_method(name).over(config, {}), False, False)
        for name in names
    }
    records = tables(found)
    auc, marks = utilities(records)["value"], untrained(records)
    for name in found:
        within = auc[name] >= auc["none"] - LARGEST_LOSS
        assert within or marks[name], f"{name}: AUC {auc[name]:.3f}, and not marked"
    leaks = largest_leaks(records).groupby("run")["leak"].max()
    assert leaks["none"] > 0.99
    for name, largest in LEAKS.items():
        if name not in names:
            continue
        assert not marks[name]
        assert auc[name] >= auc["none"] - LARGEST_LOSS
        assert leaks[name] < largest
