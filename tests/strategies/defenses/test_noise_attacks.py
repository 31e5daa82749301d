"""Attacks on the noise itself: each works on what the package once did, and no more.

The figures are in docs/threat-model.md: leak AUC of the gradient as it arrives, and
after the attack, with the noise as it was and as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from flwr.app import Context
from mersenne import WORDS, Word, solve, twister, untemper, words_of_noise
from mersenne import words_of_randn as words_of
from noise_cases import (
    COLUMNS,
    NODES,
    ROWS,
    SEED,
    OldIso,
    TwistedNoise,
    View,
    known_to_all,
    observe,
    repeatable_keys,
)
from torch import Tensor, nn

from flower_vfl import (
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    Objective,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.rows import row_norms
from flower_vfl.strategies import Defense, Iso, VerticalStrategy, build_defense

WIDTH = 32
MARGIN = 0.03  # how much an attack may add to what the gradient leaks as it arrives
ERROR = 5e-7  # of a normal number that was scaled and added to another in float32


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    repeatable_keys(monkeypatch)


def bottom() -> nn.Module:
    return nn.Linear(COLUMNS, WIDTH)


def linear_top() -> CrossEntropy:
    return CrossEntropy(nn.Linear(WIDTH, 1))


PUBLIC = known_to_all(linear_top)


# 1. Noise that can be solved for


def guessed(view: View, objective: CrossEntropy, t: float) -> Tensor | None:
    """Return the gradient without its noise, or None if no guess of it fits.

    The party knows the first weights, or thinks so. The gradient of a row is then one
    of two, and the scale of the noise follows from the longest row, one of a few.
    """
    seen = view.gradients[1][0]
    either = []
    for label in (0.0, 1.0):
        sent = view.embeddings[1][0].clone().requires_grad_()
        either.append(objective.step(sent, torch.full((ROWS,), label)).gradient)
    for scale in likely_scales(seen, either, t):
        guess = Guess(seen, either, scale)
        labels = guess.labels()
        if labels is None:
            continue
        state = solve([w for i, y in enumerate(labels) for w in guess.words(i, y)])
        assert state is not None
        stream = twister([untemper(word) for word in state[:WORDS]])
        noise = torch.randn(seen.numel() - WORDS, generator=stream)  # of the rest
        clean = seen.flatten().clone()
        clean[WORDS:] -= scale * noise
        known = torch.stack([either[y][i] for i, y in enumerate(labels)])
        clean[:WORDS] = known.flatten()[:WORDS]
        return clean.reshape(seen.shape)
    return None


def likely_scales(seen: Tensor, either: list[Tensor], t: float) -> list[float]:
    """Return what the noise may have been multiplied by, the most likely first."""
    longest = torch.cat([row_norms(clean) for clean in either]).tolist()
    scales = [math.sqrt(t / WIDTH) * norm for norm in longest]
    about = float(seen.std())
    return sorted(scales, key=lambda scale: abs(scale - about))[:60]


class Guess:
    """Labels of the first rows that fit what the words of a twister have in common."""

    count = 2048 // WIDTH  # rows, enough for the whole state

    def __init__(self, seen: Tensor, either: list[Tensor], scale: float) -> None:
        self.seen, self.either, self.scale = seen, either, scale
        self._words: dict[tuple[int, int], list[Word]] = {}

    def words(self, row: int, label: int) -> list[Word]:
        """Return what the noise of a row was made of if it has this label."""
        if (row, label) not in self._words:
            noise = (self.seen[row] - self.either[label][row]).double() / self.scale
            self._words[row, label] = words_of(noise, ERROR)
        return self._words[row, label]

    def labels(self) -> list[int] | None:
        """Return the labels of the first rows, from three rows at a time."""
        found: dict[int, int] = {}
        for first in range(self.count - 19):
            rows = first, first + 12, first + 19  # of the words k, k + 397, k + 624
            guesses = product((0, 1), repeat=3)
            fits = [labels for labels in guesses if self._fits(rows, labels)]
            if len(fits) != 1:
                return None
            found.update(zip(rows, fits[0], strict=True))
        return [found[row] for row in range(self.count)]

    def _fits(self, rows: tuple[int, ...], labels: tuple[int, ...]) -> bool:
        words: list[Word | None] = [None] * (WIDTH * (rows[-1] + 1))
        for row, label in zip(rows, labels, strict=True):
            words[WIDTH * row : WIDTH * (row + 1)] = self.words(row, label)
        return solve(words, range(WIDTH * rows[0], WIDTH * rows[0] + 6)) is not None


def public_top() -> CrossEntropy:
    found = PUBLIC()
    assert isinstance(found, CrossEntropy)
    return found


def test_noise_of_the_twister_is_solved_for_without_any_label() -> None:
    view = observe(PUBLIC, bottom, [OldIso(400.0)])
    assert view.leak(view.gradients[1][0]) < 0.7
    found = guessed(view, public_top(), 400.0)
    assert found is not None and view.leak(found) > 0.999


@pytest.mark.parametrize("objective", [linear_top, PUBLIC])
def test_noise_of_the_cipher_fits_no_guess(objective: Callable[[], Objective]) -> None:
    """Not even with the right first weights: the gradient stays as it arrived."""
    view = observe(objective, bottom, [Iso(400.0)])
    assert guessed(view, public_top(), 400.0) is None


HALF, TOLD = ROWS // 2, 64
UNTOLD = [*range(TOLD, HALF), *range(HALF + TOLD, ROWS)]


def told(view: View, t: float) -> Tensor:
    """Return the gradient without the noise that a party with much help finds.

    It is told the scale and half of the clean rows, and inverts ``Noise.normal``. Where
    no state of a twister fits, it does without the equations that contradict others.
    """
    clean, seen = view.clean[1][0], view.gradients[1][0]
    scale = math.sqrt(t / WIDTH) * float(row_norms(clean).max())
    noise = (seen - clean).double() / scale
    pairs = noise[:TOLD], noise[HALF : HALF + TOLD]
    words = words_of_noise(*pairs, ERROR)[: TOLD * WIDTH]
    state = solve(words, strict=False)
    assert state is not None
    stream = TwistedNoise([untemper(word) for word in state[:WORDS]], used=0)
    return seen - scale * stream.normal(seen.shape)


@pytest.mark.parametrize("defense", [OldIso(400.0, TwistedNoise), Iso(400.0)])
def test_the_cipher_protects_and_not_the_formula(defense: Iso) -> None:
    """The same formula of normal numbers, of a twister and of the cipher."""
    view = observe(linear_top, bottom, [defense])
    before = view.leak(view.gradients[1][0], UNTOLD)
    after = view.leak(told(view, 400.0), UNTOLD)
    assert before < 0.75
    if isinstance(defense, OldIso):
        assert after > 0.999
    else:
        assert after < 0.75


def first_weights(nodes: int | list[dict[str, Any]], defense: Defense) -> Tensor:
    """Return the label party's first weights in an app without training."""
    found: list[Tensor] = []

    def label(context: Context) -> LabelParty:
        objective = linear_top()
        found.append(next(objective.parameters()).detach().clone())
        given = torch.arange(ROWS) % 2, objective
        return LabelParty(*given, device="cpu", build_defense=build_defense)

    def passive(context: Context) -> PassiveParty:
        return PassiveParty(torch.ones(ROWS, COLUMNS), bottom(), device="cpu")

    strategy = VerticalStrategy(
        batch_size=ROWS,
        seed=SEED,
        test_fraction=0.0,
        progress=False,
        defense=defense,
    )
    with InProcessGrid(vertical_client_app(passive, label), nodes) as grid:
        strategy.start(grid, num_rounds=1)
    return found[0]


