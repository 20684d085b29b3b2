"""DeepSpeed's fast writer without libaio: plain writes in the place of its handle. Imported on the ranks only."""

from __future__ import annotations

import os
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import deepspeed.io.fast_file_writer as fast_file_writer
import deepspeed.runtime.model_checkpointing.writer_factory as writer_factory
import torch

from tests.support.engines import cases as engine_cases


class Handle:
    """The part of `aio_handle` that the writer calls; a write is done when it returns."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def get_alignment(self) -> int:
        return 512

    def async_pwrite(self, buffer: torch.Tensor, fd: int, offset: int) -> int:
        assert os.pwrite(fd, buffer.numpy().tobytes(), offset) == buffer.numel()
        return 0

    def wait(self) -> int:
        return 1


def train(ds_config: dict[str, Any], **options: Any) -> Generator[Any, None, None]:
    """As `cases.train`, with the fast writer made to work here; all ranks are on one machine."""
    module = SimpleNamespace(aio_handle=Handle, cast_to_byte_tensor=None)
    builder = lambda: SimpleNamespace(load=lambda: module)  # noqa: E731
    writer_factory.AsyncIOBuilder = fast_file_writer.UtilsBuilder = builder
    writer_factory.get_accelerator = lambda: SimpleNamespace(pin_memory=lambda it, **_: it, is_pinned=lambda _: True)
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")
    direct, os.O_DIRECT = os.O_DIRECT, 0  # needs aligned memory, which its real handle has
    try:
        yield from engine_cases.train(ds_config, **options)
    finally:
        os.O_DIRECT = direct
