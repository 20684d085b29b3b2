"""Every ZeRO stage in every precision to every other, at other data-parallel sizes and at the same one.

One engine of each kind loads its sources one after the other. Every two of the stages and precisions of both sides are
combined, and all four under `-m exhaustive`, at every size; `load/test_reshard.py` draws more in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import ResumeReport, WorldPool
from deepspeed_ucp.testing.resume import resume_each as resume_runs
from deepspeed_ucp.testing.resume import save_run
from tests.support.covering import cover, params
from tests.support.engines.cases import Case, is_direct, pair_id, saves_states, train, training

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIONS: dict[str, Any] = {"model": "mixed", "optimizer": "adamw", "scheduler": True}


def size_of(stage: int, precision: str, turn: int = 0) -> int:
    """Return 2, 3 or 4 ranks, each with every stage and with every precision."""
    return (2, 3, 4)[(stage + PRECISIONS.index(precision) + turn) % 3]


ROWS = cover(STAGES, PRECISIONS, STAGES, PRECISIONS)
SOURCES = {
    (stage, precision): [(s, p) for s, p, *target in ROWS if target == [stage, precision] and saves_states(s, p)]
    for stage, precision in product(STAGES, PRECISIONS)
}
# DeepSpeed 0.16 trains persistent parameters on uninitialised padding, so its losses differ from run to run.
SCATTERED = {"stage3_param_persistence_threshold": 0}
SMOKE = [
    (Case(1, 4, "bf16"), Case(3, 2, "bf16", zero=SCATTERED)),
    (Case(3, 4, "bf16", zero=SCATTERED), Case(2, 3, "bf16")),
    (Case(3, 2, zero=SCATTERED), Case(0, 3)),
    (Case(0, 2), Case(1, 3)),
]


def check(source: Case, target: Case, report: ResumeReport) -> None:
    is_direct(source, target, report)
    assert report.parameters == 10
    assert report.states >= 38  # masters, values and two moments of eight trained parameters, frozen ones, buffers


@pytest.mark.releases
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_one_engine_takes_every_source(stage: int, precision: str, resume_each: Callable[..., None]) -> None:
    found = SOURCES[stage, precision]
    first = (stage + PRECISIONS.index(precision)) % len(found)  # each source is some engine's first
    sources = [Case(s, size_of(s, p, 1), p) for s, p in [*found[first:], *found[:first]]]
    resume_each(sources, Case(stage, size_of(stage, precision), precision), check, **OPTIONS)


@pytest.mark.parametrize("stage", params([1, 3], STAGES))
def test_stage_at_the_same_size(stage: int, resume_each: Callable[..., None]) -> None:
    sources = [Case(other, 2) for other in (*STAGES[stage:], *STAGES[:stage])]
    resume_each(sources, Case(stage, 2), check, **OPTIONS)


# --- options on one side or on both

ROUND_ROBIN = {"round_robin_gradients": True}
PERSISTENT = {"stage3_param_persistence_threshold": 100000}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu"}, **SCATTERED}
CLIPPING = {"gradient_clipping": 0.1}
STATIC = {"fp16": {"enabled": True, "loss_scale": 64}}
LEGACY = {"checkpoint": {"checkpoint_serialization": False}}  # files that are no zips
# Without "replica" DeepSpeed's writer factory fails below stage 3. With it all data-parallel ranks write different
# bytes to one file of model states at once, which is then not always readable.
REPLICA = {"type": "python", "data_parallel": "replica"}
WRITER = {"checkpoint": {"writer": REPLICA}}


def sub_groups(size: int) -> dict[str, int]:
    return {"sub_group_size": size}


def plugin(case: Case, **options: Any) -> Case:
    return case.but(config={"checkpoint": {"universal": options}})


ODD_SOURCES = [
    Case(2, 3, zero=ROUND_ROBIN),
    Case(1, 4, zero=ROUND_ROBIN),
    Case(3, 3, zero=sub_groups(30)),
    Case(3, 2, "bf16", zero=sub_groups(9)),
    Case(3, 3, zero=SCATTERED),
    Case(2, 3, "bf16", zero=OFFLOAD),
    Case(3, 2, "bf16", zero=OFFLOAD_ALL),
    Case(1, 3, "fp16", config=STATIC),
    Case(1, 3, "bf16", config=LEGACY),
    Case(3, 3, config=LEGACY),
    Case(1, 1, "bf16", config=WRITER),
    Case(3, 3, config=WRITER),
]
"""Each into an engine of every second stage."""

ZERO_INIT = {"zero_init": True}
ODD_TARGETS: list[tuple[Case, list[Case], dict[str, Any]]] = [
    (Case(2, 2, zero=ROUND_ROBIN), [Case(1, 3), Case(2, 2), Case(2, 3, zero=ROUND_ROBIN)], {}),
    (Case(0, 3, "bf16"), [Case(2, 4, "bf16", zero=ROUND_ROBIN), Case(3, 2, "bf16", zero=sub_groups(9))], {}),
    (Case(3, 3, zero=sub_groups(30)), [Case(3, 2)], {}),
    (Case(3, 2, zero=sub_groups(1)), [Case(3, 2), Case(1, 3)], ZERO_INIT),
    (Case(3, 2, zero=sub_groups(9)), [Case(3, 2, zero=sub_groups(50)), Case(2, 2)], {}),
    (Case(3, 3, "bf16", zero=sub_groups(9)), [Case(2, 2, "bf16")], {}),
    (plugin(Case(3, 3, "bf16", zero=PERSISTENT), verify="off"), [Case(1, 2, "bf16")], {}),
    (plugin(Case(3, 3, "bf16", zero=SCATTERED), threads=1, window_mb=16), [Case(1, 2, "bf16")], {}),
    (plugin(Case(1, 2, zero=OFFLOAD), mode="direct"), [Case(1, 3)], {}),
    (Case(2, 2, "bf16", zero=OFFLOAD), [Case(2, 3, "bf16", zero=OFFLOAD)], {}),
    (plugin(Case(3, 2, "bf16", zero=OFFLOAD), threads=3), [Case(3, 3, "bf16"), Case(1, 3, "bf16")], {}),
    (Case(3, 2, "bf16", zero=OFFLOAD_ALL), [Case(0, 3, "bf16")], {}),
    (Case(3, 3, zero=OFFLOAD_ALL), [Case(3, 2, zero=OFFLOAD_ALL)], {}),
    (Case(3, 2, config=CLIPPING), [Case(1, 3, config=CLIPPING)], {}),
    (Case(3, 2, "bf16"), [Case(3, 3, "bf16")], ZERO_INIT),
]


CHOSEN_TARGETS = [each for number, each in enumerate(ODD_TARGETS[:11]) if number not in (2, 4)]


def check_odd(source: Case, target: Case, report: ResumeReport) -> None:
    is_direct(source, target, report)
    assert report.parameters == 10


@pytest.mark.releases
@pytest.mark.parametrize("stage", params([0, 3], STAGES))
def test_odd_sources(stage: int, resume_each: Callable[..., None]) -> None:
    """Saves before the first step go into a fresh engine first, and into one that has trained."""
    unstepped = [(Case((3 * stage + k) % 4, 3), {"steps": (0, 2)}) for k in range(1, 5)]
    odd = [case for number, case in enumerate(ODD_SOURCES) if number % 2 == stage % 2]
    resume_each([*unstepped, *odd, unstepped[0]], Case(stage, 2), check_odd, **OPTIONS)


@pytest.mark.releases
@pytest.mark.parametrize(("target", "saved", "live"), params(CHOSEN_TARGETS, ODD_TARGETS, lambda row: str(row[0])))
def test_odd_targets(target: Case, saved: list[Case], live: dict[str, Any], resume_each: Callable[..., None]) -> None:
    resume_each(saved, target, check_odd, live=live, **OPTIONS)


@pytest.mark.parametrize("target", [Case(3, 2), Case(1, 2), Case(0, 3)], ids=str)
def test_elastic_checkpoint(target: Case, resume_each: Callable[..., None]) -> None:
    """DeepSpeed's old elastic format has no param groups: the live hyper-parameters stay."""
    resume_each([Case(1, 3, zero={"elastic_checkpoint": True})], target, check_odd)


