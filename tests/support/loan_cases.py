"""A generated loan table: 5 % of the rows are positive; three parties share it."""

from pathlib import Path

import numpy as np
import pandas as pd

from flower_vfl.simulations.config import RunConfig

_PURPOSES = {"car": 0.0, "home": -0.5, "business": 0.7, "study": 0.3}
_REGIONS = {"north": 0.0, "east": 0.4, "south": -0.3, "west": 0.1, "abroad": 0.8}
_PLANS = {"basic": 0.4, "family": -0.3, "premium": -0.5}


def loan_tables(rows: int = 6000, positives: float = 0.05, seed: int = 0) -> list:
    """Return the tables of a bank, which has the labels, a telecom and a shop."""
    draw = np.random.default_rng(seed)
    numbers = draw.normal(size=(rows, 12))
    kinds = [draw.choice(list(k), rows) for k in (_PURPOSES, _REGIONS, _PLANS)]
    weights = np.array([0.6, -0.5, 0.3, 0.0, 0.7, -0.5, 0.4, 0.0, 0.6, -0.5, 0.3, 0.0])
    risk = numbers @ weights + 0.3 * numbers[:, 0] * numbers[:, 4]
    for names, known in zip(kinds, (_PURPOSES, _REGIONS, _PLANS), strict=True):
        risk += np.array([known[name] for name in names])
    chance = risk + draw.logistic(size=rows)
    labels = (chance > np.quantile(chance, 1.0 - positives)).astype(int)
    names = ["income", "savings", "amount", "age", "late_payments", "tenure"]
    names += ["calls", "data", "returns", "orders", "basket", "visits"]
    table = pd.DataFrame(np.round(numbers, 3), columns=names)
    table.insert(0, "id", np.arange(rows))
    bank = table[["id", *names[:4]]].assign(purpose=kinds[0], default=labels)
    telecom = table[["id", *names[4:8]]].assign(region=kinds[1])
    shop = table[["id", *names[8:]]].assign(plan=kinds[2])
    return [bank, telecom, shop]


def loan_config(folder: Path, rows: int = 6000, positives: float = 0.05) -> RunConfig:
    """Write the three files and return the settings of a run with them."""
    files = [folder / f"{name}.csv" for name in ("bank", "telecom", "shop")]
    for table, file in zip(loan_tables(rows, positives), files, strict=True):
        table.to_csv(file, index=False)
    bank, *passive = map(str, files)
    return RunConfig(
        label_party=bank,
        passive=",".join(passive),
        label_column="default",
        reproducible_noise=True,
    )
