"""Lists of group elements, and the interface of the groups.

A list of elements is one array of bytes with one row per element, in the canonical
encoding of the group. The same bytes are compared, sorted and sent.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
from numpy.typing import NDArray

from flower_vfl.errors import VerticalError

Elements = NDArray[np.uint8]
Positions = NDArray[np.int64]

TAG = b"flower-vfl/alignment/v1"


class ListError(VerticalError, ValueError):
    """A list that the protocol does not allow: repeated, out of turn, a wrong count."""


class InvalidElementError(VerticalError, ValueError):
    """A row that is not canonical, not in the group, or the identity."""

    def __init__(self, row: int, reason: str) -> None:
        self.row = row
        self.reason = reason
        super().__init__(f"element {row} {reason}")


def cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def framed(*parts: bytes) -> bytes:
    """Return the parts joined with their lengths: different for different parts."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def as_strings(elements: Elements) -> NDArray[np.bytes_]:
    """Return the rows as fixed-length byte strings, which numpy compares as a whole."""
    rows = np.ascontiguousarray(elements)
    return rows.view(f"S{rows.shape[1]}").reshape(len(rows))


def order_of(elements: Elements) -> Positions:
    """Return the order that sorts the rows by their bytes."""
    return np.argsort(as_strings(elements), kind="stable").astype(np.int64, copy=False)


def check_distinct(elements: Elements, ascending: bool) -> None:
    """Refuse a list that repeats an element, or that must be sorted and is not."""
    rows = as_strings(elements if ascending else elements[order_of(elements)])
    if not np.all(rows[:-1] < rows[1:]):
        unsorted = "is not sorted or " if ascending else ""
        raise ListError(f"the list {unsorted}repeats an element")


def rows_of(elements: Elements, universe: Elements) -> Positions:
    """Return the row of each element in a sorted list, -1 where it is missing."""
    if not len(universe):
        return np.full(len(elements), -1, np.int64)
    rows, known = as_strings(elements), as_strings(universe)
    found = np.minimum(np.searchsorted(known, rows), len(known) - 1)
    return np.where(known[found] == rows, found, -1).astype(np.int64)


class Group(ABC):
    """A group of prime order in which the decisional Diffie-Hellman problem is hard."""

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

    def product(self, *keys: int) -> int:
        """Return the key that raises as all the keys do one after the other."""
        return prod(keys) % self.order

    def hash(self, messages: Sequence[bytes], context: bytes = b"") -> Elements:
        """Return one element per message, equal for equal messages only."""
        # The prefix separates groups, sessions and other uses of the hash.
        prefix = framed(TAG, self.name.encode(), context)
        target = np.empty((len(messages), self.size), np.uint8)

        def work(start: int, stop: int) -> None:
            prefixed = [prefix + message for message in messages[start:stop]]
            self._hash_rows(prefixed, target[start:stop])

        self._parallel(len(messages), work)
        return target

    def power(self, elements: Elements, key: int) -> Elements:
        """Return every element raised to a key, after checking that it is valid."""
        if not 0 < key < self.order:
            raise ValueError("a key is between 1 and the order of the group")
        rows = self._rows(elements)
        target = np.empty_like(rows)

        def work(start: int, stop: int) -> None:
            self._power_rows(rows[start:stop], key, target[start:stop])

        self._parallel(len(rows), work)
        return target

    def validate(self, elements: Elements) -> None:
        """Raise InvalidElementError unless every row is a valid element."""
        rows = self._rows(elements)
        self._parallel(len(rows), lambda *part: self._check_rows(rows[slice(*part)]))

    def encode(self, elements: Elements) -> bytes:
        """Return a list as bytes."""
        return self._rows(elements).tobytes()

    def decode(self, content: bytes | bytearray) -> Elements:
        """Return the list that some bytes hold, without validating its elements."""
        rows, rest = divmod(len(content), self.size)
        if rest:
            raise InvalidElementError(rows, f"has fewer than {self.size} bytes")
        return np.frombuffer(content, np.uint8).reshape(-1, self.size)

    def _rows(self, elements: Elements) -> Elements:
        """Return the list in contiguous memory, after a check of its shape."""
        shaped = elements.ndim == 2 and elements.shape[1] == self.size
        if elements.dtype != np.uint8 or not shaped:
            needed = f"a row of {self.size} bytes, which {self.name} needs"
            raise InvalidElementError(0, f"is not {needed}")
        return np.ascontiguousarray(elements)

    def _parallel(self, count: int, work: Callable[[int, int], None]) -> None:
        """Call ``work(start, stop)`` for all chunks; the first error in order wins."""
        # Threads, because the arithmetic is done in C without the interpreter's lock.
        starts = range(0, count, self._chunk)
        stops = [min(start + self._chunk, count) for start in starts]

        def checked(start: int, stop: int) -> None:
            try:
                work(start, stop)
            except InvalidElementError as error:  # it counts from the chunk's start
                raise InvalidElementError(start + error.row, error.reason) from None

        pool = ThreadPoolExecutor(max(1, min(cores(), len(starts))))
        try:
            list(pool.map(checked, starts, stops))  # raises what a chunk raised
        finally:
            pool.shutdown(cancel_futures=True)
