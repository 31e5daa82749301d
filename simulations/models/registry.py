"""Models and optimizers by name."""

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.simulations.datasets.types import InputSpec
from flower_vfl.specs import build_from_spec, parse_spec, typed_arguments

from . import bottom
from .bottom import CNN, MLP, BottomModel, ResNet20, WideDeep

# A name with a paper in front is that paper's model with its parameters as defaults;
# the width beside it is the paper's cut layer, which the caller chooses.
BOTTOM_MODELS: dict[str, Callable[..., BottomModel]] = {
    "mlp": MLP,
    "wide-deep": WideDeep,
    "cnn": CNN,
    "resnet20": ResNet20,
    # Marvell (Li et al., 2022), A.6.2: Criteo and Avazu, width 128; ISIC, width 1600
    "marvell-wide-deep": partial(WideDeep, wide=False, final="relu"),
    "marvell-cnn": partial(CNN, channels=(64, 64, 64, 64), linear=False),
    # FLORIST, Criteo: cut after the second 128-unit ReLU layer, width 128
    "florist-deep": partial(WideDeep, hidden=(128,), wide=False, final="relu"),
    # GAFM, E.2: width 1, for ISIC 40
    "gafm-spambase": partial(
        MLP, hidden=(16,), activation="leaky-relu", final="sigmoid"
    ),
    "gafm-imdb": partial(MLP, hidden=(256, 128), dropout=0.5, final="sigmoid"),
    "gafm-wide-deep": partial(
        WideDeep, hidden=(16, 16), embedding=16, batch_norm=True, dropout=0.2
    ),
    # Gray images; the ReLU at the cut layer is that of the authors' code
    "gafm-cnn": partial(
        CNN,
        channels=(6, 16, 32),
        padding=False,
        hidden=(120, 84),
        gray=True,
        final="relu",
    ),
    # Original GAFM, section 4: "a single hidden layer", width 1; the 16 units are ours
    "gafm-original": partial(MLP, hidden=(16,), activation="leaky-relu"),
    # LADSG, table 2, Loan Prediction: four layers; the 64 units are ours
    "ladsg-fcnn4": partial(MLP, hidden=(64, 64, 64)),
    # Ours, instead of LADSG's ResNet-20, for one core
    "ladsg-cnn": partial(CNN, hidden=(256,), batch_norm=True, stride=2),
}


def identity_top(in_width: int, out_width: int) -> nn.Module:
    """Return no layers: the parties' summed outputs are the logits."""
    if in_width != out_width:
        needed = f"the cut width must be {out_width}, got {in_width}"
        raise ConfigError(f"without a top model the cut layers are logits: {needed}")
    return nn.Identity()


def linear_top(in_width: int, out_width: int) -> nn.Module:
    """Return one linear layer."""
    return nn.Linear(in_width, out_width)


