"""Lists of group elements, and the interface of a group that parties can share.

A list of elements is one array of bytes with a row per element, in the group's one
canonical encoding: no Python object per element, and what is compared, sorted and sent
is always the same bytes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
from numpy.typing import NDArray

from flower_vfl.errors import VerticalError

Elements = NDArray[np.uint8]
Progress = Callable[[int], None]

TAG = b"flower-vfl/alignment/v1"


class InvalidElementError(VerticalError, ValueError):
    """A row that is no element: not canonical, not in the group, or the identity.

    Parameters
    ----------
    row : int
        Position in the list.
    reason : str
        What is wrong with it.
    """

    def __init__(self, row: int, reason: str) -> None:
        self.row = row
        self.reason = reason
        super().__init__(f"element {row} {reason}")

    def __reduce__(self) -> tuple[type[InvalidElementError], tuple[int, str]]:
        """Survive pickling."""
        return type(self), (self.row, self.reason)


def cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def texts(elements: Elements) -> NDArray[np.bytes_]:
    """Return the rows as fixed-length byte strings, which compare as a whole.

    numpy drops zero bytes at the end of such a string when it is taken out of the
    array. Within the array every row has the same length, so nothing is lost.
    """
    rows = np.ascontiguousarray(elements)
    return rows.view(f"S{rows.shape[1]}").reshape(len(rows))


def order_of(elements: Elements) -> NDArray[np.int64]:
    """Return the order that sorts the rows by their bytes."""
    return np.argsort(texts(elements), kind="stable").astype(np.int64, copy=False)


def is_ascending(elements: Elements) -> bool:
    """Return whether the rows are sorted and no two are equal."""
    rows = texts(elements)
    return bool(np.all(rows[:-1] < rows[1:]))


class Group(ABC):
    """A group of prime order in which the decisional Diffie-Hellman problem is hard.

    Keys are integers from 1 to ``order - 1``. Elements are rows of bytes in canonical
    encoding. Lists are worked on by all cores: the arithmetic is done in C with the
    interpreter's lock released.
    """

    name: str
    size: int  # bytes of an element
    order: int
    _chunk: int  # rows that a thread takes at a time: some tens of milliseconds

    @abstractmethod
    def random_key(self) -> int:
        """Return a fresh secret key from the operating system's generator."""

    @abstractmethod
    def _hash_rows(self, messages: Sequence[bytes], rows: Elements) -> None:
        """Write the element of each message into the row of the same number."""

    @abstractmethod
    def _power_rows(self, rows: Elements, key: int, target: Elements) -> None:
        """Write each row raised to the key; InvalidElementError for an invalid row."""

    @abstractmethod
    def _check_rows(self, rows: Elements) -> None:
        """Raise InvalidElementError for the first row that is invalid."""

    def inverse(self, key: int) -> int:
        """Return the key that undoes a key."""
        return pow(key, -1, self.order)

    def product(self, *keys: int) -> int:
        """Return the key that raises as all the keys do one after the other."""
        return prod(keys) % self.order

    def hash(
        self,
        messages: Sequence[bytes],
        context: bytes = b"",
        progress: Progress | None = None,
    ) -> Elements:
        """Return one element per message: the same for the same message only."""
        prefix = domain(self.name, context)
        target = np.empty((len(messages), self.size), np.uint8)

        def work(start: int, stop: int) -> None:
            prefixed = [prefix + message for message in messages[start:stop]]
            self._hash_rows(prefixed, target[start:stop])

        self._parallel(len(messages), work, progress)
        return target

    def power(
        self, elements: Elements, key: int, progress: Progress | None = None
    ) -> Elements:
        """Return every element raised to a key, after checking that it is valid."""
        if not 0 < key < self.order:
            raise ValueError("a key is between 1 and the order of the group")
        rows = self._rows(elements)
        target = np.empty_like(rows)

        def work(start: int, stop: int) -> None:
            try:
                self._power_rows(rows[start:stop], key, target[start:stop])
            except InvalidElementError as error:
                raise InvalidElementError(start + error.row, error.reason) from None

        self._parallel(len(rows), work, progress)
        return target

    def validate(self, elements: Elements) -> None:
        """Raise InvalidElementError unless every row is a valid element."""
        rows = self._rows(elements)

        def work(start: int, stop: int) -> None:
            try:
                self._check_rows(rows[start:stop])
            except InvalidElementError as error:
                raise InvalidElementError(start + error.row, error.reason) from None

        self._parallel(len(rows), work, None)

    def encode(self, elements: Elements) -> bytes:
        """Return a list as one piece of bytes."""
        return self._rows(elements).tobytes()

    def decode(self, blob: bytes | bytearray) -> Elements:
        """Return the list in a piece of bytes; the elements are not yet validated."""
        if len(blob) % self.size:
            raise InvalidElementError(
                len(blob) // self.size, f"has fewer than {self.size} bytes"
            )
        return np.frombuffer(blob, np.uint8).reshape(-1, self.size)

    def _rows(self, elements: Elements) -> Elements:
        """Return the list in one piece of memory, or say that it is none."""
        shaped = elements.ndim == 2 and elements.shape[1] == self.size
        if elements.dtype != np.uint8 or not shaped:
            raise InvalidElementError(
                0, f"is no row of {self.size} bytes, as {self.name} has"
            )
        return np.ascontiguousarray(elements)

    def _parallel(
        self,
        count: int,
        work: Callable[[int, int], None],
        progress: Progress | None,
    ) -> None:
        """Call ``work(start, stop)`` for all chunks; the first error in order wins."""
        starts = range(0, count, self._chunk)
        stops = [min(start + self._chunk, count) for start in starts]
        threads = min(cores(), len(starts))
        if threads <= 1:
            for start, stop in zip(starts, stops, strict=True):
                work(start, stop)
                if progress:
                    progress(stop - start)
            return
        pool = ThreadPoolExecutor(threads)
        try:
            done = pool.map(work, starts, stops)
            for start, stop, _ in zip(starts, stops, done, strict=True):
                if progress:
                    progress(stop - start)
        finally:
            pool.shutdown(cancel_futures=True)


def domain(group: str, context: bytes) -> bytes:
    """Return what stands before a message that is hashed, so that no use meets another."""
    parts = (TAG, group.encode(), context)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
