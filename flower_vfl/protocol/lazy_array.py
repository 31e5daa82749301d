"""Flower arrays that make their bytes when they are read, and not to be sent."""

from flwr.app import Array

Buffer = bytes | memoryview


class LazyArray(Array):
    """A Flower array whose bytes lie elsewhere; equal to the same array of Flower."""

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the bytes in parts, without a copy."""
        buffers: tuple[Buffer, ...] = self.__dict__["_buffers"]
        return buffers

    @property
    def data(self) -> bytes:
        """The bytes of the array."""
        if "_data" not in self.__dict__:
            self.__dict__["_data"] = b"".join(self.buffers())
        data: bytes = self.__dict__["_data"]
        return data

    @data.setter
    def data(self, data: bytes) -> None:
        self.__dict__.update(_data=data, _buffers=(data,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and _fields(self) == _fields(other)

    __hash__ = None  # type: ignore[assignment]  # as Flower's

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        """Become one of Flower's own arrays in another process."""
        return Array, _fields(self)


class BufferArray(LazyArray):
    """An array in given buffers, such as the one in which its message arrived."""

    def __init__(
        self, dtype: str, shape: tuple[int, ...], stype: str, *buffers: Buffer
    ) -> None:
        # Past Array's checks of four optional arguments, which cost more than the rest.
        self.__dict__.update(dtype=dtype, shape=shape, stype=stype, _buffers=buffers)


def _fields(array: Array) -> tuple[str, tuple[int, ...], str, bytes]:
    return array.dtype, array.shape, array.stype, array.data


# Flower writes the name of the class into what it sends and looks it up on arrival.
BufferArray.__name__ = BufferArray.__qualname__ = Array.__qualname__
