"""Datasets by name or from files, divided by columns and prepared for each party."""

from .files import data_folders
from .party_files import infer_task, read_party_file
from .registry import dataset_names, load_dataset
from .types import Dataset, InputSpec

__all__ = ["Dataset", "InputSpec", "data_folders", "dataset_names", "infer_task"]
__all__ += ["load_dataset", "read_party_file"]
