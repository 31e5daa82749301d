"""What holds for every gradient transform, whatever the gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from flower_vfl.errors import PartyError
from flower_vfl.strategies import DEFENSES
from flower_vfl.strategies.defenses.geno import Geno
from flower_vfl.strategies.defenses.gradient_compression import GradientCompression
from flower_vfl.strategies.defenses.marvell.transform import Marvell
from flower_vfl.strategies.defenses.multi_bucket import MultiBucket
from flower_vfl.strategies.defenses.noisy_gradients import NoisyGradients
from flower_vfl.strategies.defenses.ppdl import PPDL
from flower_vfl.strategies.defenses.sgsub import FLSG, SGSub
from flower_vfl.transform import Batch, GradientTransform

# Those that are not registered yet, and all that are.
KNOWN: dict[str, Callable[..., GradientTransform]] = {
    "marvell": Marvell,
    "gradient-compression": GradientCompression,
    "noisy-gradients": NoisyGradients,
    "multi-bucket": MultiBucket,
    "ppdl": PPDL,
    "sgsub": SGSub,
    "flsg": FLSG,
    "geno": Geno,
    **DEFENSES,
}
# Variants whose code takes another way.
VARIANTS: dict[str, Callable[[], GradientTransform]] = {
    **KNOWN,
    "sgsub, literal": lambda: SGSub(literal=True),
    "ppdl, nearly no noise": lambda: PPDL(theta=0.3, sensitivity=1e-9),
    "geno, limit": lambda: Geno(lambda_=1.0),
    "multi-bucket, odd": lambda: MultiBucket(bins=7, bound=1.0),
    "noisy-gradients, much": lambda: NoisyGradients(1e300),
}
RANDOM = ["iso", "max-norm", "marvell", "noisy-gradients", "ppdl", "sgsub", "flsg"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FEW = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
each = pytest.mark.parametrize("name", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def labels_of(rows: int, kind: str = "both") -> Tensor:
    if kind == "both":
        return torch.arange(rows) % 3 // 2  # 0 0 1 0 0 1 ...
    return torch.full((rows,), int(kind == "ones"))


def checked(name: str, gradient: Tensor, kind: str = "both") -> Tensor | None:
    """Return what a transform makes of a gradient, having looked at it."""
    rows = gradient.shape[0] if gradient.ndim else 1
    before = gradient.clone()
    batch = Batch("passive-1", 1, 0, labels_of(rows, kind))
    found = VARIANTS[name]()(gradient, batch)
    assert gradient.equal(before), "the input was changed"
    assert all(np.isfinite(value) for value in batch.metrics.values())
    if found is None:
        assert name.startswith("geno")
        assert batch.metrics["withheld"] == 1.0
        return None
    assert found.shape == gradient.shape
    assert found.dtype == gradient.dtype
    assert found.device == gradient.device
    assert found is gradient or not found.requires_grad
    assert found.isfinite().all()
    return found


def example(
    rows: int = 30, columns: int = 6, dtype: torch.dtype = torch.float32
) -> Tensor:
    source = torch.Generator().manual_seed(7)
    drawn = torch.randn(rows, columns, generator=source)
    return (drawn * 0.01 + 0.01 * labels_of(rows)[:, None]).to(dtype)


@st.composite
def gradients(draw: st.DrawFn) -> Tensor:
    """Return gradients of any dtype, size and shape, zeros and denormals included."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(arrays.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5))
    largest = torch.finfo(dtype).max
    sizes = [size for size in (1.0, 1e-3, 6e4, 1e30, 1e-30, 1e-44) if size <= largest]
    size = draw(st.sampled_from([*sizes, largest, torch.finfo(dtype).tiny]))
    numbers = draw(
        arrays.arrays(
            np.float64,
            shape,
            elements=st.floats(-1.0, 1.0, allow_subnormal=True),
            fill=st.sampled_from([0.0, 0.5, -1.0]),
        )
    )
    return torch.tensor(numbers * size).to(dtype).clamp(-largest, largest)


