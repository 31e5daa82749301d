"""Datasets by name or from files, divided by columns and prepared for each party."""

from .divide import Split, as_split, divide_columns, parse_split
from .files import cache_folder, data_folders
from .partitioner import partitioned_columns
from .party_files import (
    PartyFile,
    TaskLabels,
    infer_task,
    order_by_ids,
    read_party_file,
)
from .prepare import TableFit, prepare_table
from .registry import dataset_names, load_dataset
from .text import TextFit
from .types import Dataset, PartyData, Pictures, Task, split_groups
from .vertical import party_columns, prepare_party, vertical_split

__all__ = [
    "Dataset",
    "PartyData",
    "PartyFile",
    "Pictures",
    "Split",
    "TableFit",
    "Task",
    "TaskLabels",
    "TextFit",
    "as_split",
    "cache_folder",
    "data_folders",
    "dataset_names",
    "divide_columns",
    "infer_task",
    "load_dataset",
    "order_by_ids",
    "parse_split",
    "partitioned_columns",
    "party_columns",
    "prepare_party",
    "prepare_table",
    "read_party_file",
    "split_groups",
    "vertical_split",
]
