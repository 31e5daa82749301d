"""Bottom and top models: shapes, sizes, gradients and what they compute."""

import numpy as np
import pytest
import torch
from model_cases import CATEGORICAL, MIXED, NUMERIC, count, make_inputs
from PIL import Image
from torch import nn

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets.types import InputSpec
from flower_vfl.simulations.models import (
    BOTTOM_MODELS,
    CNN,
    MLP,
    TOP_MODELS,
    ResNet20,
    WideDeep,
    build_bottom,
    build_top,
)

STRIPS = [(3, 32, 16), (3, 50, 25), (1, 8, 4), (1, 64, 21), (3, 1, 1), (3, 5, 40)]


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
    if name.startswith(("mlp", "gafm-spam", "gafm-imdb", "gafm-orig", "ladsg-f"))
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
    colour = build_bottom("gafm-cnn", InputSpec(image=(3, 64, 64)), 40)
    assert count(colour) == count(gafm)
    colour.load_state_dict(gafm.state_dict())
    picture = torch.randint(256, (1, 3, 64, 64), dtype=torch.uint8)
    gray = Image.fromarray(picture[0].permute(1, 2, 0).numpy()).convert("L")
    same = gafm(torch.from_numpy(np.array(gray))[None, None])
    torch.testing.assert_close(colour(picture), same, atol=5e-3, rtol=0.05)
    layers = build_bottom("gafm-wide-deep", InputSpec(cardinalities=(9, 9)), 1).deep
    assert [type(layer).__name__ for layer in layers][:4] == [
        "Linear",
        "BatchNorm1d",
        "ReLU",
        "Dropout",
    ]

    half = build_bottom("ladsg-cnn", InputSpec(image=(3, 32, 16)), 64)
    assert isinstance(half, CNN)
    assert half.features(torch.zeros(1, 3, 32, 16)).shape == (1, 64 * 4 * 2)

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
    assert model.wide_encoder is not None
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
    torch.testing.assert_close(model(pixels), model.layers(expected))
    with pytest.raises(ConfigError, match="uint8"):
        model(pixels.float())


def test_dropout_only_while_training() -> None:
    model = build_bottom("gafm-imdb", NUMERIC, 1)
    inputs = make_inputs(NUMERIC)
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))


def test_wrong_number_of_inputs() -> None:
    model = MLP(MIXED, 4)
    with pytest.raises(ConfigError, match=r"2 tensor\(s\), got 1"):
        model(make_inputs(MIXED)[0])


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_pooling_first_changes_neither_output_nor_gradient(activation: str) -> None:
    spec = InputSpec(image=(3, 8, 8))
    model = build_bottom(
        f"cnn:channels=4,linear=false,activation={activation}", spec, 64
    )
    (image,) = make_inputs(spec)
    convolution = model.features[0]
    convolved = convolution(image.float() / 127.5 - 1.0)
    act = torch.relu if activation == "relu" else torch.nn.functional.gelu
    expected = torch.nn.functional.max_pool2d(act(convolved), 2).flatten(1)
    found = model(image)
    torch.testing.assert_close(found, expected)
    slopes = [
        torch.autograd.grad(each.square().sum(), convolution.weight)[0]
        for each in (found, expected)
    ]
    torch.testing.assert_close(*slopes)


def test_the_wide_part_of_the_label_party_is_added_to_the_logit() -> None:
    top = build_top("marvell-wide-deep", 129, 1)
    own, cut = torch.rand(7, 1), torch.rand(7, 128)
    assert torch.equal(top(torch.cat([own, cut], dim=1)), top.deep(cut) + own)
    assert count(top) == 3 * (128 * 128 + 128) + 129
