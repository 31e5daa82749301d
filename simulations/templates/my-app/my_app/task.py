"""Data and models: replace them with your own."""

from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Context
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from flower_vfl.simulations.datasets import infer_task, read_party_file
from flower_vfl.simulations.datasets.party_files import order_by_ids

WIDTH = 8  # of an embedding
COLUMNS = {1: slice(0, 15), 2: slice(15, 30)}  # of the passive parties, simulated


class Rows(NamedTuple):
    """What a party holds; all parties have the same ids in the same order."""

    values: Tensor
    ids: np.ndarray


def load_features(context: Context) -> Rows:
    """Return the columns of a passive party, scaled."""
    node = context.node_config
    if "data" in node:  # in a deployment: a file of this party, with numbers
        file = order_by_ids(read_party_file(str(node["data"]), id_column="id"))
        table, ids = file.features.to_numpy("float32"), file.ids
    else:
        data = load_breast_cancer(as_frame=True).data
        table = data.to_numpy("float32")[:, COLUMNS[int(node["partition-id"])]]
        ids = data.index.to_numpy()
    return Rows(torch.tensor((table - table.mean(0)) / table.std(0)), ids)


def load_labels(context: Context) -> Rows:
    """Return the labels of the label party, 0 or 1."""
    node = context.node_config
    if "data" in node:
        file = order_by_ids(read_party_file(str(node["data"]), "id", "label"))
        found = infer_task(np.asarray(file.labels), "binary")
        return Rows(torch.tensor(found.labels), file.ids)
    data = load_breast_cancer(as_frame=True)
    return Rows(torch.tensor(data.target.to_numpy()), data.target.index.to_numpy())


def bottom_model(columns: int) -> nn.Module:
    """Return the part of the model that a passive party trains."""
    return nn.Sequential(nn.Linear(columns, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def top_model(passive_parties: int) -> nn.Module:
    """Return the part of the model that the label party trains."""
    return nn.Linear(WIDTH * passive_parties, 1)
