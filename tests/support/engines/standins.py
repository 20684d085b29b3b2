"""Engines whose parts need a GPU or libaio, with stand-ins; engines with DeepSpeed's fast writer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.zero import partition_parameters
from torch import Tensor

from deepspeed_ucp.testing.capture import CapturedEngine, capture
from tests.support.engines import cases
from tests.support.engines.cases import Case, make_engine
from tests.support.engines.models import MODELS, param_groups

ON_GPU = get_accelerator().device_name() == "cuda"
"""Mark of tests with stand-ins, most of which are only for the CPU."""


@dataclass(frozen=True)
class Stood(Case):
    """An engine with a stand-in, or with a feature that changes its making."""

    stand_in: str = ""

    @property
    def read(self) -> Callable[[Any], CapturedEngine]:
        return read_reloaded if self.stand_in == "offloaded" else capture

    def surround(self) -> AbstractContextManager[Any]:
        is_needed = self.stand_in in STAND_INS and not (ON_GPU and self.stand_in != "fast")
        return STAND_INS[self.stand_in]() if is_needed else nullcontext()


def make(kind: Stood, seed: int, **options: Any) -> Any:
    """Make the engine; "zenflow" creates optimizers itself, "offloaded" has trained and offloaded its states."""
    if kind.stand_in == "zenflow":
        module = MODELS["a b c"]()  # ZenFlow needs matrices of several rows
        return deepspeed.initialize(model=module, model_parameters=param_groups(module), config=kind.ds_config)[0]
    engine = make_engine(kind.ds_config, seed=seed, **options)
    if kind.stand_in == "offloaded":
        cases.step(engine)
        engine.offload_states()
    return engine


def step(engine: Any) -> float:
    if getattr(engine.optimizer, "offloaded_states", None):
        engine.reload_states()
    return cases.step(engine)


def read_reloaded(engine: Any) -> CapturedEngine:
    """Read the states, of which DeepSpeed keeps its copies of offloaded ones, too."""
    if getattr(engine.optimizer, "offloaded_states", None):
        engine.reload_states()
    found = capture(engine)
    for each in found.parameters.values():
        each.tensors = {name: tensor for name, tensor in each.tensors.items() if not name.endswith("_offload_buffer")}
    return found


@contextmanager
def split() -> Iterator[None]:
    """Rename the accelerator: partial offload then steps some sub-groups with a second optimizer."""
    with mock.patch.object(get_accelerator(), "_name", "cpu:0"):
        yield


@contextmanager
def superoffload() -> Iterator[None]:
    """Replace the stream, which a CPU does not have, and the check of the accelerator."""
    from deepspeed.runtime.superoffload import superoffload_stage3

    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda _other: None)
    with (
        mock.patch.object(superoffload_stage3, "_validate_superoffload_accelerator"),
        mock.patch.object(get_accelerator(), "current_stream", return_value=stream),
    ):
        yield


class Quantizer:
    """Symmetric 8-bit quantization in plain torch; DeepSpeed's kernel has no CPU build."""

    Symmetric = 0

    def quantize(self, tensor: Tensor, groups: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
        rows = tensor.detach().float().view(groups, -1)
        scales = rows.abs().amax(dim=1).clamp(min=1e-8) / (2 ** (bits - 1) - 1)
        return (rows / scales.view(groups, 1)).round().to(torch.int8).view(tensor.shape), scales

    def dequantize(self, tensor: Tensor, scales: Tensor, groups: int, bits: int, kind: int) -> Tensor:
        return (tensor.view(groups, -1).float() * scales.view(groups, 1)).view(tensor.shape).half()


def quantized() -> AbstractContextManager[Any]:
    partition_parameters.CUDAQuantizer.quantizer_cuda_module = Quantizer()
    return nullcontext()


class AioHandle:
    """Stands in for DeepSpeed's asynchronous I/O operator, which needs libaio's headers to compile.

    It has the operator's constraints: buffers are page-locked or not, reads and writes happen in `wait`, a read ends
    inside its file, and a write does not truncate the file.
    """

    locked: dict[int, Tensor] = {}  # noqa: RUF012 - of the process, as the operator's

    def __init__(self, **options: Any):
        self.options = options
        self.pending: list[tuple[str, Tensor, str | int, int]] = []

    def get_alignment(self) -> int:
        return 512

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        buffer = torch.full((numel,), float("nan"), dtype=example.dtype)
        self.locked[buffer.data_ptr()] = buffer
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        return self.locked.pop(buffer.data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(base <= low and high <= base + held.nbytes for base, held in self.locked.items())

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        if os.path.getsize(path) - offset < buffer.nbytes:
            return -1
        self.pending.append(("read", buffer, path, offset))
        return 0

    def async_pwrite(self, buffer: Tensor, path: str | int, offset: int) -> int:
        """Write to a path, or to an open file for the fast writer."""
        self.pending.append(("write", buffer, path, offset))
        return 0

    def wait(self) -> int:
        done, self.pending = self.pending, []
        for kind, buffer, path, offset in done:
            data = memoryview(buffer.detach().view(torch.uint8).numpy())
            flags = os.O_RDONLY if kind == "read" else os.O_WRONLY | os.O_CREAT
            file = path if isinstance(path, int) else os.open(path, flags, 0o600)
            moved = os.preadv(file, [data], offset) if kind == "read" else os.pwrite(file, data, offset)
            if file != path:
                os.close(file)
            assert moved == data.nbytes
        return len(done)


def install_aio() -> None:
    """Install the stand-in in this process, unless ``UCP_TEST_AIO=1`` requests the operator."""
    if os.environ.get("UCP_TEST_AIO") != "1":
        AsyncIOBuilder.load = lambda self, verbose=True: SimpleNamespace(aio_handle=AioHandle)


@contextmanager
def fast() -> Iterator[None]:
    """Make the fast writer work here; all ranks are on one machine."""
    from deepspeed.io import fast_file_writer
    from deepspeed.runtime.model_checkpointing import writer_factory

    module = SimpleNamespace(aio_handle=AioHandle, cast_to_byte_tensor=None)
    builder = lambda: SimpleNamespace(load=lambda: module)  # noqa: E731
    writer_factory.AsyncIOBuilder = fast_file_writer.UtilsBuilder = builder
    writer_factory.get_accelerator = lambda: SimpleNamespace(pin_memory=lambda it, **_: it, is_pinned=lambda _: True)
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")
    with mock.patch.object(os, "O_DIRECT", 0):  # needs aligned memory, which only the real handle has
        yield


STAND_INS = {"split": split, "superoffload": superoffload, "quantized": quantized, "fast": fast}
