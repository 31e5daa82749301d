"""The pieces of model completion: the model, the known labels, the scores."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.randomness import generator

Scores = dict[str, float]


class CompletedModel(nn.Module):
    """A bottom model with a head; its layers are batch norm, ReLU and linear."""

    def __init__(
        self,
        bottom: nn.Module,
        width: int,
        classes: int,
        hidden: Sequence[int] = (),
        freeze_bottom: bool = False,
    ) -> None:
        super().__init__()
        self.bottom = bottom
        self.freeze_bottom = freeze_bottom
        if freeze_bottom:
            bottom.requires_grad_(False)
        layers: list[nn.Module] = []
        for units in (*hidden, classes):
            layers += [nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, units)]
            width = units
        self.head = nn.Sequential(*layers)

    def train(self, mode: bool = True) -> CompletedModel:
        """Switch to training; a frozen bottom model stays in evaluation."""
        super().train(mode)
        if self.freeze_bottom:
            self.bottom.eval()
        return self

    def embed(self, *inputs: Tensor) -> Tensor:
        """Return the bottom model's output, flattened."""
        output: Tensor = self.bottom(*inputs)
        return output.flatten(1)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return logits (rows, classes)."""
        logits: Tensor = self.head(self.embed(*inputs))
        return logits


def auxiliary_rows(labels: Tensor, classes: int, count: int, seed: int) -> Tensor:
    """Return the rows whose labels the attacker is given, as many of each class."""
    if count < classes:
        raise ConfigError(f"{count} auxiliary labels are too few for {classes} classes")
    order = torch.randperm(len(labels), generator=generator(seed, "auxiliary"))
    order = order.to(labels.device)
    chosen = []
    for label in range(classes):
        wanted = count // classes + int(label < count % classes)
        found = order[labels[order] == label][:wanted]
        if len(found) < wanted:
            raise ConfigError(
                f"{wanted} auxiliary labels of class {label} are wanted and "
                f"{len(found)} training rows have it; lower the number of labels"
            )
        chosen.append(found)
    return torch.cat(chosen).sort().values


def completion_scores(probabilities: Tensor, labels: Tensor) -> Scores:
    """Return accuracy; F1 and AUC for two classes; top-5 for more than five."""
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(dim=1)
    scores = {"accuracy": float((predicted == labels).double().mean())}
    if classes > 5:
        best = probabilities.topk(5, dim=1).indices
        scores["top5"] = float((best == labels[:, None]).any(dim=1).double().mean())
    if classes == 2:
        truth = labels.cpu().numpy()
        guessed = predicted.cpu().numpy()
        scores["f1"] = float(f1_score(truth, guessed, zero_division=0.0))
        if 0 < int(labels.sum()) < len(labels):  # the AUC of one class does not exist
            scores["auc"] = float(roc_auc_score(truth, probabilities[:, 1].cpu()))
    return scores


def reinitialise(module: nn.Module) -> nn.Module:
    """Return an untrained copy whose layers have drawn new weights."""
    fresh = copy.deepcopy(module)
    for name, part in fresh.named_modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
        elif next(part.parameters(recurse=False), None) is not None:
            raise ConfigError(
                f"layer '{name}' ({type(part).__name__}) has no reset_parameters; give "
                "the attack an untrained bottom model with fresh="
            )
    return fresh
