from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import secrets
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import mpmath
import numpy as np
import pytest
from Crypto.Util.number import isPrime
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import HASHED, INVALID, MULTIPLES

from flower_vfl.alignment import GROUPS
from flower_vfl.alignment import elements as elements_module
from flower_vfl.alignment import groups as groups_module
from flower_vfl.alignment.elements import (
    Elements,
    InvalidElementError,
    ListError,
    check_distinct,
    order_of,
)
from flower_vfl.alignment.groups import (
    PRIMES,
    Modp,
    Ristretto255,
    bundled_sodium,
    jacobi,
    make_group,
    prepared,
)
from flower_vfl.errors import ConfigError

SIZES = {"ristretto255": 32, "modp2048": 256, "modp3072": 384}


def rows(*texts: bytes) -> Elements:
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), -1)


def numbers(group: Modp, *values: int) -> Elements:
    return rows(*(value.to_bytes(group.size, "big") for value in values))


def test_registry() -> None:
    assert {name: make_group(name).size for name in GROUPS} == SIZES
    assert make_group().name == "ristretto255"
    with pytest.raises(ConfigError, match="modp2048, modp3072, ristretto255"):
        make_group("p256")


@pytest.mark.parametrize("name", GROUPS)
def test_exponentiations_commute_and_the_inverse_undoes(name: str) -> None:
    group = make_group(name)
    hashed = group.hash([b"a", b"b", b"c"])
    one, two = group.random_key(), group.random_key()
    both = group.power(group.power(hashed, one), two)
    np.testing.assert_array_equal(both, group.power(group.power(hashed, two), one))
    np.testing.assert_array_equal(both, group.power(hashed, group.product(one, two)))
    inverses = [pow(key, -1, group.order) for key in (one, two)]
    back = group.power(group.power(both, inverses[1]), inverses[0])
    np.testing.assert_array_equal(back, hashed)
    assert not (both == hashed).all(axis=1).any()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.binary(), min_size=1, max_size=4, unique=True),
    st.integers(1, 2**252),
    st.integers(1, 2**252),
)
def test_ristretto_keys_commute(messages: list[bytes], one: int, two: int) -> None:
    group = make_group()
    hashed = group.hash(messages)
    both = group.power(group.power(hashed, one), two)
    np.testing.assert_array_equal(both, group.power(group.power(hashed, two), one))
    undo = pow(one * two, -1, group.order)
    np.testing.assert_array_equal(group.power(both, undo), hashed)
    group.validate(both)
    assert len(np.unique(both, axis=0)) == len(messages)


@pytest.mark.parametrize("name", GROUPS)
def test_hash_separates_messages_sessions_and_groups(name: str) -> None:
    group = make_group(name)
    messages = [b"", b"a", b"b", b"ab"]
    outcomes = [group.hash(messages, context) for context in (b"", b"a", b"other")]
    every = np.concatenate(outcomes)
    assert len(np.unique(every, axis=0)) == len(every)
    group.validate(every)
    np.testing.assert_array_equal(group.hash(messages, b"a"), outcomes[1])


def test_the_tag_stands_before_every_message() -> None:
    def framed(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "big") + part for part in parts)

    group = make_group("modp2048")
    assert isinstance(group, Modp)
    tag = framed(b"flower-vfl/alignment/v1", b"modp2048", b"session")
    digest = hashlib.shake_256(tag + b"id").digest(256 + 16)
    expected = pow(int.from_bytes(digest, "big"), 2, group.prime)
    got = int.from_bytes(group.hash([b"id"], b"session").tobytes(), "big")
    assert got == expected


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_lists_of_every_length(name: str, count: int) -> None:
    group = make_group(name)
    hashed = group.hash([b"%d" % number for number in range(count)])
    assert hashed.shape == (count, group.size)
    raised = group.power(hashed, group.random_key())
    assert raised.shape == hashed.shape
    group.validate(raised)
    np.testing.assert_array_equal(group.decode(group.encode(raised)), raised)


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_and_threads_do_not_change_a_list(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elements_module, "cores", lambda: threads)
    group = make_group()
    monkeypatch.setattr(group, "_chunk", 7)
    messages = [b"%d" % number for number in range(50)]
    key = group.random_key()
    hashed = group.hash(messages)
    raised = group.power(hashed, key)
    single = [group.power(hashed[n : n + 1], key)[0] for n in range(50)]
    np.testing.assert_array_equal(raised, np.stack(single))
    broken = hashed.copy()
    broken[[23, 41]] = 0
    for call in (lambda: group.power(broken, key), lambda: group.validate(broken)):
        with pytest.raises(InvalidElementError, match="element 23 is the identity"):
            call()


