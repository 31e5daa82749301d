"""Training on the union of all parties' rows: synthetic data for missing rows."""

from .feature_imputer import FEATURE_SYNTHESIZERS
from .labels import LABEL_SYNTHESIZERS
from .row_index import RowIndex

__all__ = ["FEATURE_SYNTHESIZERS", "LABEL_SYNTHESIZERS", "RowIndex"]
