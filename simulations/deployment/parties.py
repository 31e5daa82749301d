"""The parties of the example: who they are, and a data file for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets import load_dataset, party_columns

ID_COLUMN = "id"
LABEL_COLUMN = "label"
NAMES = ("bank", "shop", "telco")


@dataclass(frozen=True)
class PartySpec:
    """One party of a deployment."""

    name: str
    role: Literal["label", "passive"]
    data: Path


def write_party_files(
    folder: Path, dataset: str = "breast-cancer", names: Sequence[str] = NAMES
) -> list[PartySpec]:
    """Divide a built-in table by columns into one CSV file for each party.

    Every file has the ids; the labels are in the first one only.
    """
    data = load_dataset(dataset)
    if data.table is None:
        raise ConfigError(f"'{dataset}' is not a table; choose one that is")
    codes = data.split(0, 0.2, 0.0)
    columns = party_columns(data, codes, len(names) - 1, label_share=0.2)
    parties = []
    for number, (name, own) in enumerate(zip(names, columns, strict=True)):
        frame = data.table[list(own)].copy()
        if not number:
            frame.insert(0, LABEL_COLUMN, data.labels)
        frame.insert(0, ID_COLUMN, data.ids)
        home = folder / name
        home.mkdir(parents=True, exist_ok=True)
        file = home / f"{name}.csv"
        # Each party exports its rows in an order of its own.
        frame.sample(frac=1.0, random_state=number).to_csv(file, index=False)
        parties.append(PartySpec(name, "passive" if number else "label", file))
    return parties
