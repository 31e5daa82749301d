"""Tensors as Flower's arrays and back: every bit, every layout, and tampering."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array
from torch import Tensor, nn

from flower_vfl import ConfigError, PartyError
from flower_vfl.protocol.messages import Content, TensorArray, to_tensor

DTYPES = [
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (0,), (0, 3), (1,), (5,), (4, 3), (2, 1, 3), (2, 3, 4, 5)]


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_keep_every_bit_and_flower_reads_them(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    array = TensorArray(tensor)
    assert tuple(array.shape) == shape
    assert array.dtype == str(tensor.numpy().dtype)
    by_flower = array.numpy()
    assert by_flower.dtype == tensor.numpy().dtype
    assert by_flower.tobytes() == tensor.numpy().tobytes()
    assert by_flower.shape == shape
    assert array.data == Array(tensor.numpy()).data  # the very bytes of Flower
    assert same(to_tensor(array), tensor)
    assert same(to_tensor(Array(tensor.numpy())), tensor)
    travelled = pickle.loads(pickle.dumps(array))
    assert type(travelled) is Array
    assert same(to_tensor(travelled), tensor)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[::2], id="every second row"),
        pytest.param(lambda x: x[:, 1:3], id="columns"),
        pytest.param(lambda x: x[:, :1].expand(-1, 4), id="expanded"),
        pytest.param(lambda x: x.requires_grad_() * 2, id="with a graph"),
        pytest.param(lambda x: nn.Parameter(x), id="parameter"),
    ],
)
def test_tensors_of_any_layout(make: Callable[[Tensor], Tensor]) -> None:
    tensor = make(torch.randn(6, 5))
    array = TensorArray(tensor)
    assert np.array_equal(array.numpy(), tensor.detach().numpy())
    for copy in (to_tensor(array), to_tensor(pickle.loads(pickle.dumps(array)))):
        assert torch.equal(copy, tensor.detach())
        assert not copy.requires_grad


def test_bfloat16_travels_as_float32() -> None:
    tensor = torch.randn(3, 2).bfloat16()
    array = TensorArray(tensor)
    assert array.dtype == "float32"
    assert same(to_tensor(array), tensor.float())
    assert np.array_equal(array.numpy(), tensor.float().numpy())


def test_arrays_that_flower_made_of_other_layouts() -> None:
    for values in (
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=">i4").astype("<i4"),
        np.float32(3.5),
    ):
        found = to_tensor(Array(np.asarray(values))).numpy()
        assert np.array_equal(found, values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: Array(a.dtype, a.shape, a.stype, a.data[:-4]), "cannot be read"),
        (lambda a: Array(a.dtype, a.shape, a.stype, b""), "cannot be read"),
        (lambda a: Array(a.dtype, a.shape, "torch", a.data), "cannot be read"),
        (lambda a: Array("float99", a.shape, a.stype, a.data), "type float99"),
        (lambda a: Array(a.dtype, a.shape, a.stype, a.data[:-3]), "cannot be read"),
        (lambda a: Array(a.dtype, a.shape, a.stype, a.data + b"x"), "cannot be read"),
        (lambda a: Array(a.dtype, (2, 3), a.stype, a.data), "cannot be read"),
    ],
)
def test_a_tampered_array(change: Callable[[Array], Array], words: str) -> None:
    good = TensorArray(torch.randn(3, 2))
    bad = change(Array(good.dtype, good.shape, good.stype, good.data))
    with pytest.raises(ConfigError, match=words):
        to_tensor(bad)
    with pytest.raises(PartyError, match=f"'shop'.*({words}).*version"):
        Content(arrays={"shop": bad}).tensors()
