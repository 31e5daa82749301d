"""MixMatch: A Holistic Approach to Semi-Supervised Learning.

Berthelot et al., NeurIPS 2019, https://arxiv.org/abs/1905.02249: the parts that model
completion is made of, as functions of tensors, and the model that it trains. Random
numbers come from torch's global generators.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta

from flower_vfl.errors import ConfigError
from flower_vfl.metrics import binary_metrics, multiclass_metrics
from flower_vfl.randomness import generator

Inputs = tuple[Tensor, ...]
Augment = Callable[[Inputs], Inputs]
Scores = dict[str, float]
_EVALUATION_ROWS = 1024


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """Return p^(1/T), scaled so that each row sums to 1."""
    # In logs, so that a small T does not turn a whole row into zeros.
    return torch.softmax(probabilities.log() / temperature, dim=-1)


def guess_labels(logits: Tensor, temperature: float) -> Tensor:
    """Return the sharpened mean prediction over the augmentations of each row."""
    return sharpen(torch.softmax(logits, dim=-1).mean(dim=0), temperature)


def mixup_weights(rows: int, alpha: float, device: torch.device) -> Tensor:
    """Return λ' = max(λ, 1 - λ) with λ ~ Beta(α, α), one per row."""
    if alpha == 0.0:
        return torch.ones(rows, device=device)
    concentration = torch.tensor(alpha, device=device)
    weights = Beta(concentration, concentration).sample((rows,))
    return torch.maximum(weights, 1.0 - weights)


