"""What Marvell and vanilla training depend on in GAFM's Table 2, in plain PyTorch.

The local model and the rows are those of the table, the top model is 1→10→1, and both
train with Adam. `--lr`, `--batch`, `--columns` (the d that Marvell's solver is told of,
the batch size in the authors' notebook) and `--dtype` (theirs is float64) can be
changed. One line for each seed: the training loss of the first and of the last epoch,
the test AUC, and for the last epoch the flipped AUC of the hard mean attack and of the
median attack that is split at the batch's median, all batches pooled.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from flower_vfl.parties.schedule import TEST, TRAIN
from flower_vfl.randomness import RandomState
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.models.registry import build_bottom
from flower_vfl.simulations.papers.experiments import load_experiment
from flower_vfl.simulations.parties import load_rows
from flower_vfl.strategies import solve_marvell

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def perturbed(gradient: Tensor, labels: Tensor, s: float, told: bool) -> Tensor:
    """Return a gradient of one column with Marvell's noise for one column or many."""
    ones, zeros = gradient[labels == 1], gradient[labels == 0]
    q = float((ones.mean() - zeros.mean()) ** 2)
    if not s or not q or not len(ones) or not len(zeros):
        return gradient
    spread = float(zeros.var(correction=0)) / q, float(ones.var(correction=0)) / q
    columns, share = len(labels) if told else 1, len(ones) / len(labels)
    noise = solve_marvell(*spread, columns, 1.0, share, s)
    sizes = torch.where(labels == 1, noise.lambda1_pos, noise.lambda1_neg)
    return gradient + (q * sizes).sqrt() * torch.randn_like(gradient)


def guesses(gradient: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels that the hard mean and the median attack assign."""
    one, zero = gradient[labels == 1].mean(), gradient[labels == 0].mean()
    nearer = (gradient - one).abs() < (gradient - zero).abs()
    return nearer, gradient > gradient.median()


def flipped(labels: list[Tensor], found: list[Tensor]) -> float:
    """Return the AUC of an attack over all batches, flipped once."""
    score = float(roc_auc_score(torch.cat(labels), torch.cat(found)))
    return max(score, 1.0 - score)


def train(config: RunConfig, given: argparse.Namespace) -> tuple[float, ...]:
    """Return the first and the last loss, the test AUC and what the attacks find."""
    rows, dtype = load_rows(config, 1), DTYPES[given.dtype]
    assert rows.data.spec is not None
    known = load_rows(config, 0).labels
    assert known is not None
    inputs = [torch.as_tensor(each).to(dtype) for each in rows.data.inputs]
    labels = torch.tensor(known, dtype=dtype)
    local = build_bottom(config.bottom, rows.data.spec, 1).to(dtype)
    top = nn.Sequential(nn.Linear(1, 10), nn.LeakyReLU(), nn.Linear(10, 1)).to(dtype)
    parameters = [*local.parameters(), *top.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=given.lr)
    chosen = torch.from_numpy((rows.codes == TRAIN).nonzero()[0])
    losses = []
    for _ in range(given.epochs):
        total, truth, means, medians = 0.0, [], [], []
        order = chosen[torch.randperm(len(chosen))]
        for batch in order.split(given.batch):
            own, embedding = labels[batch], local(*(each[batch] for each in inputs))
            optimizer.zero_grad()
            sent = embedding.detach().requires_grad_()
            loss = F.binary_cross_entropy_with_logits(top(sent).squeeze(1), own)
            loss.backward()
            assert sent.grad is not None
            told = given.columns == "batch"
            gradient = perturbed(sent.grad.squeeze(1), own, given.s, told)
            embedding.backward(gradient.unsqueeze(1))
            optimizer.step()
            total += loss.item() * len(batch) / len(chosen)
            nearer, above = guesses(gradient, own)
            truth, means, medians = [*truth, own], [*means, nearer], [*medians, above]
        losses.append(total)
    held = torch.from_numpy((rows.codes == TEST).nonzero()[0])
    local.eval()
    with torch.no_grad():
        scores = top(local(*(each[held] for each in inputs)))
    auc = float(roc_auc_score(labels[held], scores))
    return losses[0], losses[-1], auc, flipped(truth, means), flipped(truth, medians)


def main() -> None:
    """Train and attack with every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", choices=["Spambase", "IMDB"])
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch", type=int, default=1028)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--s", type=float, default=0.0, help="Marvell's noise; 0: none")
    parser.add_argument("--columns", choices=["1", "batch"], default="1")
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    rows = load_experiment("gafm-table-2").rows
    own = next(row for row in rows if row.name == f"{given.dataset} / Vanilla")
    assert own.config is not None
    print(
        "| seed | first loss | last loss | test AUC | mean | median |\n|" + "---|" * 6
    )
    for seed in range(given.seeds):
        config = replace(own.config, seed=seed)
        with RandomState(seed):
            found = train(config, given)
        cells = " | ".join(f"{value:.3f}" for value in found)
        print(f"| {seed} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
