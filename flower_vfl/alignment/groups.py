"""The groups by name.

- ristretto255 (RFC 9496), computed by libsodium in time that does not depend on keys;
- quadratic residues modulo the safe primes of RFC 3526, as in FLORIST, computed by
  pycryptodome, with GMP where it is installed.
"""

import ctypes
import hashlib
import importlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from Crypto.Math.Numbers import Integer

from flower_vfl.errors import ConfigError, check_name

from .elements import Elements, Group, InvalidElementError

_NEEDED = {  # name of the function: how many addresses it takes
    "crypto_core_ristretto255_from_hash": 2,
    "crypto_core_ristretto255_is_valid_point": 1,
    "crypto_scalarmult_ristretto255": 3,
}
# SHA-512 of a text and its element, from RFC 9496, appendix A.3
_KNOWN_TEXT = b"Ristretto is traditionally a short shot of espresso coffee"
_KNOWN_ELEMENT = "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46"

# The safe primes of RFC 3526, which begin alike
_BEGIN = (
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74"
    "020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F1437"
    "4FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF05"
    "98DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB"
    "9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF695581718"
)
PRIMES = {
    2048: int(
        _BEGIN + "3995497CEA956AE515D2261898FA051015728E5A8AACAA68FFFFFFFFFFFFFFFF", 16
    ),
    3072: int(
        _BEGIN + "3995497CEA956AE515D2261898FA051015728E5A8AAAC42DAD33170D04507A33"
        "A85521ABDF1CBA64ECFB850458DBEF0A8AEA71575D060C7DB3970F85A6E1E4C7"
        "ABF5AE8CDB0933D71E8C94E04A25619DCEE3D2261AD2EE6BF12FFA06D98A0864"
        "D87602733EC86A64521F2B18177B200CBBE117577A615D6C770988C0BAD946E2"
        "08E24FA074E5AB3143DB5BFCE0FD108E4B82D120A93AD2CAFFFFFFFFFFFFFFFF",
        16,
    ),
}
# RFC 7919 asks for at least 225 and 275 bits; RFC 3526 for 220 to 320 and 260 to 420.
KEY_BITS = {2048: 256, 3072: 320}


def system_sodium() -> ctypes.CDLL | None:
    """Return the system's libsodium, or None where there is none new enough."""
    for ending in ("so.26", "so.23", "so", "dylib", "dll"):
        with suppress(OSError):
            library = ctypes.CDLL(f"libsodium.{ending}")
            if all(hasattr(library, function) for function in _NEEDED):
                return library
    return None


def bundled_sodium() -> ctypes.CDLL | None:
    """Return the libsodium in the `rbcl` wheel, or None where it is not installed."""
    try:
        library = importlib.import_module("rbcl")._sodium
    except (ImportError, OSError):
        return None
    if not isinstance(library, ctypes.CDLL):
        return None
    # The wheel leaves a copy in the temporary folder, which is not needed once loaded.
    with suppress(OSError):  # Windows does not let go of a file that is in use
        Path(library._name).unlink(missing_ok=True)
    return library


@cache
def sodium() -> ctypes.CDLL:
    """Return the system's libsodium, which gets security updates, or the wheel's."""
    library = system_sodium() or bundled_sodium()
    if library is None:
        raise ConfigError(
            "the group 'ristretto255' needs libsodium 1.0.18 or newer; install the "
            "system's package, or `pip install rbcl`, or choose 'modp3072'"
        )
    return prepared(library)


