"""The config strings that name models, and those that name none."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
from model_cases import CATEGORICAL, MIXED, NUMERIC, count
from torch import nn

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets.types import InputSpec
from flower_vfl.simulations.models import (
    BOTTOM_MODELS,
    MLP,
    BottomModel,
    WideDeep,
    build_bottom,
    build_top,
)
from flower_vfl.simulations.models.registry import auto_bottom
from flower_vfl.specs import build_from_spec, parse_spec, typed_arguments


def test_auto() -> None:
    assert auto_bottom(NUMERIC) == "mlp"
    assert auto_bottom(MIXED) == auto_bottom(CATEGORICAL) == "wide-deep"
    assert auto_bottom(InputSpec(image=(1, 8, 8))) == "cnn"
    assert type(build_bottom("auto", MIXED, 2)) is WideDeep
    model = build_bottom(" auto : hidden = 3 , final=sigmoid", NUMERIC, 2)
    assert type(model) is MLP
    assert count(model) == 57 * 3 + 3 + 3 * 2 + 2


@pytest.mark.parametrize("name", ["cnn", "resnet20", "marvell-cnn", "gafm-cnn"])
def test_image_models_refuse_tables(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'table'.*mlp.*wide-deep") as caught:
        build_bottom(name, MIXED, 4)
    assert "resnet20," not in str(caught.value)


def test_table_models_refuse_images() -> None:
    image = InputSpec(image=(3, 8, 8))
    with pytest.raises(ConfigError, match=r"'image'.*cnn.*mlp.*resnet20"):
        build_bottom("wide-deep", image, 4)
    with pytest.raises(ConfigError, match="WideDeep takes table"):
        WideDeep(image, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mpl", r"unknown bottom model 'mpl'; known: .*mlp.*resnet20"),
        ("mlp:hiden=3", r"'mlp': unknown parameter 'hiden'; .*hidden=64, activation="),
        ("gafm-imdb:p=1", r"'gafm-imdb'.*'p'.*hidden=256\+128.*dropout=0\.5"),
        ("mlp:hidden=a", r"'mlp': parameter 'hidden' must be .*integer, got 'a'.*=64"),
        ("mlp:hidden=1.5", "must be values joined by '\\+', each an integer"),
        ("mlp:hidden=64++2", "'hidden' must be"),
        ("mlp:dropout=lots", "'dropout' must be a number, got 'lots'"),
        ("mlp:dropout=nan", "'dropout' must be a number"),
        ("mlp:batch_norm=1", "'batch_norm' must be true or false"),
        ("mlp:width=3", "unknown parameter 'width'"),
        ("mlp:dropout=1.0", "'mlp': dropout must be at least 0 and below 1"),
        ("mlp:hidden=0", "'mlp': hidden must be at least 1"),
        ("mlp:embedding=0", "embedding must be at least 1"),
        ("mlp:activation=rlu", "unknown activation 'rlu'; known: .*relu"),
    ],
)
def test_bad_config_strings(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_bottom(text, NUMERIC, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda i: build_bottom("resnet20:shortcut=B", i, 4), "unknown parameter"),
        (lambda i: build_bottom("cnn:kernel=2", i, 4), "kernel must be odd"),
        (lambda i: build_bottom("cnn:channels=none", i, 4), "at least one convolution"),
        (lambda i: build_bottom("marvell-cnn", i, 4), "64×2×1 = 128 columns, not 4"),
        (
            lambda i: build_bottom("marvell-cnn:hidden=3", i, 128),
            "cannot be combined with hidden",
        ),
        (lambda i: build_bottom("cnn", i, 0), "width of the cut layer"),
        (lambda _: build_top("none", 4, 1), "'none'.*cut width must be 1, got 4"),
        (lambda _: build_top("marvell-cnn", 100, 1), "1600 columns.*100 come in"),
        (lambda _: build_top("lin", 4, 1), "unknown top model 'lin'; known: .*linear"),
        (lambda _: build_top("linear:hidden=3", 4, 1), "it takes no parameters"),
    ],
)
def test_impossible_models(
    build: Callable[[InputSpec], nn.Module], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(InputSpec(image=(3, 32, 16)))


def test_every_registered_bottom_model_documents_what_it_takes() -> None:
    for factory in BOTTOM_MODELS.values():
        built = factory.func if isinstance(factory, partial) else factory
        assert issubclass(built, BottomModel)
        assert built.takes <= {"table", "image"}


def test_parse_spec() -> None:
    assert parse_spec("none") == ("none", {})
    assert parse_spec(" a-b : x = 1 ,y=2+3") == ("a-b", {"x": "1", "y": "2+3"})


@pytest.mark.parametrize(
    "text",
    ["", ":", ":a=1", "mlp:", "mlp:a", "mlp:a=", "mlp:=1", "mlp:a=1,", "mlp,a=1",
     "mlp a=1", "mlp:a=1,a=2", "mlp:a b=1"],
)  # fmt: skip
def test_malformed_specs(text: str) -> None:
    with pytest.raises(ConfigError, match=r"name|twice"):
        parse_spec(text)


def everything(
    given: object,
    s: float,
    n: int = 1,
    on: bool = False,
    word: str = "w",
    bound: float | None = None,
    pair: tuple[int, float] = (1, 0.5),
    rates: tuple[float, ...] = (),
    mode: Literal["x", "y"] = "x",
    rng: torch.Generator | None = None,
    plain=(1, 2),  # type: ignore[no-untyped-def]
    *args: int,
    **more: int,
) -> dict[str, object]:
    return dict(locals())


def test_values_take_the_type_of_the_annotation() -> None:
    text = (
        "f:s=1e-3,n=-2,on=True,word=3,bound=0.5,pair=3+4,rates=1+.5,mode=y,plain=5+6+7"
    )
    made = build_from_spec("thing", text, {"f": everything}, "given")
    expected = {
        "given": "given", "s": 0.001, "n": -2, "on": True, "word": "3", "bound": 0.5,
        "pair": (3, 4.0), "rates": (1.0, 0.5), "mode": "y", "plain": (5, 6, 7),
    }  # fmt: skip
    assert {key: made[key] for key in expected} == expected
    assert type(made["n"]) is int and type(made["pair"][1]) is float
    again = typed_arguments("thing", "f", {"s": "1", "bound": "none"}, everything, 1)
    assert again == {"s": 1.0, "bound": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f", "thing 'f' needs a value for s; known parameters: s .required., n=1"),
        ("f:s=1,pair=1", "'pair' must be"),
        ("f:s=1,mode=z", "'mode' must be one of x, y, got 'z'"),
        ("f:s=1,bound=up", "'bound' must be a number or none, got 'up'"),
        ("f:s=1,rng=3", "unknown parameter 'rng'"),
        ("f:s=1,args=3", "unknown parameter 'args'"),
        ("f:s=1,given=3", "unknown parameter 'given'"),
        ("f:s=1,on=maybe", "on=false, word=w, bound=none, pair=1.0.5, rates=none"),
    ],
)
def test_values_that_do_not_fit(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_from_spec("thing", text, {"f": everything}, "given")
