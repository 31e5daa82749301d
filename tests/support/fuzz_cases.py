"""Mutated frames and messages from a stranger and from an admitted node.

Numbers inside arrays are left as they are: a party that sends other numbers deviates
from the protocol in a way that no check of a message can see.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from flower_vfl.grids.resident.wire import (
    REPLY,
    Buffer,
    decode,
    encode,
    frame_head,
    split_frame,
)

_HUGE: Final = (b"\xff" * 4, b"\xff" * 8, struct.pack("<Q", 1 << 40), bytes(8))
_WRONG: Final[Sequence[Any]] = (
    *(0, -1, 1 << 62, 0.5, float("nan"), True, "", "passive-2", "label", "nobody"),
    *(b"", b"\x00" * 40, [], [1, 2], [0.5], ["label"], [b"x"], [True]),
)
_ARRAYS: Final[Sequence[Any]] = (
    np.zeros((0, 3), np.float32),
    np.full((16, 3), np.nan, np.float32),
    np.full((16, 3), np.inf, np.float32),
    np.zeros((16, 4), np.float32),
    np.zeros((17, 3), np.float32),
    np.zeros(16, np.float32),
    np.array(1.0),
    np.zeros((16, 3), np.int64),
    np.zeros((16, 3), np.complex64),
    np.zeros((16, 3), bool),
    np.zeros((16, 3), "S4"),
)


class Mutator:
    """Draws mutations of bytes, frames and messages from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.note = ""  # about the last mutation of a frame

    def bytes(self, data: Buffer, fixed: int = 0) -> bytes:
        """Return changed bytes; the last `fixed` are cut, never changed."""
        changed = bytearray(data)
        end = max(len(changed) - fixed, 1)
        here, there = sorted(self.random.randrange(end) for _ in range(2))
        kind = self.random.randrange(7)
        if kind == 0:
            for _ in range(self.random.choice((1, 1, 1, 2, 8)) if changed else 0):
                changed[self.random.randrange(end)] ^= 1 << self.random.randrange(8)
        elif kind == 1:
            del changed[self.random.randrange(len(changed) + 1) :]
        elif kind == 2:
            changed += self.random.randbytes(self.random.choice((1, 4, 300)))
        elif kind == 3:
            changed[there:there] = changed[here:there]
        elif kind == 4:
            middle = (here + there) // 2
            changed[here:there] = changed[middle:there] + changed[here:middle]
        elif kind == 5:
            number = self.random.choice(_HUGE)
            changed[here : here + len(number)] = number[: end - here]
        else:
            changed[here:there] = self.random.randbytes(there - here)
        return bytes(changed)

    def frames(
        self, session: int, sequence: int, parts: Sequence[Buffer]
    ) -> list[bytes]:
        """Return the chunks of a reply with one mutation."""
        kind = self.random.randrange(10)
        self.note = f"frame, kind {kind}"
        if kind == 0:
            sequence = self.random.choice((sequence + 1, sequence - 1, 1 << 63, 0))
            sequence %= 1 << 64
            return split_frame([frame_head(REPLY, session, sequence), *parts])
        head = frame_head(REPLY, session, sequence)
        chunks = split_frame([head, *parts])
        if kind == 1:
            return chunks * self.random.choice((2, 3, 20))
        if kind == 2:
            return [self.random.randbytes(self.random.randrange(80)), *chunks]
        if kind in (3, 4, 5):
            message = self.message(decode(b"".join(parts)))
            self.note = f"message: {message.content if message.has_content() else ''}"
            return split_frame([head, *encode(message)])
        numbers = _numbers(parts)
        if kind == 6:
            payload = self.bytes(b"".join(parts), numbers)
            return split_frame([head, payload])
        return [self.bytes(chunks[0], numbers), *chunks[1:]]

    def message(self, message: Message) -> Message:
        """Return a message with one change of its records or metadata."""
        kind = self.random.randrange(10)
        if kind == 0:
            values = {n: v for n, v in vars(message.metadata).items() if v is not None}
            name = self.random.choice(sorted(values))
            message.metadata.__dict__[name] = type(values[name])(7)
        elif message.has_content():
            content = message.content
            key = self.random.choice([*content, "vfl", "vfl-arrays", "other"])
            if kind == 1:
                content.pop(key, None)
            elif kind == 2:
                content[key] = self._record()
            elif key in content and len(content[key]):
                self._change(content[key])
            else:
                content[key] = self._record()
        return message

    def entries(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config of a message with one change."""
        changed, key = dict(config), self.random.choice(list(config))
        value, kind = changed.pop(key), self.random.randrange(6)
        if kind == 0:
            return changed
        if kind == 1:
            return {**changed, key: self.random.choice(_WRONG)}
        if kind == 2 and isinstance(value, list):
            return {**changed, key: value * 2}
        if kind == 3 and isinstance(value, list):
            return {**changed, key: self.random.sample(value, len(value))}
        if isinstance(value, list) and value:
            place = self.random.randrange(len(value))
            value = [*value[:place], self._value(value[place]), *value[place + 1 :]]
            return {**changed, key: value}
        return {**changed, key: self._value(value)}

    def _value(self, value: Any) -> Any:
        """Return another value, mostly of the same type."""
        if isinstance(value, str):
            return self.bytes(value.encode()).decode(errors="replace")
        if isinstance(value, bytes):
            return self.bytes(value)
        return self.random.choice(_WRONG)

    def _record(self) -> ArrayRecord | ConfigRecord | MetricRecord:
        name = self.random.choice(("numbers", "labels", "label", "passive-1", "x"))
        return self.random.choice(
            (
                lambda: ConfigRecord({name: self.random.choice(_WRONG)}),
                lambda: MetricRecord({name: self.random.choice((0, -1.0, [1, 2]))}),
                lambda: ArrayRecord({name: Array(self.random.choice(_ARRAYS))}),
                lambda: ArrayRecord(),
                lambda: ConfigRecord(),
            )
        )()

    def _change(self, record: Any) -> None:
        """Change one entry of a record: its value, its name, or whether it is there."""
        name = self.random.choice(list(record))
        kind = self.random.randrange(4)
        if kind == 0:
            del record[name]
        elif kind == 1:
            other = self.random.choice(("passive-2", "label", "nobody", ""))
            record[other] = record.pop(name)
        elif isinstance(record, ArrayRecord):
            array = record[name]
            record[name] = self.random.choice(
                (
                    lambda: Array(self.random.choice(_ARRAYS)),
                    lambda: Array("float64", array.shape, array.stype, array.data),
                    lambda: Array("nothing", array.shape, array.stype, array.data),
                    lambda: Array(array.dtype, (1 << 30,), array.stype, array.data),
                    lambda: Array(array.dtype, (-1,), array.stype, array.data),
                    lambda: Array(array.dtype, array.shape, "torch", array.data),
                    lambda: Array(array.dtype, array.shape, array.stype, b""),
                    lambda: Array(
                        array.dtype, array.shape, array.stype, array.data[:-4]
                    ),
                )
            )()
        else:
            values = (0, -1.0, [1, 2]) if isinstance(record, MetricRecord) else _WRONG
            record[name] = self.random.choice(values)


def _numbers(parts: Sequence[Buffer]) -> int:
    """Return the bytes at the end of a payload that are numbers of arrays."""
    buffers = parts[2:]  # behind the length of the header and the header
    return max(sum(map(len, buffers)) - 128, 0) if buffers else 0