def prepared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Initialise the library and check it against a known result."""
    if library.sodium_init() < 0:
        raise ConfigError("libsodium cannot be initialised")
    for name, count in _NEEDED.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * count
        function.restype = ctypes.c_int
    known, digest = ctypes.create_string_buffer(32), hashlib.sha512(_KNOWN_TEXT)
    library.crypto_core_ristretto255_from_hash(known, digest.digest())
    if known.raw.hex() != _KNOWN_ELEMENT:
        raise ConfigError("libsodium does not compute ristretto255 as RFC 9496 says")
    return library


class Ristretto255(Group):
    """ristretto255: prime order, 32 bytes an element, about 128 bits of security.

    SHA-512 and the map of RFC 9496 make an element of a message, like a random oracle.
    (With a hash as the coordinate of an X25519 point, elements could be linked: whether
    it is on the curve or on its twist survives every exponentiation.)
    """

    name = "ristretto255"
    size = 32
    order = 2**252 + 27742317777372353535851937790883648493
    _chunk = 512

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._sodium = library or sodium()

    def random_key(self) -> int:
        """Return a fresh secret key."""
        return 1 + secrets.randbelow(self.order - 1)

    def _hash_rows(self, messages: Sequence[bytes], rows: Elements) -> None:
        from_hash = self._sodium.crypto_core_ristretto255_from_hash
        target = rows.ctypes.data
        for number, message in enumerate(messages):
            from_hash(target + 32 * number, hashlib.sha512(message).digest())

    def _power_rows(self, rows: Elements, key: int, target: Elements) -> None:
        # libsodium refuses invalid encodings, and the identity as a result. The order
        # is prime and the key is not 0: only the identity gives the identity.
        self._check_last_bit(rows)
        multiply = self._sodium.crypto_scalarmult_ristretto255
        scalar = ctypes.create_string_buffer(key.to_bytes(32, "little"), 32)
        at, source, result = ctypes.addressof(scalar), rows.ctypes.data, 0
        goal = target.ctypes.data
        for offset in range(0, 32 * len(rows), 32):
            result = multiply(goal + offset, at, source + offset)
            if result:
                break
        ctypes.memset(at, 0, 32)
        if result:
            self._refuse(rows, offset // 32)

    def _check_rows(self, rows: Elements) -> None:
        self._check_last_bit(rows)
        is_valid = self._sodium.crypto_core_ristretto255_is_valid_point
        source = rows.ctypes.data
        for number in range(len(rows)):
            if is_valid(source + 32 * number) != 1:
                self._refuse(rows, number)
        for zero in np.flatnonzero(~rows.any(axis=1)):
            self._refuse(rows, int(zero))

    def _check_last_bit(self, rows: Elements) -> None:
        """Refuse bit 255, which libsodium 1.0.18 ignores: two encodings of a point."""
        for number in np.flatnonzero(rows[:, 31] & 0x80):
            self._refuse(rows, int(number))

    def _refuse(self, rows: Elements, number: int) -> NoReturn:
        zero, invalid = "is the identity", "is not a canonical ristretto255 encoding"
        raise InvalidElementError(number, invalid if rows[number].any() else zero)


def jacobi(number: int, modulus: int) -> int:
    """Return the Jacobi symbol; for a prime modulus 1 means a quadratic residue."""
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

    SHAKE256 maps a message to 128 bits more than p has; the number is reduced modulo p
    and squared: odd powers keep the Jacobi symbol, which would link elements.

    Keys are short: 256 bits for 2048, 320 bits for 3072. This is sound because the
    order is a large prime, received elements are checked to be residues, and the best
    known search for a short key takes 2^127 and 2^159 steps, more than the discrete
    logarithm of a full key (Koshiba and Kurosawa, Short Exponent Diffie-Hellman
    Problems, 2004). GMP's time depends on the key: unlike `Ristretto255`, this does not
    protect against someone who can time single exponentiations on the same computer.
    """

    _chunk = 32

    def __init__(self, bits: int, integer: Any = Integer) -> None:
        self.name = f"modp{bits}"
        self.size = bits // 8
        self.prime = PRIMES[bits]
        self.order = self.prime // 2
        self._key_bits = KEY_BITS[bits]
        self._integer = integer
        self._prime = integer(self.prime)
        self._prime_bytes = self.prime.to_bytes(self.size, "big")

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
        exponent = self._integer(key)
        for number, (row, goal) in enumerate(zip(rows, target, strict=True)):
            power = pow(self._read(row, number), exponent, self._prime)
            goal[:] = np.frombuffer(power.to_bytes(self.size), np.uint8)

    def _check_rows(self, rows: Elements) -> None:
        for number, row in enumerate(rows):
            self._read(row, number)

    def _read(self, row: Elements, number: int) -> Any:
        """Return the number in a row after checking that it is an element."""
        content = row.tobytes()
        if content >= self._prime_bytes:
            raise InvalidElementError(number, "is not below the prime")
        value = self._integer.from_bytes(content)
        if value == 1:
            raise InvalidElementError(number, "is the identity")
        if self._jacobi(value) != 1:
            raise InvalidElementError(number, "is not a quadratic residue")
        return value

    def _jacobi(self, value: Any) -> int:
        if self._integer.__name__ == "IntegerGMP":
            return int(self._integer.jacobi_symbol(value, self._prime))
        # pycryptodome's own, without GMP, recurses too deeply for such numbers
        return jacobi(int(value), self.prime)


DEFAULT_GROUP = "ristretto255"

GROUPS: dict[str, Callable[[], Group]] = {
    "ristretto255": Ristretto255,
    "modp2048": partial(Modp, 2048),
    "modp3072": partial(Modp, 3072),
}


def make_group(name: str = DEFAULT_GROUP) -> Group:
    """Return a group by its name, one of `GROUPS`."""
    check_name("group", name, GROUPS)
    return GROUPS[name]()
