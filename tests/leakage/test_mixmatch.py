"""The parts of MixMatch against hand-worked numbers and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.mixmatch import (
    augmentation,
    can_mix,
    cycle,
    guess_labels,
    mix,
    mixmatch_losses,
    mixup_weights,
    predict,
    sharpen,
    shift_images,
    update_average,
)

CPU = torch.device("cpu")


def labelled_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * torch.log_softmax(logits, dim=1)).sum(dim=1).mean()


def unlabelled_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return (torch.softmax(logits, dim=1) - targets).square().mean()


def test_sharpen() -> None:
    rows = torch.tensor([[0.8, 0.2], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    # 0.8² / (0.8² + 0.2²) = 0.64 / 0.68
    expected = [[0.64 / 0.68, 0.04 / 0.68], [0.5, 0.5], [1.0, 0.0]]
    np.testing.assert_allclose(sharpen(rows, 0.5), expected, rtol=1e-12)
    np.testing.assert_allclose(sharpen(rows, 1.0), rows, rtol=1e-12)
    tiny = torch.tensor([[0.4, 0.3, 0.3]])
    assert sharpen(tiny, 1e-3).tolist() == [[1.0, 0.0, 0.0]]


def test_guess_is_the_sharpened_mean_of_probabilities() -> None:
    first = torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    second = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    logits = torch.stack([first.log(), second.log() + 3.0])
    # mean 0.7, 0.3; squares 0.49, 0.09
    guessed = guess_labels(logits, 0.5)
    np.testing.assert_allclose(guessed, [[0.49 / 0.58, 0.09 / 0.58]], rtol=1e-12)


def test_mixup_weights_follow_the_folded_beta_distribution() -> None:
    torch.manual_seed(0)
    weights = mixup_weights(4000, 0.75, CPU).numpy()
    assert weights.min() >= 0.5 and weights.max() <= 1.0
    beta = stats.beta(0.75, 0.75)

    def folded(x: np.ndarray) -> np.ndarray:
        return beta.cdf(x) - beta.cdf(1 - x)

    assert stats.kstest(weights, folded).pvalue > 0.01
    assert mixup_weights(3, 0.0, CPU).tolist() == [1.0, 1.0, 1.0]


def test_mix() -> None:
    weights = torch.tensor([1.0, 0.75])
    first = torch.tensor([[4.0, 8.0], [4.0, 8.0]])
    second = torch.zeros(2, 2)
    assert mix(first, second, weights).tolist() == [[4.0, 8.0], [3.0, 6.0]]
    pixels = torch.full((2, 1, 1, 1), 255, dtype=torch.uint8)
    black = torch.zeros_like(pixels)
    mixed = mix(pixels, black, torch.tensor([0.5, 0.9]))
    assert mixed.dtype == torch.uint8 and mixed.flatten().tolist() == [128, 230]
    codes = torch.zeros(2, 1, dtype=torch.long)
    assert not can_mix(codes) and can_mix(pixels) and can_mix(first)
    with pytest.raises(ConfigError, match="cannot be mixed"):
        mix(codes, codes, weights)


def test_losses() -> None:
    probabilities = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    logits = probabilities.log() + 1.5  # a constant does not count
    targets = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    unlabelled = torch.tensor([[0.8, 0.2]], dtype=torch.float64).log() - 3.0
    known, unknown = mixmatch_losses(
        nn.Identity(), nn.Identity(), (logits,), targets, [(unlabelled,)], 0.5, 0.0
    )
    assert float(known) == pytest.approx((-np.log(0.75) - np.log(0.5)) / 2)
    assert float(unknown) == pytest.approx((0.8 - 0.64 / 0.68) ** 2)  # see test_sharpen


def test_average_is_the_weighted_mean_of_all_models() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    average = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    seen, decay = [], 0.9
    for step in range(1, 6):
        with torch.no_grad():
            for value in model.state_dict().values():
                value.copy_(torch.full_like(value, step))
        seen.append(float(step))
        update_average(average, model, decay, step)
    weights = decay ** np.arange(5)[::-1]
    expected = np.average(seen, weights=weights)
    state = average.state_dict()
    assert float(state["0.bias"]) == pytest.approx(expected, rel=1e-6)
    assert float(state["1.running_mean"]) == pytest.approx(expected, rel=1e-6)
    assert int(state["1.num_batches_tracked"]) == 5


def test_cycle_sees_every_row_before_any_twice() -> None:
    torch.manual_seed(0)
    batches = cycle(torch.arange(10, 16), 3)
    for _ in range(3):
        seen = [*next(batches).tolist(), *next(batches).tolist()]
        assert sorted(seen) == list(range(10, 16))
    assert len(next(cycle(torch.arange(2), 8))) == 2


def test_shifted_images_are_windows_of_the_reflected_image() -> None:
    torch.manual_seed(0)
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    windows = {
        (row, padded[row, :, y : y + 4, x : x + 5].tobytes())
        for row in range(2)
        for y in range(3)
        for x in range(3)
    }
    seen = set()
    for _ in range(60):
        moved = shift_images(images, 1)
        assert moved.dtype == torch.uint8
        for row in range(2):
            seen.add((row, moved[row].numpy().tobytes()))
    assert seen <= windows and len(seen) > 12
    assert torch.equal(shift_images(images, 0), images)
    mirrored = shift_images(images.repeat(10, 1, 1, 1), 0, flip=True)
    flips = (mirrored == images.repeat(10, 1, 1, 1).flip(-1)).flatten(1).all(dim=1)
    assert 0 < int(flips.sum()) < 20


def test_augmentation_fits_each_input() -> None:
    torch.manual_seed(0)
    table = torch.randn(5000, 2) * torch.tensor([1.0, 100.0])
    table = torch.cat([table, torch.ones(5000, 1)], dim=1)
    codes = torch.randint(0, 9, (5000, 2))
    change = augmentation((table, codes), noise=0.1)
    noisy, same = change((table, codes))
    spread = (noisy - table).std(dim=0)
    np.testing.assert_allclose(spread, [0.1, 10.0, 0.0], rtol=0.05)
    assert torch.equal(same, codes)
    (still,) = augmentation((table,), noise=0.0)((table,))
    assert torch.equal(still, table)


class Spy(nn.Module):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


def test_one_step_mixes_inputs_and_targets_alike() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    spy = Spy()
    targets = torch.tensor([[1.0, 0.0]])
    views = [(logits[1:],), (logits[1:],)]
    known, unknown = mixmatch_losses(
        spy, nn.Identity(), (logits[:1],), targets, views, 0.5, 0.75
    )
    mixed = spy.seen[-1]
    assert mixed.shape == (3, 2)
    # Row i is λ'·own + (1 - λ')·partner, and both sum to 2: read λ' from the mixture.
    guess = sharpen(torch.softmax(logits[1:], dim=1), 0.5)[0]
    share = mixed[:, :1] / 2.0
    wanted = share * targets + (1 - share) * guess
    torch.testing.assert_close(known, labelled_loss(mixed[:1], wanted[:1]))
    torch.testing.assert_close(unknown, unlabelled_loss(mixed[1:], wanted[1:]))
    assert (share[0] >= 0.5).all() and (share[1:] <= 0.5).all()


def test_codes_are_mixed_after_the_embedding() -> None:
    torch.manual_seed(0)
    table, spy = nn.Embedding(5, 3), Spy()
    codes = torch.arange(5)
    mixmatch_losses(
        table, spy, (codes[:1],), torch.eye(3)[:1], [(codes[1:],)], 0.5, 0.75
    )
    plain, mixed = table(codes), spy.seen[-1]
    assert mixed.shape == plain.shape
    assert not torch.allclose(mixed, plain)
    # each row lies between two embeddings: within the hull of the columns
    assert (mixed <= plain.max(dim=0).values + 1e-6).all()


def test_mixing_at_the_cut_layer_leaves_the_inputs_whole() -> None:
    torch.manual_seed(0)
    rows, before, after = torch.randn(12, 2), Spy(), Spy()
    views = [(rows[1:],)]
    mixmatch_losses(
        before, after, (rows[:1],), torch.eye(2)[:1], views, 0.5, 0.75, mix_inputs=False
    )
    assert torch.equal(before.seen[-1], rows)
    assert not torch.allclose(after.seen[-1], rows)


def test_guesses_carry_no_gradient() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    targets = torch.tensor([[1.0, 0.0]])
    rows = torch.randn(3, 2)
    known, unknown = mixmatch_losses(
        layer, nn.Identity(), (rows[:1],), targets, [(rows[1:],)], 0.5, 0.0
    )
    (ours,) = torch.autograd.grad(unknown, layer.weight)
    guessed = sharpen(torch.softmax(layer(rows[1:]), dim=1), 0.5).detach()
    expected = unlabelled_loss(layer(rows[1:]), guessed)
    (theirs,) = torch.autograd.grad(expected, layer.weight)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(known, labelled_loss(layer(rows[:1]), targets))


def test_predict_in_parts() -> None:
    layer = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    rows = torch.randn(2100, 2)
    expected = torch.softmax(layer[0](rows), dim=1)
    torch.testing.assert_close(predict(layer, (rows,)), expected.detach())