@pytest.mark.parametrize("nodes", [2, NODES])
@pytest.mark.parametrize("defense", ["", "iso"])
def test_first_weights_are_a_secret_where_labels_are_protected(
    nodes: int | list[dict[str, Any]], defense: str
) -> None:
    """In every deployment, and in a simulation with a defense."""
    public = next(public_top().parameters())
    runs = [first_weights(nodes, Defense(defense, at="label")) for _ in range(2)]
    secret = nodes == NODES or defense != ""
    for weights in runs:
        assert torch.equal(weights, public) is not secret
    assert torch.equal(*runs) is not secret


def test_first_weights_repeat_in_a_simulation_with_a_noise_seed() -> None:
    defense = Defense("iso", at="label", noise_seed=3)
    runs = [first_weights(2, defense) for _ in range(2)]
    assert torch.equal(*runs)
    assert torch.equal(runs[0], next(public_top().parameters()))  # for fair pairs
    deployed = [first_weights(NODES, defense) for _ in range(2)]
    assert not torch.equal(*deployed)


# 2. The same noise twice

NARROW = 8  # columns, so that iso:t=25 leaks as little as in the audit
RUNS = 20  # over which figures are averaged


def narrow_bottom() -> nn.Module:
    return nn.Linear(COLUMNS, NARROW)


