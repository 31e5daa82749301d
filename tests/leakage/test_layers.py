"""Gradients at every layer, beside those that autograd gives by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from records_cases import series_of
from torch import Tensor, nn
from vertical_cases import (
    COLUMNS,
    WIDTH,
    StatelessGrid,
    assert_equal,
    features,
    final_states,
    rich_app,
)

from flower_vfl import InProcessGrid
from flower_vfl.leakage.meter import LayerProbe
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.checkpoints import from_bytes, to_bytes
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.strategies import Checkpoints, Defense, VerticalResult, VerticalStrategy

ROWS = 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probed(model: nn.Module, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    probe = LayerProbe(model)
    with probe:
        output = model(inputs)
    assert probe.gradients == {}  # not before the backward pass
    output.backward(gradient)
    return probe.gradients


def test_linear_layers_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, gradient = draw(ROWS, 5), draw(ROWS, 3, seed=1)
    found = probed(model, x, gradient)
    assert list(found) == ["0", "2"]  # layers in their order, and no activations
    assert torch.equal(found["2"], gradient)
    hidden = torch.tanh(x @ model[0].weight.T + model[0].bias)
    expected = (gradient @ model[2].weight) * (1 - hidden**2)
    torch.testing.assert_close(found["0"], expected)


def test_an_activation_in_place_does_not_hide_the_layer() -> None:
    """The gradient wanted is that of the layer's output, before the ReLU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    x, gradient = draw(ROWS, 5), draw(ROWS, 3, seed=1)
    found = probed(model, x, gradient)
    before = x @ model[0].weight.T + model[0].bias
    expected = (gradient @ model[2].weight) * (before > 0)
    torch.testing.assert_close(found["0"], expected)
    assert bool((found["0"] == 0).any()) and bool((found["0"] != 0).any())


def test_convolution_and_normalisation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(3 * 16, 2),
    )
    x, gradient = draw(ROWS, 2, 4, 4), draw(ROWS, 2, seed=1)
    found = probed(model, x, gradient)
    outputs = [x]
    for layer in model:
        part = layer(outputs[-1].clone())  # so that nothing is changed in place
        part.retain_grad()
        outputs.append(part)
    outputs[-1].backward(gradient)
    assert {name: tuple(g.shape) for name, g in found.items()} == {
        "0": (ROWS, 3, 4, 4),
        "1": (ROWS, 3, 4, 4),
        "4": (ROWS, 2),
    }
    for name, gradient in found.items():
        expected = outputs[int(name) + 1].grad
        assert expected is not None
        torch.testing.assert_close(gradient, expected)


