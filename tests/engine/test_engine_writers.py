"""DeepSpeed's fast writer below stage 3: files under names that its own load does not find."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.resume import resume_each, save_run
from tests.support.engines.cases import Case, training

pytest.importorskip("deepspeed.io", reason="DeepSpeed before its fast writer")
from tests.support.engines import writers as engine_writers

PLAIN = {"model": "plain"}


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
        save_run(partial(engine_writers.train, **PLAIN), case.launch, (3, 3), tmp_path / str(number), ucp_worlds)
        for number, case in enumerate(SOURCES)
    ]
    for judge in resume_each(training(**PLAIN), saves, Case(1, 2).launch, ucp_worlds):
        assert judge().direct