@pytest.mark.parametrize("name", GROUPS)
def test_wrong_shapes_and_keys(name: str) -> None:
    group = make_group(name)
    hashed = group.hash([b"a", b"b"])
    with pytest.raises(InvalidElementError):
        group.power(hashed[:, :-1], 3)
    with pytest.raises(InvalidElementError):
        group.validate(hashed.astype(np.uint16))
    with pytest.raises(InvalidElementError):
        group.decode(group.encode(hashed)[:-1])
    for key in (0, -1, group.order):
        with pytest.raises(ValueError, match="order"):
            group.power(hashed, key)


def test_keys_are_fresh_and_in_range() -> None:
    for name in GROUPS:
        group = make_group(name)
        keys = {group.random_key() for _ in range(50)}
        assert len(keys) == 50
        assert all(0 < key < group.order for key in keys)
    assert {make_group("modp2048").random_key().bit_length() for _ in range(9)} == {256}
    assert {make_group("modp3072").random_key().bit_length() for _ in range(9)} == {320}
    # three short keys together stay short
    group = make_group("modp3072")
    assert group.product(*(group.random_key() for _ in range(3))).bit_length() <= 960


# ristretto255 -------------------------------------------------------------------------


def test_multiples_of_the_generator() -> None:
    group = Ristretto255()
    generator = rows(bytes.fromhex(MULTIPLES[0]))
    for factor, expected in enumerate(MULTIPLES, start=1):
        assert group.power(generator, factor).tobytes().hex() == expected
    minus_one = group.power(generator, group.order - 1)
    group.validate(minus_one)
    assert minus_one.tobytes().hex() not in MULTIPLES


@pytest.mark.parametrize("text", HASHED)
def test_hash_to_group_vectors(text: str) -> None:
    target = np.empty((1, 32), np.uint8)
    Ristretto255()._hash_rows([text.encode()], target)
    assert target.tobytes().hex() == HASHED[text]


# A generator's multiple with bit 255 set, which libsodium 1.0.18 accepts
BIT_255 = [text[:62] + f"{int(text[62:], 16) | 128:02x}" for text in MULTIPLES[:3]]


@pytest.mark.parametrize("text", [*INVALID, *BIT_255, "00" * 32])
def test_invalid_encodings_are_refused(text: str) -> None:
    group = Ristretto255()
    bad = rows(bytes.fromhex(MULTIPLES[3]), bytes.fromhex(text))
    reason = "identity" if text == "00" * 32 else "canonical"
    with pytest.raises(InvalidElementError, match=f"element 1 is.*{reason}"):
        group.validate(bad)
    with pytest.raises(InvalidElementError, match=f"element 1 is.*{reason}"):
        group.power(bad, group.random_key())


def test_the_wheel_gives_the_same_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("rbcl") is None:  # importing it would leave a file
        pytest.skip("rbcl is not installed")
    for name in [name for name in sys.modules if name.split(".")[0] == "rbcl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library = bundled_sodium()
    assert library is not None and str(tmp_path) in library._name
    assert not list(tmp_path.iterdir())
    group = Ristretto255(prepared(library))
    hashed = group.hash([b"id", b"other"], b"s")
    np.testing.assert_array_equal(hashed, Ristretto255().hash([b"id", b"other"], b"s"))
    key = group.random_key()
    np.testing.assert_array_equal(
        group.power(hashed, key), Ristretto255().power(hashed, key)
    )


def test_without_any_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_module, "system_sodium", lambda: None)
    monkeypatch.setattr(groups_module, "bundled_sodium", lambda: None)
    with pytest.raises(ConfigError, match="pip install rbcl"):
        groups_module.sodium.__wrapped__()


def test_a_library_that_computes_wrongly_is_refused() -> None:
    class Wrong:
        def sodium_init(self) -> int:
            return 0

        def __getattr__(self, name: str) -> object:
            def function(target: ctypes.Array[ctypes.c_char], *_: object) -> int:
                target.raw = bytes(32)
                return 0

            return function

    with pytest.raises(ConfigError, match="RFC 9496"):
        prepared(Wrong())  # type: ignore[arg-type]


