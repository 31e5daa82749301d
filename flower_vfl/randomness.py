"""Seeds that are derived, and a random state that belongs to one party."""

import hashlib
import math
import secrets
import threading
from collections.abc import Sequence
from typing import Self

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from flower_vfl.errors import ConfigError


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def draw_secret() -> int:
    """Return a key of 256 bits for noise that nobody else can guess."""
    return secrets.randbits(256)


class Noise:
    """Random numbers from a stream cipher under a secret key.

    Without the key nobody can tell them from chance, whatever other streams of the key
    have shown. torch's own generators are not secure: some output reveals the rest.

    Parameters
    ----------
    key : int
        The secret, of up to 256 bits.
    *parts : int | str | bytes
        What else the numbers depend on; streams with different parts are independent.

    Examples
    --------
    >>> from flower_vfl import Noise
    >>> noise = Noise(7, "passive-1", 1).normal((2, 3))
    >>> bool((noise == Noise(7, "passive-1", 1).normal((2, 3))).all())
    True
    """

    def __init__(self, key: int, *parts: int | str | bytes) -> None:
        cipher = Cipher(algorithms.ChaCha20(derive_key(key, *parts), bytes(16)), None)
        self._cipher = cipher.encryptor()

    def integers(self, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return uniform integers over the whole range of the type."""
        found = torch.zeros(count, dtype=dtype)
        if count:
            raw = found.numpy().data.cast("B")
            self._cipher.update_into(raw, raw)
        return found

    def signed(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers from -1 to 1, with small ones as fine as the type allows."""
        bits = torch.finfo(dtype).bits
        whole = self.integers(count, torch.int32 if bits == 32 else torch.int64)
        return whole.to(dtype).mul_(2.0 ** (1 - bits))

    def normal(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return standard normal numbers (Box and Muller, 1958)."""
        count = math.prod(shape)
        pairs = (count + 1) // 2
        bits = torch.finfo(dtype).bits
        whole = self.integers(2 * pairs, torch.int32 if bits == 32 else torch.int64)
        drawn = whole.to(dtype).mul_(2.0 ** (1 - bits))  # from -1 to 1
        # The logarithm of 0 is infinite, so 0 becomes half of the smallest step.
        uniform = drawn[:pairs].abs_().clamp_min_(2.0**-bits)
        radius, angle = uniform.log_().mul_(-2.0).sqrt_(), drawn[pairs:].mul_(math.pi)
        found = torch.empty_like(drawn)
        torch.mul(radius, torch.cos(angle), out=found[:pairs])
        torch.mul(radius, torch.sin(angle), out=found[pairs:])
        return found[:count].reshape(tuple(shape))

    def uniform(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return numbers from 0 up to, but not including, 1."""
        digits = 24 if dtype == torch.float32 else 53
        whole = self.integers(math.prod(shape)).bitwise_and_(2**digits - 1)
        return whole.to(dtype).mul_(2.0**-digits).reshape(tuple(shape))

    def permutation(self, count: int) -> Tensor:
        """Return the numbers from 0 to `count` - 1 in a random order."""
        return self.integers(count).argsort()


def derive_key(key: int, *parts: int | str | bytes) -> bytes:
    """Return a key of 32 bytes that depends on a secret key and on every part."""
    if not 0 <= key < 2**256:
        raise ConfigError("a key or a seed of noise is a number from 0 to 2**256 - 1")
    # Type and length before each part: no two lists of parts are one text.
    text = b""
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        text += f"{type(part).__name__}:{len(raw)}:".encode() + raw
    return hashlib.blake2b(
        text, key=key.to_bytes(32, "big"), digest_size=32, person=b"flower-vfl noise"
    ).digest()


def tensor_digest(tensor: Tensor, key: int, *parts: int | str) -> bytes:
    """Return a digest of a tensor's entries under a secret key; not to be shown."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    # Several times as fast as a hash; safe, since nobody sees key or digest.
    return Poly1305.generate_tag(derive_key(key, "digest", *parts), flat.numpy().data)


_WORDS, _FIRST = 624, 3  # of the Mersenne twister within the state of a generator
# The generator is the process's: two threads must not swap their states in at once.
_swapped = threading.RLock()


class RandomState:
    """A random state of torch that is active inside a ``with`` block only.

    Parties in one process so draw the same numbers as on separate nodes. torch's own
    seeding uses 32 bits of a seed; a `Noise` fills the whole state.
    """

    def __init__(self, seed: int | Noise, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        number = seed if isinstance(seed, int) else int(seed.integers(1)) >> 1
        self.states = [torch.Generator().manual_seed(number).get_state()]  # CPU, CUDA
        if isinstance(seed, Noise):
            words = self.states[0].view(torch.int64)[_FIRST : _FIRST + _WORDS]
            words.copy_(seed.integers(_WORDS).bitwise_and_(2**32 - 1))
        if self._device is not None:
            cuda = torch.Generator(self._device).manual_seed(number)
            self.states.append(cuda.get_state())
        self._outer: list[Tensor] = []

    def __enter__(self) -> Self:
        _swapped.acquire()
        self._outer = [torch.get_rng_state()]
        torch.set_rng_state(self.states[0])
        if self._device is not None:
            self._outer.append(torch.cuda.get_rng_state(self._device))
            torch.cuda.set_rng_state(self.states[1], self._device)
        return self

    def __exit__(self, *error: object) -> None:
        states = [torch.get_rng_state()]
        torch.set_rng_state(self._outer[0])
        if self._device is not None:
            states.append(torch.cuda.get_rng_state(self._device))
            torch.cuda.set_rng_state(self._outer[1], self._device)
        self.states = states
        _swapped.release()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        return {f"generator{i}": state for i, state in enumerate(self.states)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        saved = [state[f"generator{i}"].cpu() for i in range(len(state))]
        self.states[: len(saved)] = saved[: len(self.states)]
