"""Data and models: replace them with your own."""

from pathlib import Path

import torch
from flwr.app import Context
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from flower_vfl.simulations.datasets import read_party_file

WIDTH = 8  # of an embedding
COLUMNS = {1: slice(0, 15), 2: slice(15, 30)}  # of the passive parties, simulated


def load_features(context: Context) -> Tensor:
    """Return a passive party's columns, with the same people in the same order."""
    node = context.node_config
    if "data" in node:  # in a deployment: a file with the columns of this party
        file = read_party_file(Path(str(node["data"])), id_column="id")
        columns = torch.tensor(file.features.to_numpy("float32"))
    else:
        table = load_breast_cancer().data[:, COLUMNS[int(node["partition-id"])]]
        columns = torch.tensor(table, dtype=torch.float32)
    return (columns - columns.mean(0)) / columns.std(0)


def load_labels(context: Context) -> Tensor:
    """Return the label party's labels."""
    node = context.node_config
    if "data" in node:
        file = read_party_file(Path(str(node["data"])), "id", label_column="label")
        return torch.tensor(file.labels)
    return torch.tensor(load_breast_cancer().target)


def bottom_model(columns: int) -> nn.Module:
    """Return the part of the model that a passive party trains."""
    return nn.Sequential(nn.Linear(columns, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def top_model(passive_parties: int) -> nn.Module:
    """Return the part of the model that the label party trains."""
    return nn.Linear(WIDTH * passive_parties, 1)