# modp ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "constant", "sha256"),
    [
        (2048, 124476, "d66436f79bbd6b2e38c0ffbd079be904"),
        (3072, 1690314, "48cf8b092fbce4359d9871abf74f98e2"),
    ],
)
def test_primes_are_those_of_rfc_3526(bits: int, constant: int, sha256: str) -> None:
    prime = PRIMES[bits]
    assert isPrime(prime) and isPrime(prime // 2)
    # p = 2^n - 2^(n-64) - 1 + 2^64 * (floor(2^(n-130) * pi) + c)
    with mpmath.workprec(bits):
        inner = int(mpmath.floor(mpmath.pi * mpmath.mpf(2) ** (bits - 130))) + constant
    assert prime == 2**bits - 2 ** (bits - 64) - 1 + (inner << 64)
    # the digests of OpenSSL's groups modp_2048 and modp_3072
    digest = hashlib.sha256(prime.to_bytes(bits // 8, "big")).hexdigest()
    assert digest.startswith(sha256)


@pytest.mark.parametrize("bits", [2048, 3072])
def test_modp_refuses_numbers_that_are_not_residues(bits: int) -> None:
    group = Modp(bits)
    good = group.hash([b"good"])
    prime = group.prime
    residue = int.from_bytes(good.tobytes(), "big")
    bad = {
        "identity": 1,
        "not a quadratic residue": prime - residue,
        "below the prime": prime,
    }
    bad_more = [("not a quadratic", 0), ("not a quadratic", prime - 1)]
    if (residue + prime).bit_length() <= bits:  # not canonical
        bad_more.append(("below the prime", residue + prime))
    for reason, value in [*bad.items(), *bad_more]:
        listed = np.concatenate([good, numbers(group, value)])
        with pytest.raises(InvalidElementError, match=f"element 1 is.*{reason}"):
            group.validate(listed)
        with pytest.raises(InvalidElementError, match=f"element 1 is.*{reason}"):
            group.power(listed, group.random_key())


def test_modp_exponentiations_are_python_s() -> None:
    group = Modp(2048)
    hashed, key = group.hash([b"a", b"b"]), group.random_key()
    expected = [
        pow(int.from_bytes(row.tobytes(), "big"), key, group.prime) for row in hashed
    ]
    np.testing.assert_array_equal(group.power(hashed, key), numbers(group, *expected))


def test_every_hash_has_jacobi_symbol_one() -> None:
    """Without the square about half would have -1, and every odd power keep it."""
    group = Modp(2048)
    raised = group.power(group.hash([b"%d" % n for n in range(64)]), 3)
    values = [int.from_bytes(row.tobytes(), "big") for row in raised]
    assert {jacobi(value, group.prime) for value in values} == {1}
    raw = [int.from_bytes(secrets.token_bytes(256), "big") for _ in range(64)]
    assert {jacobi(value, group.prime) for value in raw} == {1, -1}


@given(st.integers(0, 2**40), st.sampled_from([3, 5, 7, 11, 101, 7919, 104729]))
def test_jacobi_is_euler_s_criterion(number: int, prime: int) -> None:
    euler = pow(number, (prime - 1) // 2, prime)
    assert jacobi(number, prime) == (-1 if euler == prime - 1 else euler)


def test_pycryptodome_without_gmp_gives_the_same() -> None:
    from Crypto.Math._IntegerCustom import IntegerCustom

    groups = [Modp(3072), Modp(3072, IntegerCustom)]
    key = groups[0].random_key()
    raised = [group.power(group.hash([b"a", b"b"]), key) for group in groups]
    np.testing.assert_array_equal(raised[0], raised[1])
    for group in groups:
        with pytest.raises(InvalidElementError, match="not a quadratic residue"):
            group.validate(numbers(group, group.prime - 4))


# sorting ------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.lists(st.binary(min_size=4, max_size=4), max_size=12))
def test_sorting_is_that_of_bytes(texts: list[bytes]) -> None:
    """Also with zero bytes at the end, which numpy's strings drop."""
    listed = np.frombuffer(b"".join(texts), np.uint8).reshape(-1, 4)
    ordered = [row.tobytes() for row in listed[order_of(listed)]]
    assert ordered == sorted(texts)
    for ascending, allowed in (
        (True, texts == sorted(set(texts))),
        (False, len(texts) == len(set(texts))),
    ):
        with nullcontext() if allowed else pytest.raises(ListError, match="repeats"):
            check_distinct(listed, ascending)
