"""The ServerApp: the strategy, its defense, and what it measures."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_vfl import Leakage, ResidentGrid
from flower_vfl.strategies import Defense, VerticalResult, VerticalStrategy

app = ServerApp()


def train(grid: Grid, context: Context) -> VerticalResult:
    """Train over the parties of a grid."""
    config = context.run_config
    strategy = VerticalStrategy(
        batch_size=int(config["batch-size"]),
        learning_rate=float(config["learning-rate"]),
        parties=int(config["parties"]) + 1,  # and the label party
        defense=Defense(str(config["defense"]), at="label"),
        leakage=Leakage(),
    )
    return strategy.start(grid, num_rounds=int(config["epochs"]))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Keep the parties in memory while they train."""
    with ResidentGrid(grid, reopen=True) as sessions:
        train(sessions, context)