class Twice(nn.Module):
    """One module for two halves of the input, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shared = nn.Linear(4, 3)
        self.again = self.shared
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.shared(x[:, :4]), self.again(x[:, 4:])
        result: Tensor = self.scale * left * right
        return result


def test_a_shared_module_is_a_layer_for_each_use() -> None:
    torch.manual_seed(0)
    model = Twice()
    x, gradient = draw(ROWS, 8), draw(ROWS, 3, seed=1)
    found = probed(model, x, gradient)
    assert list(found) == ["shared", "shared#2", "Twice"]
    left, right = model.shared(x[:, :4]), model.shared(x[:, 4:])
    torch.testing.assert_close(found["shared"], gradient * right)
    torch.testing.assert_close(found["shared#2"], gradient * left)
    assert torch.equal(found["Twice"], gradient)


def test_what_has_no_gradient_is_left_out() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.memory = nn.LSTM(4, 3, batch_first=True)
            self.last = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            states, _ = self.memory(self.frozen(x))  # a tuple
            result: Tensor = self.last(states[:, -1])
            return result

    found = probed(Odd(), draw(ROWS, 5, 4), draw(ROWS, 2, seed=1))
    assert list(found) == ["last"]


def test_a_look_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match="shapes"), LayerProbe(model):
        model(draw(ROWS, 6))
    assert all(not module._forward_hooks for module in model.modules())


def party() -> PassiveParty:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(COLUMNS, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(8, WIDTH),
    )
    made = PassiveParty(features(1), model, name="p", device="cpu")
    made.configure(TrainingConfig(seed=1, batch_size=16))
    return made


def test_a_party_trains_the_same_and_tells_its_layers() -> None:
    plain, looked = party(), party()
    for index in range(3):
        gradient = draw(16, WIDTH, seed=index)
        plain.forward(index + 1, 1, index)
        assert plain.backward(index + 1, gradient) == {}
        looked.forward(index + 1, 1, index, probed=True)
        found = looked.backward(index + 1, gradient, probed=True)
        assert list(found) == ["0", "1", "4"]
        assert torch.equal(found["4"], gradient)
    assert_equal(looked.state_dict(), plain.state_dict())


def test_a_repeated_forward_pass_has_the_same_layers() -> None:
    """On stateless runtimes the graph is lost, and dropout must be the same again."""
    stays, first = party(), party()
    for index in range(3):
        gradient = draw(16, WIDTH, seed=index)
        for each in (stays, first):
            each.forward(index + 1, 1, index, probed=True)
        second = party()
        second.load_state_dict(from_bytes(to_bytes(first.state_dict())))
        expected = stays.backward(index + 1, gradient, probed=True)
        assert_equal(second.backward(index + 1, gradient, probed=True), expected)
        assert len(expected) == 3
        first = second


def test_a_withheld_gradient_has_no_layers() -> None:
    alone = party()
    alone.forward(1, 1, 0, probed=True)
    assert alone.backward(1, None, probed=True) == {}


def test_a_frozen_model_has_no_layers() -> None:
    frozen = party()
    frozen.model.requires_grad_(False)
    frozen.forward(1, 1, 0, probed=True)
    assert frozen.trace_layers(1, draw(16, WIDTH)) == {}
    assert frozen.backward(1, draw(16, WIDTH), probed=True) == {}


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda count: -1, id="a new process per message"),
        pytest.param(lambda count: count % 2, id="two processes in turn"),
    ],
)
def test_stateless_runtimes_measure_the_same(
    choose: Callable[[int], int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    def outcome(kind: str) -> tuple[VerticalResult, object]:
        folder = tmp_path_factory.mktemp(kind)
        config = {"state-dir": str(folder)}
        grid = (
            InProcessGrid(rich_app(), 3, config)
            if kind == "in-process"
            else StatelessGrid(rich_app(), 3, config, choose)
        )
        strategy = VerticalStrategy(
            batch_size=16,
            seed=3,
            leakage=Leakage(("norm", "cosine"), limit=0.6, window=2, layers=True),
            progress=False,
            defense=Defense("marvell:s=4", noise_seed=7),
            checkpoints=Checkpoints(keep_final=True),
        )
        return strategy.start(grid, num_rounds=2), final_states(folder)

    expected, states = outcome("in-process")
    found, others = outcome("stateless")
    assert series_of(found) == series_of(expected)
    assert_equal(others, states)
    assert "leak_norm@4/passive-2" in series_of(found)


def test_another_gradient_is_traced_before_the_backward_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    x, gradient, clean = draw(ROWS, 5), draw(ROWS, 3, seed=1), draw(ROWS, 3, seed=2)
    probe = LayerProbe(model)
    with probe:
        output = model(x)
    traced = probe.trace(output, clean)
    assert all(weight.grad is None for weight in model.parameters())
    output.backward(gradient)
    assert_equal(probe.gradients, probed(model, x, gradient))
    assert_equal(traced, probed(model, x, clean))
    known = weakref.ref(probe)
    del probe, output
    assert known() is None  # nor does it keep the graph of the pass


def test_the_cosine_attack_on_a_layer_knows_a_clean_gradient() -> None:
    """Without an activation behind it, the last layer's gradient is the cut layer's."""
    strategy = VerticalStrategy(
        batch_size=32,
        leakage=Leakage(("cosine",), layers=True),
        progress=False,
        defense=Defense("iso:t=25", noise_seed=7),
    )
    result = strategy.start(InProcessGrid(rich_app(), 3), num_rounds=1)
    found = series_of(result)
    assert found["leak_cosine@4/passive-2"] == found["leak_cosine/passive-2"]