def mlp_top(
    in_width: int,
    out_width: int,
    hidden: tuple[int, ...] = (64,),
    activation: str = "relu",
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> nn.Module:
    """Return hidden layers, then a linear layer; parameters as for :class:`MLP`."""
    settings = activation, dropout, batch_norm
    return nn.Sequential(*bottom.dense_layers(in_width, hidden, out_width, *settings))


class WideDeepTop(nn.Module):
    """Adds the label party's columns, its wide part, to the deep part's logits.

    Li et al., 2022, https://arxiv.org/abs/2102.08504, Criteo and Avazu.
    """

    def __init__(
        self, in_width: int, out_width: int, hidden: tuple[int, ...] = (128, 128, 128)
    ) -> None:
        super().__init__()
        self.logits = out_width
        self.deep = mlp_top(in_width - out_width, out_width, hidden)

    def forward(self, joined: Tensor) -> Tensor:
        """Return the logits; the label party's columns come first."""
        logits: Tensor = self.deep(joined[:, self.logits :])
        return logits + joined[:, : self.logits]


def cnn_top(
    in_width: int,
    out_width: int,
    shape: tuple[int, int, int] = (64, 5, 5),
    channels: tuple[int, ...] = (64, 64),
    hidden: tuple[int, ...] = (64,),
) -> nn.Module:
    """Return the layers after the cut of ``marvell-cnn``.

    Li et al., 2022, https://arxiv.org/abs/2102.08504, appendix A.6.2, ISIC.
    """
    if in_width != prod(shape):
        wrong = f"the shape {shape} has {prod(shape)} columns, but {in_width} come in"
        raise ConfigError(f"{wrong}; set shape=channels+height+width")
    convolutions, out_shape = bottom.conv_layers(shape, channels)
    dense = bottom.dense_layers(prod(out_shape), hidden, out_width)
    return nn.Sequential(nn.Unflatten(1, shape), *convolutions, nn.Flatten(), *dense)


TOP_MODELS: dict[str, Callable[..., nn.Module]] = {
    "none": identity_top,
    "linear": linear_top,
    "mlp": mlp_top,
    # Marvell, A.6.2: what follows the cut layer, without and with the wide part
    "marvell-deep": partial(mlp_top, hidden=(128, 128, 128)),
    "marvell-wide-deep": WideDeepTop,
    "marvell-cnn": cnn_top,
    # FLORIST: the last two layers of the deep part
    "florist-deep": partial(mlp_top, hidden=(128, 128)),
    # LADSG, table 2; the 64 units are ours
    "ladsg-fcnn3": partial(mlp_top, hidden=(64, 64)),
    "ladsg-fcnn4": partial(mlp_top, hidden=(64, 64, 64)),
}


def auto_bottom(spec: InputSpec) -> str:
    """Return the name of the bottom model that ``"auto"`` stands for."""
    table = "wide-deep" if spec.cardinalities else "mlp"
    return table if spec.image is None else "cnn"


def build_bottom(text: str, spec: InputSpec, width: int) -> BottomModel:
    """Build a party's bottom model: a name of ``BOTTOM_MODELS`` and its parameters.

    ``"auto"`` is a CNN for an image, a Wide & Deep model for a table with categorical
    columns, else an MLP.

    Examples
    --------
    >>> build_bottom("mlp:hidden=64+32,dropout=0.1", InputSpec(numeric=57), 16).width
    16
    """
    name, _ = parse_spec(text)
    if name == "auto":
        name = auto_bottom(spec)
        text = name + text.strip().removeprefix("auto")
    kind = bottom.input_kind(spec)
    if name in BOTTOM_MODELS and kind not in _takes(BOTTOM_MODELS[name]):
        able = [key for key, model in BOTTOM_MODELS.items() if kind in _takes(model)]
        fitting = f"models for features of kind '{kind}': {', '.join(sorted(able))}"
        raise ConfigError(f"bottom model '{name}' cannot take {spec}; {fitting}")
    return build_from_spec("bottom model", text, BOTTOM_MODELS, spec, width)


def build_top(text: str, in_width: int, out_width: int) -> nn.Module:
    """Build the label party's top model: a name of ``TOP_MODELS`` and its parameters.

    `out_width` is 1 for a binary task or a regression, else the number of classes.

    Examples
    --------
    >>> build_top("mlp:hidden=32", in_width=16, out_width=1)[-1]
    Linear(in_features=32, out_features=1, bias=True)
    """
    return build_from_spec("top model", text, TOP_MODELS, in_width, out_width)


def _takes(model: Callable[..., BottomModel]) -> frozenset[str]:
    built = model.func if isinstance(model, partial) else model
    assert isinstance(built, type) and issubclass(built, BottomModel)
    return built.takes


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": Adam,
    "adamw": AdamW,
    "sgd": partial(SGD, lr=0.01),
}
_TUNED = ("lr", "betas", "eps", "momentum", "weight_decay", "nesterov")


def build_optimizer(text: str) -> partial[Optimizer]:
    """Return an optimizer factory for a config string."""
    name, given = parse_spec(text)
    check_name("optimizer", name, OPTIMIZERS)
    for key in given:
        check_name(f"parameter of the optimizer '{name}'", key, _TUNED)
    kind = OPTIMIZERS[name]
    made = partial(kind, **typed_arguments("optimizer", name, given, kind, 1))
    try:
        made([torch.zeros(1)])
    except ValueError as error:  # such as "Invalid learning rate: -1.0"
        raise ConfigError(f"optimizer '{name}': {error}") from None
    return made
