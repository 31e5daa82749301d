"""Bottom and top models, and the config strings that name them."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.inputs import InputSpec
from flower_vfl.simulations.models import (
    BOTTOM_MODELS,
    CNN,
    MLP,
    TOP_MODELS,
    BottomModel,
    ResNet20,
    WideDeep,
    auto_bottom,
    build_bottom,
    build_top,
)
from flower_vfl.spec import build_from_spec, parse_spec, typed_arguments

NUMERIC = InputSpec(numeric=57)
MIXED = InputSpec(numeric=3, cardinalities=(5, 7))
CATEGORICAL = InputSpec(cardinalities=(5, 7, 2))
STRIPS = [(3, 32, 16), (3, 50, 25), (1, 8, 4), (1, 64, 21), (3, 1, 1), (3, 5, 40)]


def make_inputs(spec: InputSpec, rows: int = 6, seed: int = 0) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    if spec.image is not None:
        shape = (rows, *spec.image)
        return (torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8),)
    inputs = []
    if spec.numeric:
        inputs.append(torch.randn(rows, spec.numeric, generator=rng))
    if spec.cardinalities:
        columns = [
            torch.randint(0, codes, (rows,), generator=rng)
            for codes in spec.cardinalities
        ]
        inputs.append(torch.stack(columns, dim=1))
    return tuple(inputs)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def paper_width(name: str, spec: InputSpec, width: int) -> int:
    """The width, or for the CNN without a linear layer the one that it demands."""
    if name != "marvell-cnn" or spec.image is None:
        return width
    _, height, breadth = spec.image
    for _ in range(4):
        height, breadth = max(height // 2, 1), max(breadth // 2, 1)
    return 64 * height * breadth


ABLE = [
    (name, spec)
    for name in BOTTOM_MODELS
    for spec in (NUMERIC, MIXED, CATEGORICAL, *(InputSpec(image=s) for s in STRIPS))
    if name.startswith(("mlp", "gafm-spam", "gafm-imdb", "gafm-orig", "ladsg"))
    or (spec.image is None) == ("deep" in name)
]


@pytest.mark.parametrize(("name", "spec"), ABLE)
def test_shape_determinism_and_untouched_inputs(name: str, spec: InputSpec) -> None:
    width = paper_width(name, spec, 5)
    inputs = make_inputs(spec)
    before = [x.clone() for x in inputs]
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        model = build_bottom(name, spec, width)
        outputs.append(model(*inputs))
    assert outputs[0].shape == (6, width)
    assert outputs[0].dtype == torch.float32
    assert torch.equal(outputs[0], outputs[1])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    torch.manual_seed(4)
    assert not torch.equal(build_bottom(name, spec, width)(*inputs), outputs[0])


@pytest.mark.parametrize(("name", "spec"), ABLE)
def test_gradient_reaches_every_parameter(name: str, spec: InputSpec) -> None:
    torch.manual_seed(0)
    model = build_bottom(name, spec, paper_width(name, spec, 5))
    cut = model(*make_inputs(spec, rows=64))
    (cut * torch.randn_like(cut)).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", TOP_MODELS)
def test_top_models(name: str) -> None:
    in_width = {"none": 3, "marvell-cnn": 1600}.get(name, 20)
    torch.manual_seed(0)
    model = build_top(name, in_width, 3)
    cut = torch.randn(8, in_width, requires_grad=True)
    logits = model(cut)
    assert logits.shape == (8, 3)
    logits.square().sum().backward()
    assert cut.grad is not None and cut.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_parameter_counts_by_hand() -> None:
    # 57·16 + 16 + 16 + 1
    assert count(build_bottom("gafm-spambase", NUMERIC, 1)) == 945
    imdb = build_bottom("gafm-imdb", InputSpec(numeric=500), 1)
    assert count(imdb) == (500 * 256 + 256) + (256 * 128 + 128) + (128 + 1)
    # embeddings 4·(5+7); 3 + 4·2 = 11 columns into 64, then 8
    assert count(MLP(MIXED, 8)) == 48 + (11 * 64 + 64) + (64 * 8 + 8)
    # batch norm adds a scale and a shift per unit
    assert count(MLP(MIXED, 8, batch_norm=True)) == count(MLP(MIXED, 8)) + 128
    deep = 48 + (11 * 128 + 128) + (128 * 128 + 128) + (128 * 8 + 8)
    wide = 12 + (5 * 8 + 8)
    assert count(WideDeep(MIXED, 8)) == deep + wide
    assert count(WideDeep(MIXED, 8, wide=False)) == deep
    assert count(build_top("linear", 20, 10)) == 210
    assert count(build_top("mlp:hidden=8+4", 20, 1)) == 168 + 36 + 5
    assert count(build_top("none", 1, 1)) == 0


def test_models_of_the_papers() -> None:
    isic = InputSpec(image=(3, 84, 84))
    marvell = build_bottom("marvell-cnn", isic, 1600)
    assert count(marvell) == (27 * 64 + 64) + 3 * (576 * 64 + 64)
    assert isinstance(marvell, CNN)
    maps = marvell.features[:-1](torch.zeros(1, 3, 84, 84))
    assert maps.shape == (1, 64, 5, 5)
    # 5×5 → 2×2 → 1×1, so 64 columns into the 64-unit layer
    top = build_top("marvell-cnn", 1600, 1)
    assert count(top) == 2 * (576 * 64 + 64) + (64 * 64 + 64) + 65

    gafm = build_bottom("gafm-cnn", InputSpec(image=(1, 64, 64)), 40)
    assert isinstance(gafm, CNN)
    flat = gafm.features(torch.zeros(1, 1, 64, 64))
    assert flat.shape == (1, 32 * 6 * 6)
    convolutions = (9 * 6 + 6) + (54 * 16 + 16) + (144 * 32 + 32)
    dense = (1152 * 120 + 120) + (120 * 84 + 84) + (84 * 40 + 40)
    assert count(gafm) == convolutions + dense

    criteo = InputSpec(numeric=14, cardinalities=(10,) * 27)
    deep = build_bottom("marvell-wide-deep", criteo, 128)
    columns = 14 + 4 * 27
    assert count(deep) == 4 * 270 + (columns * 128 + 128) + 2 * (128 * 128 + 128)
    assert (deep(*make_inputs(criteo)) >= 0).all()
    # the wide part, for a label party that sees the columns
    wide = build_bottom("mlp:hidden=none,embedding=1", criteo, 1)
    assert count(wide) == 270 + (14 + 27) + 1


def test_resnet20_has_its_known_size() -> None:
    spec = InputSpec(image=(3, 32, 32))
    assert count(ResNet20(spec, 10)) == 269_722
    # 1×1 convolutions 16→32 and 32→64 with batch norms
    assert count(build_bottom("resnet20:shortcut=B", spec, 10)) == 272_474
    model = ResNet20(spec, 10)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 19
    maps = model.blocks(torch.zeros(1, 16, 32, 32))
    assert maps.shape == (1, 64, 8, 8)


def test_option_a_shortcut_thins_and_pads() -> None:
    shortcut = ResNet20(InputSpec(image=(3, 8, 8)), 2).blocks[3].shortcut
    x = torch.randn(2, 16, 5, 8)
    out = shortcut(x)
    assert out.shape == (2, 32, 3, 4)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()


def test_residual_block_adds_its_input() -> None:
    block = ResNet20(InputSpec(image=(3, 8, 8)), 2).blocks[0].eval()
    x = torch.randn(2, 16, 4, 4)
    torch.testing.assert_close(block(x), torch.relu(x + block.residual(x)))


def test_mlp_computes_what_it_says() -> None:
    spec = InputSpec(numeric=2, cardinalities=(3,))
    model = MLP(spec, 1, hidden=(2,), embedding=1, final="sigmoid")
    values = {
        "encoder.embeddings.0.weight": [[0.0], [2.0], [-1.0]],
        "layers.0.weight": [[1.0, 0.0, 1.0], [0.0, 1.0, -1.0]],
        "layers.0.bias": [0.0, 0.5],
        "layers.2.weight": [[1.0, -2.0]],
        "layers.2.bias": [0.25],
    }
    model.load_state_dict({k: torch.tensor(v) for k, v in values.items()})
    out = model(torch.tensor([[1.0, 4.0], [-3.0, 1.0]]), torch.tensor([[1], [2]]))
    # row 1: relu(3)=3, relu(4-2+.5)=2.5 → 3-5+.25; row 2: relu(-4)=0, 2.5 → -4.75
    expected = torch.sigmoid(torch.tensor([[-1.75], [-4.75]]))
    torch.testing.assert_close(out, expected)


def test_wide_and_deep_parts_are_summed_before_the_final_activation() -> None:
    torch.manual_seed(0)
    model = WideDeep(MIXED, 4, final="tanh")
    inputs = make_inputs(MIXED)
    assert model.wide is not None and model.wide_encoder is not None
    deep = model.deep(model.deep_encoder(*inputs))
    wide = model.wide(model.wide_encoder(*inputs))
    torch.testing.assert_close(model(*inputs), torch.tanh(deep + wide))


@pytest.mark.parametrize("name", ["mlp", "wide-deep"])
def test_each_column_has_its_own_embedding(name: str) -> None:
    torch.manual_seed(0)
    model = build_bottom(name, CATEGORICAL, 4)
    base = torch.tensor([[1, 1, 1]])
    for column in range(3):
        other = base.clone()
        other[0, column] = 0
        assert not torch.allclose(model(base), model(other))
    assert not torch.allclose(model(torch.tensor([[1, 2, 1]])), model(base))
    swapped = torch.tensor([[2, 1, 1]])
    assert not torch.allclose(model(torch.tensor([[1, 2, 1]])), model(swapped))


def test_an_unseen_value_starts_at_zero_but_is_trainable() -> None:
    model = MLP(CATEGORICAL, 2)
    for table in model.encoder.embeddings:
        assert not table.weight[0].any() and table.weight[1:].any()
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    assert all(t.weight.grad[0].any() for t in model.encoder.embeddings)


def test_images_are_normalised_to_plus_minus_one() -> None:
    model = MLP(InputSpec(image=(1, 1, 3)), 1)
    pixels = torch.tensor([[[[0, 255, 51]]]], dtype=torch.uint8)
    expected = torch.tensor([[-1.0, 1.0, -0.6]])
    torch.testing.assert_close(model.encoder(pixels), expected)
    with pytest.raises(ConfigError, match="uint8"):
        model(pixels.float())


def test_dropout_only_while_training() -> None:
    model = build_bottom("gafm-imdb", NUMERIC, 1)
    inputs = make_inputs(NUMERIC)
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("text", "spec", "shape"),
    [
        ("mlp:hidden=7+3,batch_norm=true,dropout=0.1", NUMERIC, (6, 7)),
        ("mlp:hidden=none", NUMERIC, (6, 5)),
        ("wide-deep:hidden=9", MIXED, (6, 9)),
        ("wide-deep:hidden=none", MIXED, (6, 5)),
        ("cnn", InputSpec(image=(3, 32, 16)), (6, 16, 32, 16)),
        ("cnn:batch_norm=true", InputSpec(image=(3, 32, 16)), (6, 16, 32, 16)),
        ("resnet20", InputSpec(image=(3, 32, 16)), (6, 16, 32, 16)),
    ],
)
def test_first_layer_can_be_hooked(
    text: str, spec: InputSpec, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = build_bottom(text, spec, 5)
    seen: list[Tensor] = []
    model.first_layer.register_forward_hook(lambda _m, _i, out: seen.append(out))
    cut = model(*make_inputs(spec))
    assert [tuple(out.shape) for out in seen] == [shape]
    (gradient,) = torch.autograd.grad(cut.square().sum(), seen)
    assert gradient.any()
    if "none" not in text:
        assert (seen[0] >= 0).all()


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
        (lambda i: build_bottom("resnet20:shortcut=C", i, 4), "one of A, B, got 'C'"),
        (lambda i: build_bottom("cnn:kernel=2", i, 4), "kernel must be odd"),
        (lambda i: build_bottom("cnn:channels=none", i, 4), "at least one convolution"),
        (lambda i: build_bottom("marvell-cnn", i, 4), "64×2×1 = 128 columns, not 4"),
        (lambda i: build_bottom("marvell-cnn:hidden=3", i, 128), "no room for hidden"),
        (lambda i: build_bottom("cnn", i, 0), "width of the cut layer"),
        (lambda i: ResNet20(i, 4, shortcut="C"), "shortcut must be 'A' or 'B'"),
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


def test_wrong_number_of_inputs() -> None:
    model = MLP(MIXED, 4)
    with pytest.raises(ConfigError, match=r"2 tensor\(s\), got 1"):
        model(make_inputs(MIXED)[0])


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
