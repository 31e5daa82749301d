"""How a party fills in what it does not hold of the aligned rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Imputation:
    """What stands in for rows that a party lacks, where a union of ids is trained on.

    Parameters
    ----------
    features : str (default: "sampling")
        For missing features: ``"sampling"`` (a random real row), ``"gaussian"`` or
        ``"random"``.
    labels : str (default: "majority")
        For missing labels: ``"majority"``, ``"minority"``, ``"random_pos"``,
        ``"random_pred"`` or ``"neighbors"``, perhaps with parameters.
    calibration : str (default: "")
        Whether predictions undo what synthetic rows do to them: ``"te"`` when they are
        made, ``"tr"`` in the loss, empty not at all.
    secret : int | None (default: None)
        Seed of the synthetic data. None draws a secret for every alignment; a number
        makes simulations repeatable.

    Examples
    --------
    >>> from flower_vfl import Imputation
    >>> Imputation(labels="random_pred:samples=3", calibration="te").features
    'sampling'
    """

    features: str = "sampling"
    labels: str = "majority"
    calibration: str = ""
    secret: int | None = None
