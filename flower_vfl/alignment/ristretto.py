"""The group ristretto255 (RFC 9496), computed by libsodium.

The library is the system's own where there is one, because it gets the system's
security updates, else the copy in the `rbcl` wheel. Both compute in time that does not
depend on the key.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from flower_vfl.errors import ConfigError

from .elements import Elements, Group, InvalidElementError

ORDER = 2**252 + 27742317777372353535851937790883648493
_SYSTEM_NAMES = (
    "libsodium.so.26",
    "libsodium.so.23",
    "libsodium.so",
    "libsodium.dylib",
    "libsodium.dll",
)
_NEEDED = {  # name of the function: how many addresses it takes
    "crypto_core_ristretto255_from_hash": 2,
    "crypto_core_ristretto255_is_valid_point": 1,
    "crypto_scalarmult_ristretto255": 3,
}
# SHA-512 of a text and its element, from RFC 9496, appendix A.3
_KNOWN_TEXT = b"Ristretto is traditionally a short shot of espresso coffee"
_KNOWN_ELEMENT = "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46"


def system_sodium() -> ctypes.CDLL | None:
    """Return the system's libsodium, or None where there is none new enough."""
    for name in _SYSTEM_NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if all(hasattr(library, function) for function in _NEEDED):
            return library
    return None


def bundled_sodium() -> ctypes.CDLL | None:
    """Return the libsodium in the `rbcl` wheel, or None where it is not installed.

    That wheel writes its library to the temporary folder at every import and leaves it
    there. The file is removed: a library that is loaded does not need it any more.
    """
    try:
        library = importlib.import_module("rbcl")._sodium
    except (ImportError, OSError):
        return None
    if not isinstance(library, ctypes.CDLL):
        return None
    with suppress(OSError):  # Windows does not let go of a file that is in use
        Path(library._name).unlink(missing_ok=True)
    return library


@cache
def sodium() -> ctypes.CDLL:
    """Return libsodium, ready for use and tried on a known result."""
    library = system_sodium() or bundled_sodium()
    if library is None:
        raise ConfigError(
            "the group 'ristretto255' needs libsodium 1.0.18 or newer; install the "
            "system's package, or `pip install rbcl`, or choose 'modp3072'"
        )
    return prepared(library)


def prepared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library after its start and a test with a known result."""
    if library.sodium_init() < 0:
        raise ConfigError("libsodium does not start")
    for name, count in _NEEDED.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * count
        function.restype = ctypes.c_int
    known = ctypes.create_string_buffer(32)
    library.crypto_core_ristretto255_from_hash(
        known, hashlib.sha512(_KNOWN_TEXT).digest()
    )
    if known.raw.hex() != _KNOWN_ELEMENT:
        raise ConfigError("libsodium does not compute ristretto255 as RFC 9496 says")
    return library


class Ristretto255(Group):
    """ristretto255: prime order, 32 bytes an element, about 128 bits of security.

    A message becomes an element by SHA-512 and the map of RFC 9496, which is
    indistinguishable from a random oracle into the group. (A hash taken as the
    coordinate of an X25519 point would not do: whether it lies on the curve or on its
    twist survives every power and links elements.)
    """

    name = "ristretto255"
    size = 32
    order = ORDER
    _chunk = 512

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._sodium = library or sodium()

    def random_key(self) -> int:
        """Return a fresh secret key from the operating system's generator."""
        return 1 + secrets.randbelow(ORDER - 1)

    def _hash_rows(self, messages: Sequence[bytes], rows: Elements) -> None:
        from_hash = self._sodium.crypto_core_ristretto255_from_hash
        target = rows.ctypes.data
        for number, message in enumerate(messages):
            from_hash(target + 32 * number, hashlib.sha512(message).digest())

    def _power_rows(self, rows: Elements, key: int, target: Elements) -> None:
        """Raise: libsodium refuses invalid encodings and the identity as a result.

        The order is prime and the key is not 0, so that the result is the identity only
        for the identity.
        """
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
        is_valid = self._sodium.crypto_core_ristretto255_is_valid_point
        source = rows.ctypes.data
        for number in range(len(rows)):
            if is_valid(source + 32 * number) != 1:
                self._refuse(rows, number)
        zero = np.flatnonzero(~rows.any(axis=1))
        if len(zero):
            self._refuse(rows, int(zero[0]))

    def _refuse(self, rows: Elements, number: int) -> None:
        if rows[number].any():
            raise InvalidElementError(number, "is no canonical ristretto255 encoding")
        raise InvalidElementError(number, "is the identity")
