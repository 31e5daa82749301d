"""Datasets by name or from files, divided by columns and prepared for each party."""

from .files import data_folders
from .party_files import infer_task, order_by_ids, read_party_file
from .prepare import TableFit, prepare_table
from .registry import dataset_names, load_dataset
from .types import Dataset, InputSpec, PartyData
from .vertical import party_columns, prepare_party

__all__ = [
    "Dataset",
    "InputSpec",
    "PartyData",
    "TableFit",
    "data_folders",
    "dataset_names",
    "infer_task",
    "load_dataset",
    "order_by_ids",
    "party_columns",
    "prepare_party",
    "prepare_table",
    "read_party_file",
]
