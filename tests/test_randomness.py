"""The stream of noise: its distribution, its order, and what it depends on."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.randomness import Noise, RandomState, derive_key, tensor_digest

COUNT = 200_001  # odd, so that half a pair is left over
TYPES = [torch.float32, torch.float64]


def fits(numbers: Tensor, law: str) -> bool:
    return bool(stats.kstest(numbers.double().numpy(), law).pvalue > 0.01)


@pytest.mark.parametrize("dtype", TYPES)
def test_normal_numbers_are_normal_and_independent(dtype: torch.dtype) -> None:
    drawn = Noise(1, "normal").normal((COUNT,), dtype)
    assert drawn.dtype == dtype and drawn.isfinite().all()
    assert fits(drawn, "norm")
    pairs = (COUNT + 1) // 2
    for one, other in (
        (drawn[:-1], drawn[1:]),  # neighbours
        (drawn[: pairs - 1], drawn[pairs:]),  # the two numbers of a pair
    ):
        for power in (1, 2):  # radius and angle must not be mixed up
            both = torch.stack([one, other]).double() ** power
            assert abs(float(torch.corrcoef(both)[0, 1])) < 0.015
    beyond = (drawn.abs() > 4.0).double().mean() * COUNT
    assert beyond == pytest.approx(2 * stats.norm.sf(4) * COUNT, abs=12)


@pytest.mark.parametrize("dtype", TYPES)
def test_uniform_numbers_are_uniform(dtype: torch.dtype) -> None:
    drawn = Noise(2, "uniform").uniform((COUNT,), dtype)
    assert drawn.dtype == dtype
    assert float(drawn.min()) >= 0.0 and float(drawn.max()) < 1.0
    assert fits(drawn, "uniform")
    both = torch.stack([drawn[:-1], drawn[1:]]).double()
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.01


@pytest.mark.parametrize("dtype", TYPES)
def test_signed_numbers_go_from_minus_one_to_one(dtype: torch.dtype) -> None:
    drawn = Noise(3).signed(COUNT, dtype)
    assert fits((drawn + 1.0) / 2.0, "uniform")


def test_every_order_is_as_likely() -> None:
    stream = Noise(4, "orders")
    drawn = [tuple(stream.permutation(4).tolist()) for _ in range(6000)]
    counts = [drawn.count(order) for order in sorted(set(drawn))]
    assert len(counts) == 24  # all orders of four numbers
    assert stats.chisquare(counts).pvalue > 0.01
    assert Noise(4).permutation(0).tolist() == []
    assert sorted(Noise(4).permutation(1000).tolist()) == list(range(1000))


def test_all_bits_of_integers_are_even() -> None:
    drawn = Noise(5).integers(COUNT)
    for bit in range(64):
        share = float((drawn >> bit & 1).double().mean())
        assert share == pytest.approx(0.5, abs=0.006)


def test_the_bytes_are_those_of_the_cipher() -> None:
    key = derive_key(6, "stage", "passive-1", 3, b"digest")
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    drawn = Noise(6, "stage", "passive-1", 3, b"digest").integers(40)
    assert drawn.numpy().tobytes() == cipher.update(bytes(320))


def test_a_stream_goes_on_and_never_repeats() -> None:
    stream = Noise(7)
    whole = Noise(7).integers(300)
    parts = [stream.integers(count) for count in (0, 1, 99, 200)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(set(whole.tolist())) == 300
    assert not torch.equal(stream.normal((8,)), stream.normal((8,)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (3, 5), (2, 3, 4)])
def test_shapes_are_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for drawn in (Noise(8).normal(shape, dtype), Noise(8).uniform(shape, dtype)):
        assert drawn.shape == shape and drawn.dtype == dtype


LISTS: list[tuple[int | str | bytes, ...]] = [
    (),
    ("",),
    ("", ""),
    (b"",),
    ("a", "bc"),
    ("ab", "c"),
    ("abc",),
    (b"abc",),
    ("a", b"bc"),
    ("str:1:a",),
    ("a", "str:2:bc"),
    ("a\x1fstr:bc",),
    (1,),
    ("1",),
    (b"1",),
    (1, 2),
    (12,),
    (-1,),
    ("passive-1", 11),
    ("passive-11", 1),
]


def test_no_two_lists_of_parts_give_one_key() -> None:
    assert len({derive_key(9, *parts) for parts in LISTS}) == len(LISTS)
    keys = {derive_key(1 << bit, "a") for bit in range(256)}
    assert len(keys) == 256 and {len(key) for key in keys} == {32}


def test_a_key_of_more_than_256_bits_is_refused() -> None:
    for wrong in (2**256, -1):
        with pytest.raises(ConfigError, match="from 0 to"):
            Noise(wrong)


def test_streams_with_other_parts_or_keys_have_nothing_in_common() -> None:
    size = 20_000
    streams = [Noise(9, *parts).normal((size,)) for parts in LISTS]
    streams += [Noise(9 ^ 1 << bit).normal((size,)) for bit in (0, 31, 32, 128, 255)]
    table = torch.corrcoef(torch.stack(streams)).fill_diagonal_(0.0)
    assert float(table.abs().max()) < 4.5 / size**0.5
    for one, other in combinations(streams[:6], 2):
        assert not torch.isin(one, other).sum() > 20  # nor a part of it elsewhere


def test_a_digest_depends_on_every_entry_and_part() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    changed = rows.clone()
    changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(99.0))
    found = [
        tensor_digest(rows, 1, "a", 1),
        tensor_digest(changed, 1, "a", 1),
        tensor_digest(rows, 2, "a", 1),
        tensor_digest(rows, 1, "b", 1),
        tensor_digest(rows, 1, "a", 2),
        tensor_digest(rows.double(), 1, "a", 1),
    ]
    assert len(set(found)) == len(found)
    strided = rows.T.contiguous().T
    assert tensor_digest(strided, 1, "a", 1) == found[0]
    assert tensor_digest(torch.empty(0), 1) != tensor_digest(torch.zeros(1), 1)


def test_a_state_of_torch_is_filled_by_noise() -> None:
    """With all its words, of which torch's own seeding sets 32 bits."""

    def drawn(*parts: int | str) -> Tensor:
        with RandomState(Noise(10, *parts)):
            return torch.randn(1000)

    assert torch.equal(drawn("a"), drawn("a"))
    assert not torch.equal(drawn("a"), drawn("b"))
    number = int(Noise(10, "a").integers(1)) >> 1
    with RandomState(number):
        assert not torch.equal(drawn("a"), torch.randn(1000))