@pytest.mark.exhaustive  # the format is the writer's above
def test_decoupled_writer(resume_each: Callable[..., None]) -> None:
    """Its process reads the tensors after the save: the model must not change buffers in the next forward pass."""
    source = Case(3, 2, config={"checkpoint": {"writer": {**REPLICA, "decoupled": True}}})
    resume_each([source], Case(2, 3), model="plain")


# --- DeepSpeed's fast writer below stage 3: files under names that DeepSpeed's load does not find


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
    from deepspeed.io import fast_file_writer
    from deepspeed.runtime.model_checkpointing import writer_factory

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


FAST_SOURCES = [
    fast(1, 2, "replica"),
    fast(2, 3, "replica", "bf16"),
    fast(2, 2, "socket", io_multiplier=3),
    fast(1, 4, "machine"),
    fast(0, 2, "replica", "bf16"),
]


@pytest.mark.skipif(not find_spec("deepspeed.io"), reason="DeepSpeed before its fast writer")
def test_every_unit_that_shares_the_writing(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    saves = [
        save_run(
            partial(train_with_fast_writer, model="plain"), case.launch, (3, 3), tmp_path / str(number), ucp_worlds
        )
        for number, case in enumerate(FAST_SOURCES)
    ]
    for judge in resume_runs(training(model="plain"), saves, Case(1, 2).launch, ucp_worlds):
        assert judge().direct


# --- all combinations


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_combination(stage: int, precision: str, size: int, resume_each: Callable[..., None]) -> None:
    sources = [Case(s, dp, p) for s, p, dp in product(STAGES, PRECISIONS, (2, 3, 4))]
    first = (7 * stage + size) % len(sources)
    resume_each([*sources[first:], *sources[:first]], Case(stage, size, precision), check, **OPTIONS)


@pytest.mark.engine_smoke
@pytest.mark.parametrize("pair", SMOKE, ids=pair_id)
def test_smoke(pair: tuple[Case, Case], resume_each: Callable[..., None]) -> None:
    """A third loss is of the rate that the scheduler has set since."""
    resume_each(pair[:1], pair[1], check, steps=(3, 3), **OPTIONS)
