"""The arguments of a party that concern missing rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Imputation:
    """Synthetic data for missing rows, where parties train on the union of ids.

    Parameters
    ----------
    features : str (default: "sampling")
        Synthetic features: ``"sampling"`` (a random real row), ``"gaussian"`` or
        ``"random"``, perhaps with parameters.
    labels : str (default: "majority")
        Synthetic labels: ``"majority"``, ``"minority"``, ``"random_pos"``,
        ``"random_pred"`` or ``"neighbors"``, perhaps with parameters.
    calibration : str (default: "")
        Where the effect of synthetic rows on probabilities is undone: ``"te"`` in
        predictions, ``"tr"`` in the loss, empty nowhere.
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
