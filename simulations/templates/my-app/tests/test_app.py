"""The app trains in one process."""

import tomllib
from pathlib import Path

from flwr.app import Context, RecordDict

from flower_vfl import InProcessGrid
from my_app import client_app, server_app

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"


def test_the_app_trains() -> None:
    """Three epochs are enough to beat a guess by far."""
    app = tomllib.loads(SETTINGS.read_text())["tool"]["flwr"]["app"]
    config = {**app["config"], "epochs": 3}
    nodes = int(config["parties"]) + 1
    with InProcessGrid(client_app.app, nodes=nodes, run_config=config) as grid:
        context = Context(0, 0, {}, RecordDict(), config)
        result = server_app.train(grid, context)
    assert result.evaluate_metrics_clientapp[3]["test_auc"] > 0.9
