"""Quadratic residues modulo the safe primes of RFC 3526, as in FLORIST.

Powers are computed by GMP through pycryptodome where GMP is installed (it lets go of
the interpreter's lock, so that all cores work), else by gmpy2 where that is installed,
else by pycryptodome's own code.
"""

from __future__ import annotations

import hashlib
import importlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from Crypto.Math.Numbers import Integer

from .elements import Elements, Group, InvalidElementError

# RFC 3526: p = 2^n - 2^(n-64) - 1 + 2^64 * (floor(2^(n-130) * pi) + c)
_CONSTANTS = {2048: 124476, 3072: 1690314}
# RFC 7919 asks for at least 225 and 275 bits; RFC 3526 for 220 to 320 and 260 to 420.
KEY_BITS = {2048: 256, 3072: 320}


@dataclass(frozen=True)
class Arithmetic:
    """What a library of large numbers offers; its numbers are of its own type."""

    number: Callable[[bytes], Any]
    text: Callable[[Any, int], bytes]
    power: Callable[[Any, Any, Any], Any]
    jacobi: Callable[[Any, Any], int]


@cache
def safe_prime(bits: int) -> int:
    """Return the prime of RFC 3526 with so many bits."""
    inner = _pi(bits - 130) + _CONSTANTS[bits]
    return (1 << bits) - (1 << (bits - 64)) - 1 + (inner << 64)


def _pi(bits: int) -> int:
    """Return the integer part of 2^bits times pi, by Machin's formula."""
    guard = 64
    one = 1 << (bits + guard)

    def arctan_inverse(number: int) -> int:
        term = total = one // number
        divisor, sign = 1, 1
        while term:
            term //= number * number
            divisor, sign = divisor + 2, -sign
            total += sign * (term // divisor)
        return total

    return (16 * arctan_inverse(5) - 4 * arctan_inverse(239)) >> guard


def jacobi(number: int, modulus: int) -> int:
    """Return the Jacobi symbol: for a prime 1 means a quadratic residue."""
    number %= modulus
    sign = 1
    while number:
        twos = (number & -number).bit_length() - 1
        number >>= twos
        if twos % 2 and modulus % 8 in (3, 5):
            sign = -sign
        if number % 4 == 3 and modulus % 4 == 3:
            sign = -sign
        number, modulus = modulus % number, number
    return sign if modulus == 1 else 0


class Modp(Group):
    """The quadratic residues modulo a safe prime p = 2q + 1: a group of prime order q.

    A message becomes an element by SHAKE256 to 128 bits more than p has, reduced modulo
    p (so that no residue is more than 2^-128 likelier than another) and squared.
    Without the square the Jacobi symbol, which an odd power keeps, would link elements.

    Keys are short: 256 bits for 2048, 320 bits for 3072. That is sound here because the
    order is a large prime, so that there is no small subgroup in which part of a key
    could be found; received elements are checked to be residues; the best known way to
    a short key takes the square root of the number of keys, 2^127 and 2^159 steps,
    which is more than the discrete logarithm of a full key costs; and as long as short
    keys cannot be found, exponentiations with short keys cannot be told from exponentiations with full
    keys (Koshiba and Kurosawa, Short Exponent Diffie-Hellman Problems, 2004).

    GMP's power takes a time that depends on the key. An observer who can time single
    exponentiations on the same computer is not covered; `ristretto255` covers that too.
    """

    _chunk = 32

    def __init__(self, bits: int, library: Arithmetic | None = None) -> None:
        self.name = f"modp{bits}"
        self.size = bits // 8
        self.prime = safe_prime(bits)
        self.order = self.prime // 2
        self._key_bits = KEY_BITS[bits]
        self._library = library or arithmetic()
        self._prime_text = self.prime.to_bytes(self.size, "big")
        self._prime = self._library.number(self._prime_text)

    def random_key(self) -> int:
        """Return a fresh short key, always of full length."""
        return secrets.randbits(self._key_bits - 1) | 1 << (self._key_bits - 1)

    def _hash_rows(self, messages: Sequence[bytes], rows: Elements) -> None:
        for row, message in zip(rows, messages, strict=True):
            digest = hashlib.shake_256(message).digest(self.size + 16)
            number = int.from_bytes(digest, "big")
            square = number * number % self.prime
            row[:] = np.frombuffer(square.to_bytes(self.size, "big"), np.uint8)

    def _power_rows(self, rows: Elements, key: int, target: Elements) -> None:
        library = self._library
        exponent = library.number(key.to_bytes(self.size, "big"))
        for number, (row, goal) in enumerate(zip(rows, target, strict=True)):
            power = library.power(self._read(row, number), exponent, self._prime)
            goal[:] = np.frombuffer(library.text(power, self.size), np.uint8)

    def _check_rows(self, rows: Elements) -> None:
        for number, row in enumerate(rows):
            self._read(row, number)

    def _read(self, row: Elements, number: int) -> Any:
        """Return the number in a row, or say what is wrong with it."""
        text = row.tobytes()
        if text >= self._prime_text:
            raise InvalidElementError(number, "is not below the prime")
        value = self._library.number(text)
        if value == 1:
            raise InvalidElementError(number, "is the identity")
        if self._library.jacobi(value, self._prime) != 1:
            raise InvalidElementError(number, "is no quadratic residue")
        return value


@cache
def arithmetic() -> Arithmetic:
    """Return the best library that is installed."""
    if Integer.__name__ != "IntegerGMP":
        with suppress(ImportError):
            return gmpy2_arithmetic()
    return crypto_arithmetic()


def crypto_arithmetic(integer: Any = Integer) -> Arithmetic:
    """Return pycryptodome's numbers: GMP where it is installed, else its own code."""
    with_gmp = integer.__name__ == "IntegerGMP"

    def symbol(number: Any, modulus: Any) -> int:
        # without GMP pycryptodome's own is recursive, too deeply for such numbers
        return jacobi(int(number), int(modulus))

    return Arithmetic(
        number=integer.from_bytes,
        text=lambda number, size: bytes(number.to_bytes(size)),
        power=pow,
        jacobi=integer.jacobi_symbol if with_gmp else symbol,
    )


def gmpy2_arithmetic() -> Arithmetic:
    """Return gmpy2's numbers, with the power whose time does not depend on the key."""
    gmpy2 = importlib.import_module("gmpy2")
    return Arithmetic(
        number=lambda text: gmpy2.mpz(int.from_bytes(text, "big")),
        text=lambda number, size: int(number).to_bytes(size, "big"),
        power=gmpy2.powmod_sec,
        jacobi=gmpy2.jacobi,
    )
