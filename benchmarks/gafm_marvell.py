"""What Marvell's noise hides if its solver is told of columns that do not exist.

The authors' notebook of GAFM passes the batch size as the number of columns d, while
its gradients have one. For each folder of a run without a defense that kept gradients
(``capture``), noise with s = 1 is added for d = 1 and for d = the batch size. One line
for each: flipped AUC of the norm, hard mean and batch-median attack, mean of 50 draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from flower_vfl.attacks import LeakageMeter
from flower_vfl.simulations.capture import CAPTURE_FILE, GRADIENT, GRADIENT_LABEL
from flower_vfl.strategies import solve_marvell

ATTACKS = ("norm", "mean:hard=true", "median:hard=true,split=batch")
DRAWS = 50


def main() -> None:
    """Print what the attacks find with noise for one column and for many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--batch", type=int, required=True, help="batch size")
    given = parser.parse_args()
    meter = LeakageMeter(ATTACKS)
    print("| run | d | " + " | ".join(ATTACKS) + " |\n|---|---|---|---|---|")
    for folder in given.folders:
        with np.load(folder / CAPTURE_FILE) as kept:
            gradient = torch.from_numpy(kept[f"{GRADIENT}/passive-1"]).double()
            labels = torch.from_numpy(kept[f"{GRADIENT_LABEL}/passive-1"])
        positive = labels == 1
        ones, zeros = gradient[positive], gradient[~positive]
        q = float((ones.mean() - zeros.mean()) ** 2)
        spread = float(zeros.var(correction=0)) / q, float(ones.var(correction=0)) / q
        share = float(positive.double().mean())
        for columns in (1, given.batch):
            noise = solve_marvell(*spread, columns, 1.0, share, 1.0)
            sizes = torch.where(positive, noise.lambda1_pos, noise.lambda1_neg)
            scale = (q * sizes).sqrt().unsqueeze(1)
            generator = torch.Generator().manual_seed(0)
            found = []
            for _ in range(DRAWS):
                drawn = torch.randn(gradient.shape, generator=generator)
                sent = {"a": gradient + scale * drawn}
                measured = meter.measure(sent, labels, 1)
                found.append([m.value for m in measured if m.metric == "leak_flipped"])
            cells = " | ".join(f"{value:.3f}" for value in np.mean(found, axis=0))
            print(f"| {folder.name} | {columns} | {cells} |")


if __name__ == "__main__":
    main()