@each
@FEW
@given(gradient=gradients(), kind=st.sampled_from(["both", "zeros", "ones"]))
def test_finite_in_finite_out(name: str, gradient: Tensor, kind: str) -> None:
    checked(name, gradient, kind)


@each
@every_dtype
def test_sizes(name: str, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    denormal = limits.tiny / 4
    sizes = (0.0, 1.0, -6e4, 1e30, 1e300, limits.max, limits.eps, denormal)
    for size in sizes:
        if abs(size) > limits.max:
            continue
        equal = torch.full((6, 4), size, dtype=dtype)
        two_sided = equal.clone()
        two_sided[2::3] *= -1  # one side for each class
        single = torch.zeros_like(equal)
        single[3, 1] = size
        mixed = example(6, 4).to(dtype)
        mixed[0] = size
        for gradient in (equal, two_sided, single, mixed):
            checked(name, gradient)


@each
@every_dtype
def test_few_rows_and_columns(name: str, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(1)
    for shape in ((0, 4), (3, 0), (1, 1), (1, 9), (7, 1), (7,)):
        gradient = torch.randn(shape, generator=source).to(dtype)
        for kind in ("both", "zeros", "ones"):
            checked(name, gradient, kind)


@each
def test_images_are_rows(name: str) -> None:
    """A gradient of B×C×H×W is treated as B rows of C·H·W entries."""
    rows = example(12, 2 * 3 * 4)
    flat, image = checked(name, rows), checked(name, rows.reshape(12, 2, 3, 4))
    assert flat is not None and image is not None
    assert image.equal(flat.reshape(12, 2, 3, 4))


@each
def test_layout_does_not_matter(name: str) -> None:
    rows = example(12, 8)
    turned = rows.T.contiguous().T
    assert not turned.is_contiguous()
    plain, found = checked(name, rows), checked(name, turned)
    assert plain is not None and found is not None
    assert torch.allclose(found, plain, rtol=1e-5, atol=1e-9)


@each
def test_graphs_are_left_alone(name: str) -> None:
    rows = example().requires_grad_()
    checked(name, rows)
    assert rows.grad is None


@each
@every_dtype
def test_the_same_batch_gives_the_same_result(name: str, dtype: torch.dtype) -> None:
    gradient = example(dtype=dtype)
    first, second = checked(name, gradient), checked(name, gradient)
    assert first is not None and second is not None and first.equal(second)


@pytest.mark.parametrize("name", KNOWN)
def test_other_steps_parties_and_seeds_give_other_noise(name: str) -> None:
    gradient = example(60, 8)
    results = []
    for party, step, seed in (
        ("passive-1", 1, 0),
        ("passive-1", 2, 0),
        ("passive-2", 1, 0),
        ("passive-1", 1, 1),
    ):
        batch = Batch(party, step, seed, labels_of(60))
        found = KNOWN[name]()(gradient, batch)
        assert found is not None
        results.append(found)
    alike = [found.equal(results[0]) for found in results[1:]]
    assert alike == [name not in RANDOM] * 3


@pytest.mark.parametrize("name", KNOWN)
def test_the_global_generator_is_not_touched(name: str) -> None:
    before = torch.get_rng_state()
    checked(name, example())
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("name", KNOWN)
def test_a_state_can_be_saved_and_taken_over(name: str) -> None:
    """With it, a transform made anew goes on like the old one."""
    old, new = KNOWN[name](), KNOWN[name]()
    for step in range(1, 31):
        old(example(), Batch("passive-1", step, 0, labels_of(30)))
    new.load_state_dict(old.state_dict())
    for kind, factor in (("both", 1.0), ("ones", 1.0), ("both", 100.0)):
        batch = Batch("passive-1", 31, 0, labels_of(30, kind))
        ours, theirs = new(example() * factor, batch), old(example() * factor, batch)
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or ours.equal(theirs)


@pytest.mark.parametrize("name", KNOWN)
def test_integers_are_refused(name: str) -> None:
    with pytest.raises(PartyError, match="floating point"):
        KNOWN[name]()(torch.ones(3, 2, dtype=torch.int64), Batch("passive-1", 1, 0))
