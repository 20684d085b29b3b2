"""DeepSpeed's fast writer below stage 3: files under names that DeepSpeed's load does not find."""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.resume import resume_each, save_run
from tests.support.engines.cases import Case, train, training

pytest.importorskip("deepspeed.io", reason="DeepSpeed before its fast writer")
from deepspeed.io import fast_file_writer
from deepspeed.runtime.model_checkpointing import writer_factory

PLAIN = {"model": "plain"}


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


def train_with_fast_writer(ds_config: dict[str, Any], **options: Any) -> Generator[Any, None, None]:
    """As `cases.train`, with the fast writer made to work here; all ranks are on one machine."""
    module = SimpleNamespace(aio_handle=Handle, cast_to_byte_tensor=None)
    builder = lambda: SimpleNamespace(load=lambda: module)  # noqa: E731
    writer_factory.AsyncIOBuilder = fast_file_writer.UtilsBuilder = builder
    writer_factory.get_accelerator = lambda: SimpleNamespace(pin_memory=lambda it, **_: it, is_pinned=lambda _: True)
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")
    direct, os.O_DIRECT = os.O_DIRECT, 0  # needs aligned memory, which its real handle has
    try:
        yield from train(ds_config, **options)
    finally:
        os.O_DIRECT = direct


def fast(stage: int, dp: int, unit: str, precision: str = "fp32", **more: object) -> Case:
    """A case whose files are written by one rank per `unit`; all on this one `machine` write the same file at once."""
    writer = {"type": "fast", "data_parallel": unit, "io_buffer_size": 1 << 16, **more}
    return Case(stage, dp, precision, config={"checkpoint": {"writer": writer}})


SOURCES = [
    fast(1, 2, "replica"),
    fast(2, 3, "replica", "bf16"),
    fast(2, 2, "socket", io_multiplier=3),
    fast(1, 4, "machine"),
    fast(0, 2, "replica", "bf16"),
]


def test_every_unit_that_shares_the_writing(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    saves = [
        save_run(partial(train_with_fast_writer, **PLAIN), case.launch, (3, 3), tmp_path / str(number), ucp_worlds)
        for number, case in enumerate(SOURCES)
    ]
    for judge in resume_each(training(**PLAIN), saves, Case(1, 2).launch, ucp_worlds):
        assert judge().direct
