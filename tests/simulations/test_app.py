"""The same app in one process and under ``flwr run`` on Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.simulations import plugins
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import table
from flower_vfl.simulations.runtime.engines import run_and_attack


def placed(config: RunConfig, folder: Path) -> RunConfig:
    return replace(config, out=str(folder), state_dir=str(folder / "parties"))


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "engine", "pipeline", "passive"),
    [
        # Messages of Flower's own: also in test_flower_runtime, and without a process
        # that stays in tests/strategies/test_stateless.py.
        pytest.param("plain", "flower", 0, 2, marks=pytest.mark.extra),
        # One actor less; three parties are those of test_cluster.
        ("resident", "ray", 0, 1),
        pytest.param("resident", "ray", 0, 2, marks=pytest.mark.extra),
        pytest.param("resident", "ray", 1, 2, marks=pytest.mark.extra),
    ],
)
def test_flwr_run_ends_with_the_weights_of_the_in_process_run(
    transport: str, engine: str, pipeline: int, passive: int, own: str, tmp_path: Path
) -> None:
    """Its processes know the methods of one's own."""
    plugins.use_plugins([own])
    config = RunConfig(
        epochs=1,
        batch_size=152,  # three steps
        pipeline=pipeline,
        parties=passive,
        transport=transport,
        bottom="mlp:hidden=16,dropout=0.2,batch_norm=true",
        label_share="0.2",
        objective="small",
        defense="marvell:s=4 | flip | geno",
        defense_at="label" if engine == "ray" else "strategy",
        reproducible_noise=True,
        attack="norm,cosine,first-column",
    )
    here, there = placed(config, tmp_path / "here"), placed(config, tmp_path / "there")
    threads = torch.get_num_threads()
    with InProcessGrid(client_app, passive + 1, here.to_run_config()) as grid:
        train(grid, here, "in-process", progress=False)
    torch.set_num_threads(threads)
    run_and_attack(there, engine)

    ours, theirs = (
        json.loads((folder / "result.json").read_text())
        for folder in (tmp_path / "here", tmp_path / "there")
    )
    assert theirs["engine"] == engine
    assert "first-column" in set(table(theirs)["attack"])
    measured = "not metric.str.contains('seconds')"
    pd.testing.assert_frame_equal(
        *(table(d).query(measured).reset_index(drop=True) for d in (ours, theirs))
    )
    for party in ("label", "passive-1", "passive-2")[: passive + 1]:
        one = torch.load(tmp_path / "here" / "parties" / party / "final.pt")
        two = torch.load(tmp_path / "there" / "parties" / party / "final.pt")
        for module in {"model", "objective"} & one.keys():
            assert one[module].keys() == two[module].keys()
            for name, weight in one[module].items():
                assert torch.equal(weight, two[module][name]), (party, name)