def narrow_top() -> CrossEntropy:
    return CrossEntropy(nn.Linear(NARROW, 1))


def subtracted(one: Tensor, other: Tensor) -> Tensor:
    """Return the difference in which least noise is left.

    Clean gradients of a linear top model have rank one. The party does not know the
    ratio of the two scales, and takes the one that leaves least beside that rank.
    """

    def rest(ratio: float) -> float:
        return float(torch.linalg.svdvals((one - ratio * other).double())[1])

    low, high = 0.0, 3.0
    for _ in range(60):
        third = (high - low) / 3
        if rest(low + third) < rest(high - third):
            high -= third
        else:
            low += third
    return one - (low + high) / 2 * other


def rewound(defense: Iso, change: Callable[[Tensor], Tensor]) -> View:
    """Return what a party sees that pretends to restart and changes its embedding."""
    given = narrow_top, narrow_bottom, [defense]
    view = observe(*given, steps=4, change=change)
    view.step = 3
    assert len(view.gradients[3]) == 2
    assert not torch.equal(view.clean[3][0], view.clean[3][-1])
    return view


def leaks_of_differences(make: Callable[[], Iso]) -> tuple[float, float]:
    """Return the leak AUC of one gradient, and of its difference to one for zeros."""
    found = []
    for view in (rewound(make(), torch.zeros_like) for _ in range(RUNS)):
        one, other = view.gradients[3]
        found.append([view.leak(one), view.leak(subtracted(one, other))])
    once, difference = torch.tensor(found).mean(dim=0).tolist()
    return once, difference


def test_the_same_noise_twice_is_subtracted() -> None:
    once, difference = leaks_of_differences(lambda: OldIso(25.0))
    assert once < 0.75 and difference > 0.99


def test_another_gradient_of_the_same_step_has_other_noise() -> None:
    once, difference = leaks_of_differences(lambda: Iso(25.0))
    assert difference < once + MARGIN


def test_a_step_that_is_repeated_tells_what_one_more_epoch_tells() -> None:
    """The mean of two gradients has less noise, wherever the second one is from."""
    repeated, epochs = [], []
    for _ in range(RUNS):
        view = rewound(Iso(25.0), lambda sent: 1.001 * sent)
        repeated.append(view.leak(view.gradients[3][0] + view.gradients[3][1]))
        view = observe(narrow_top, narrow_bottom, [Iso(25.0)], steps=2)
        first, second = (view.gradients[step][0] for step in (1, 2))
        back = torch.argsort(view.order[2])[view.order[1]]  # to the rows of step 1
        epochs.append(view.leak(first + second[back]))
    assert sum(repeated) < sum(epochs) + RUNS * MARGIN
