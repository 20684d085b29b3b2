"""Tensors as destinations of bytes."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ucp.load.sinks import TensorSink
from deepspeed_ucp.plan import Part


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))


def test_bytes_of_the_same_dtype_go_straight_into_the_memory() -> None:
    tensor = torch.zeros(5)
    sink = TensorSink(tensor, "float32", fresh=True)
    view = sink.view(2, 8)
    assert view is not None
    view[:] = raw(torch.tensor([1.5, -2.0]))
    assert tensor.tolist() == [0, 0, 1.5, -2.0, 0]


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.int32, torch.int64),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_other_dtypes_are_converted_as_torch_does(stored: torch.dtype, live: torch.dtype) -> None:
    tensor, values = torch.zeros(5, dtype=live), torch.tensor([1.1, -3.0]).to(stored)
    sink = TensorSink(tensor, str(stored).removeprefix("torch."), fresh=False)
    assert sink.view(0, 4) is None
    sink.store(Part(2 * stored.itemsize, 0, 3), raw(values))
    assert tensor[3:].equal(values.to(live))
    assert not tensor[:3].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_every_dtype_has_memory(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1]).to(dtype)
    tensor = torch.zeros(3, dtype=dtype)
    sink = TensorSink(tensor, str(dtype).removeprefix("torch."), fresh=True)
    view = sink.view(0, 3 * dtype.itemsize)
    assert view is not None
    view[:] = raw(values)
    sink.settle()
    assert tensor.equal(values)


def test_a_tensor_that_is_not_flat_is_filled_through_a_proxy() -> None:
    whole = torch.zeros(3, 2)
    sink = TensorSink(whole.t(), "float32", fresh=False)
    view = sink.view(0, 24)
    assert view is not None
    view[:] = raw(torch.arange(6.0))
    assert not whole.any()
    sink.settle()
    assert whole.t().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_empty_tensor_has_no_memory() -> None:
    assert TensorSink(torch.zeros(0), "float32", fresh=True).view(0, 0) is None


@pytest.mark.parametrize("live", [torch.float32, torch.bfloat16], ids=str)
def test_rows_go_to_places_apart(live: torch.dtype) -> None:
    """Two rows of two elements, four apart."""
    tensor = torch.zeros(10, dtype=live)
    sink = TensorSink(tensor, "float32", fresh=True)
    part, data = Part(16, 0, 1, run=8, stride=4), raw(torch.arange(1.0, 5.0))
    sink.store(part, data)
    assert tensor.tolist() == [0, 1, 2, 0, 0, 3, 4, 0, 0, 0]
    tensor.zero_()
    sink.take(part, data)
    assert tensor.tolist() == [0, 1, 2, 0, 0, 3, 4, 0, 0, 0]


def test_rows_of_a_part_of_a_buffer() -> None:
    """A tensor that does not begin where its storage does."""
    whole = torch.zeros(12)
    sink = TensorSink(whole[2:], "float32", fresh=True)
    sink.store(Part(8, 0, 1, run=4, stride=3), raw(torch.tensor([1.0, 2.0])))
    assert whole.tolist() == [0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("live", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_from_other_memory_are_taken(live: torch.dtype) -> None:
    tensor = torch.zeros(5, dtype=live)
    TensorSink(tensor, "float32", fresh=True).take(Part(8, 0, 2), raw(torch.tensor([1.5, -2.0])))
    assert tensor.tolist() == [0, 0, 1.5, -2.0, 0]
