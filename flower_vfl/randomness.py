"""Seeds that are derived, and a random state that belongs to one party."""

from __future__ import annotations

import hashlib
import secrets
import threading

import numpy as np
import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


_WORDS, _FIRST = 624, 3  # of the Mersenne twister within the state of a generator


def draw_secret() -> int:
    """Return a seed for noise that nobody else can guess."""
    return secrets.randbits(128)


def noise_generator(*parts: int | str) -> torch.Generator:
    """Return a CPU generator whose whole state depends on the parts.

    torch's own seeding looks at 32 bits only: whoever tries them all finds the noise
    that hides a gradient. This one is as hard to guess as its parts.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    words = hashlib.shake_256(text.encode()).digest(4 * _WORDS)
    twister = torch.Generator()
    state = twister.get_state()
    numbers = state.numpy().view(np.uint64)
    numbers[_FIRST : _FIRST + _WORDS] = np.frombuffer(words, dtype="<u4")
    twister.set_state(state)
    return twister


# The generator is the process's: two threads must not swap their states in at once.
_swapped = threading.RLock()


class RandomState:
    """A random state of torch that is in force inside a ``with`` block only.

    Dropout and weight initialisation draw from torch's global generators. Parties that
    share a process would disturb each other, and a run in one process would differ from
    the same run on several nodes. Each party therefore puts its own state in force
    while it computes and restores the former state afterwards. `states` holds the CPU
    state and, on a CUDA device, that of its generator.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self.states: list[Tensor] = [torch.Generator().manual_seed(seed).get_state()]
        if self._device is not None:
            cuda = torch.Generator(self._device).manual_seed(seed)
            self.states.append(cuda.get_state())
        self._outer: list[Tensor] = []

    def __enter__(self) -> RandomState:
        """Put this state in force."""
        _swapped.acquire()
        self._outer = [torch.get_rng_state()]
        torch.set_rng_state(self.states[0])
        if self._device is not None:
            self._outer.append(torch.cuda.get_rng_state(self._device))
            torch.cuda.set_rng_state(self.states[1], self._device)
        return self

    def __exit__(self, *error: object) -> None:
        """Keep this state as it is now, and restore the former one."""
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