def mix(first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
    """Return λ'·first + (1 - λ')·second; pixels (``uint8``) are rounded."""
    if not can_mix(first):
        raise ConfigError(f"{first.dtype} codes cannot be mixed; mix their embedding")
    weights = weights.view(-1, *[1] * (first.dim() - 1))
    mixed = weights * first + (1.0 - weights) * second
    return mixed.round().to(torch.uint8) if first.dtype == torch.uint8 else mixed


def can_mix(tensor: Tensor) -> bool:
    """Return whether rows can be averaged: floats and pixels, not integer codes."""
    return tensor.is_floating_point() or tensor.dtype == torch.uint8


def mixmatch_losses(
    embed: Callable[..., Tensor],
    head: Callable[[Tensor], Tensor],
    labelled: Inputs,
    targets: Tensor,
    views: Sequence[Inputs],
    temperature: float,
    alpha: float,
    mix_inputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return cross entropy of labelled and squared error of unlabelled rows of a step.

    All rows go through the model in one pass, so that a batch norm sees them together.
    """
    with torch.no_grad():
        guesses = torch.stack([head(embed(*view)) for view in views])
        guessed = guess_labels(guesses, temperature)
    everything = tuple(torch.cat(parts) for parts in zip(labelled, *views, strict=True))
    wanted = torch.cat([targets, *[guessed] * len(views)])
    partner = torch.randperm(len(wanted)).to(wanted.device)
    weights = mixup_weights(len(wanted), alpha, wanted.device)
    if mix_inputs and all(can_mix(part) for part in everything):
        mixed = tuple(mix(part, part[partner], weights) for part in everything)
        logits = head(embed(*mixed))
    else:
        embedding = embed(*everything)
        logits = head(mix(embedding, embedding[partner], weights))
    wanted = mix(wanted, wanted[partner], weights)
    known = len(targets)
    unsure = F.mse_loss(torch.softmax(logits[known:], dim=1), wanted[known:])
    return F.cross_entropy(logits[:known], wanted[:known]), unsure


@torch.no_grad()
def update_average(
    average: nn.Module, model: nn.Module, decay: float, step: int
) -> None:
    """Take one step of the exponential moving average of weights and buffers.

    With Adam's bias correction: otherwise, with a decay of .999, the first weights
    would still have a third of the weight after 1000 steps.
    """
    share = (1.0 - decay) / (1.0 - decay**step)
    current = model.state_dict()
    for name, value in average.state_dict().items():
        if value.is_floating_point():
            value.lerp_(current[name], share)
        else:  # counters of a batch norm
            value.copy_(current[name])


@torch.no_grad()
def outputs(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return a model's output for each row, flattened, in evaluation mode."""
    model.eval()
    parts = zip(*(torch.split(p, _EVALUATION_ROWS) for p in inputs), strict=True)
    return torch.cat([cast(Tensor, model(*part)).flatten(1) for part in parts])


def predict(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the probability of each class for each row, in evaluation mode."""
    return torch.softmax(outputs(model, inputs), dim=1)


def cycle(rows: Tensor, size: int) -> Iterator[Tensor]:
    """Yield batches forever, shuffled anew after each pass; remainders are dropped."""
    size = min(size, len(rows))
    while True:
        order = rows[torch.randperm(len(rows)).to(rows.device)]
        for start in range(0, len(rows) - size + 1, size):
            yield order[start : start + size]


def shift_images(images: Tensor, pixels: int, flip: bool = False) -> Tensor:
    """Return images moved by up to so many pixels, reflected at the border."""
    rows, _, height, width = images.shape
    pixels = min(pixels, height - 1, width - 1)  # reflection cannot reach further
    device = images.device
    if pixels > 0:
        padded = F.pad(images.float(), (pixels,) * 4, mode="reflect").to(images.dtype)
        down, right = torch.randint(2 * pixels + 1, (2, rows, 1), device=device)
        ys = (down + torch.arange(height, device=device))[:, None, :, None]
        xs = (right + torch.arange(width, device=device))[:, None, None, :]
        each = torch.arange(rows, device=device)[:, None, None, None]
        channels = torch.arange(images.shape[1], device=device)[None, :, None, None]
        images = padded[each, channels, ys, xs]
    if flip:
        mirrored = torch.rand(rows, 1, 1, 1, device=device) < 0.5
        images = torch.where(mirrored, images.flip(-1), images)
    return images


def augmentation(
    inputs: Inputs, shift: int = 2, flip: bool = False, noise: float = 0.1
) -> Augment:
    """Return the augmentation that fits a party's inputs.

    Images (four dimensions) are shifted; other floats get Gaussian noise that is small
    beside the spread of their column; integer codes stay as they are.
    """
    noisy = [part.is_floating_point() and part.dim() != 4 for part in inputs]
    both = zip(inputs, noisy, strict=True)
    spreads = [part.std(dim=0, unbiased=False) if own else None for part, own in both]

    def augment(batch: Inputs) -> Inputs:
        parts = []
        for part, spread in zip(batch, spreads, strict=True):
            if spread is not None and noise > 0.0:
                part = part + noise * spread * torch.randn_like(part)
            elif part.dim() == 4 and can_mix(part):
                part = shift_images(part, shift, flip)
            parts.append(part)
        return tuple(parts)

    return augment


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

    def train(self, mode: bool = True) -> Self:
        """Switch to training; a frozen bottom model stays in evaluation."""
        super().train(mode)
        if self.freeze_bottom:
            self.bottom.eval()
        return self

    def embed(self, *inputs: Tensor) -> Tensor:
        """Return the bottom model's output, flattened."""
        return cast(Tensor, self.bottom(*inputs)).flatten(1)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return logits (rows, classes)."""
        return cast(Tensor, self.head(self.embed(*inputs)))


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
            needed = f"{wanted} auxiliary labels of class {label} are needed"
            rows = f"only {len(found)} rows have it; lower the number of labels"
            raise ConfigError(f"{needed}, but {rows}")
        chosen.append(found)
    return torch.cat(chosen).sort().values


def completion_scores(probabilities: Tensor, labels: Tensor) -> Scores:
    """Return accuracy; F1 and AUC for two classes; top-5 for more than five."""
    guessed, truth = probabilities.cpu().double().numpy(), labels.cpu().numpy()
    if guessed.shape[1] == 2:
        found = binary_metrics(guessed[:, 1], truth)
    else:
        found = multiclass_metrics(guessed, truth)
    found["top5"] = found.pop("top5_accuracy", math.nan)
    names = ("accuracy", "top5", "f1", "auc")
    return {n: found[n] for n in names if not math.isnan(found.get(n, math.nan))}


def reinitialise(module: nn.Module) -> nn.Module:
    """Return an untrained copy whose layers have drawn new weights."""
    fresh = copy.deepcopy(module)
    for name, part in fresh.named_modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
        elif next(part.parameters(recurse=False), None) is not None:
            layer = f"layer '{name}' ({type(part).__name__}) has no reset_parameters"
            raise ConfigError(f"{layer}; give an untrained bottom model with fresh=")
    return fresh
