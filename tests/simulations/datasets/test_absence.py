"""Settings of a run in which parties lack rows."""

from __future__ import annotations

import numpy as np
import pytest

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.simulations.attacks import leakage_of
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import load_rows, make_label, make_passive
from flower_vfl.simulations.results import table
from flower_vfl.simulations.runtime.engines import run_in_process

LACKING = RunConfig(
    dataset="breast-cancer", absent_labels=0.5, absent_features=0.25, epochs=1
)


def test_parties_lack_their_shares_of_training_rows_and_different_ones() -> None:
    rows = [load_rows(LACKING, index) for index in range(3)]
    training = rows[0].codes == TRAIN
    for row, share in zip(rows, (0.5, 0.25, 0.25), strict=True):
        assert row.absent is not None and not row.absent[~training].any()
        assert row.absent.sum() == round(share * training.sum())
        assert (row.trained == (training & ~row.absent)).all()
    assert (rows[1].absent != rows[2].absent).any()
    again = load_rows(LACKING, 1)
    assert again.absent is not None and (again.absent == rows[1].absent).all()
    more = load_rows(RunConfig(dataset="breast-cancer", absent_features=0.5), 1)
    assert more.absent is not None and rows[1].absent is not None
    assert (more.absent | ~rows[1].absent).all()  # a larger share adds to a smaller


def test_columns_are_scaled_on_the_rows_that_are_held() -> None:
    rows = load_rows(LACKING, 1)
    held = rows.data.inputs[0][np.flatnonzero(rows.trained)]
    assert held.mean(dim=0).abs().max() < 1e-5
    everything = rows.data.inputs[0][np.flatnonzero(rows.codes == TRAIN)]
    assert everything.mean(dim=0).abs().max() > 1e-3


def test_parties_are_placed_on_all_rows() -> None:
    label, passive = load_rows(LACKING, 0), load_rows(LACKING, 1)
    placed = [make_label(LACKING, label), make_passive(LACKING, passive)]
    for party, rows in zip(placed, (label, passive), strict=True):
        assert party.row_index is not None and rows.absent is not None
        assert (party.row_index.held.numpy() == ~rows.absent).all()
        shares = {"label": 0.5, "passive-1": 0.75, "passive-2": 0.75}
        assert party.row_index.shares == shares
    plain = make_passive(RunConfig(), load_rows(RunConfig(), 1))
    assert plain.row_index is None


def test_rows_are_dropped_before_an_alignment() -> None:
    config = RunConfig(
        dataset="breast-cancer", alignment="psu", absent_labels=0.5, epochs=1
    )
    whole, label = load_rows(RunConfig(), 0), load_rows(config, 0)
    assert len(label.ids) == len(whole.ids) - round(0.5 * (whole.codes == TRAIN).sum())
    assert label.labels is not None and len(label.labels) == len(label.ids)
    assert make_label(config, label).row_index is None


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_run_with_missing_rows_and_its_membership(reproducible: bool) -> None:
    config = RunConfig(
        dataset="breast-cancer",
        absent_labels=0.5,
        absent_features=0.25,
        synthetic_labels="random_pred:samples=2",
        calibration="tr",
        attack="membership:joint=true",
        reproducible_noise=reproducible,
        epochs=2,
    )
    found = [run_in_process(config, verbose=False, bar=False) for _ in range(2)]
    records = [table(document) for document in found]
    own = records[0].query("metric == 'membership' and party == 'passive-1'")
    attacks = {"spectral", "spectral_sides", "embedding", "embedding_sides"}
    assert set(own["attack"]) == attacks
    assert found[0]["final"]["test_auc"] > 0.9
    assert 0.0 < found[0]["final"]["test_ace"] < 0.3
    values = [every.query("party != ''")["value"].tolist() for every in records]
    assert (values[0] == values[1]) == reproducible


def test_attack_strings() -> None:
    own = leakage_of(RunConfig(attack="membership"))
    assert own is not None and own.membership == "own" and own.membership_only
    both = leakage_of(RunConfig(attack="norm,membership:joint=true"))
    assert both is not None and both.membership == "joint"
    assert both.attacks == ("norm",) and not both.membership_only
    with pytest.raises(ConfigError, match="unknown parameter"):
        leakage_of(RunConfig(attack="membership:jointly=true"))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="absent_labels"):
        RunConfig(absent_labels=1.0)
    config = RunConfig(absent_features=0.1)
    with pytest.raises(ConfigError, match="are for datasets"):
        load_rows(config, 1, "some.csv")
