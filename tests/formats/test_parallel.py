"""Tensor- and pipeline-parallel checkpoints: the index holds every rank's local tensors, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.model import COPY, MASTER, MODULE, AtomicIndex, AtomKey, ParamKey
from tests.formats.parallel import check_copy, check_parallel, write_and_open
from tests.formats.test_index import read_atom
from tests.synth import (
    Layer,
    Model,
    Param,
    Run,
    State,
    Topology,
    bidirectional,
    build_files,
    interleaved,
    random_state,
    write_files,
)

PLAIN = Model(
    (
        Param("a.col", (7, 5)),
        Param("a.row", (3, 6)),
        Param("a.norm", (5,), group=1),
        Param("frozen.col", (6, 2), frozen=True),
        Param("few.col", (2, 3), group=1),
        Param("b.mix", (8, 3)),
        Param("head", (7, 5), alias_of="a.col"),
    ),
    {"count": torch.arange(3), "scale": torch.tensor(2.5)},
)
WORD, POSITION = "tied_modules.embed.col", "tied_modules.embed.position"
PIPE = Model(
    (
        Param(WORD, (9, 3), tied=True),
        Param(POSITION, (4, 3), group=1),
        Param("tied_modules.embed.fixed", (2,), frozen=True),
        Param("1.col", (7, 3)),
        Param("1.bias", (7,), group=1, frozen=True),
        Param("2.row", (3, 6)),
        Param("2.norm", (3,), group=1),
        Param("4.mix", (8, 5)),
        Param("5.norm", (5,), group=1),
    ),
    {"1.count": torch.arange(3), "tied_modules.embed.scale": torch.ones(1)},
    (Layer("embed"), Layer(), Layer(), Layer(file=False), Layer(), Layer(), Layer("embed", file=False)),
)
TWICE = Model(PIPE.params, PIPE.buffers, (*PIPE.layers[:-1], Layer("embed")))


def draw(model: Model, topology: Topology, seed: int = 0) -> State:
    return random_state(model, seed, precision=topology.precision, topology=topology)


PLAIN_TOPOLOGIES = [
    Topology(0, 2, tp=2),
    Topology(0, 1, "fp16", "fused", tp=4),
    Topology(0, 1, "bf16", "unfused", tp=2),
    Topology(0, 2, "bf16", "bf16", tp=2),
    *(
        Topology(stage, dp, precision, tp=tp)
        for stage in (1, 2, 3)
        for dp, precision, tp in ((3, "bf16", 2), (1, "fp32", 4))
    ),
    Topology(1, 2, "bf16", "bf16", tp=3),
    Topology(1, 3, "fp16", tp=2, round_robin=True, parameter_alignment=True),
    Topology(2, 3, "fp32", tp=2, elastic=True),
    Topology(3, 5, "bf16", tp=2, sub_group_size=7),
]


@pytest.mark.parametrize("topology", PLAIN_TOPOLOGIES, ids=lambda t: t.label)
@pytest.mark.parametrize("dimensions", [True, False], ids=["", "older"])
def test_tensor_parallel_without_pipeline(tmp_path: Path, topology: Topology, dimensions: bool) -> None:
    state = draw(PLAIN, topology)
    index = write_and_open(tmp_path, PLAIN, state, topology, Run(garbage=float("nan"), parallel_dimensions=dimensions))
    check_parallel(index, PLAIN, state, topology)
    assert index.resolve("head") == "a.col"


PIPE_TOPOLOGIES = [
    Topology(1, 2, "bf16", tp=2, pp=2),
    Topology(1, 1, "fp32", tp=1, pp=1),
    Topology(1, 2, "fp32", tp=2, pp=1),
    Topology(1, 2, "fp32", tp=1, pp=1, model_axis=True),
    Topology(1, 3, "fp16", pp=4, placement=((0, 1), (2, 3), (4,), (5, 6))),
    Topology(1, 2, "bf16", "bf16", tp=2, pp=3),
    Topology(0, 2, "bf16", "bf16", tp=2, pp=3),
    Topology(1, 1, "fp32", tp=2, pp=7),
    Topology(1, 2, pp=9),
    Topology(1, 2, tp=2, pp=2, round_robin=True, elastic=True),
    Topology(0, 2, "fp32", tp=2, pp=2),
    Topology(0, 1, "fp32", pp=4),
    Topology(0, 1, "fp32", pp=9),
    Topology(0, 1, "fp32", pp=1, tp=3),
    Topology(0, 1, "fp16", "fused", tp=2, pp=3),
    Topology(0, 2, "fp16", "unfused", tp=3, pp=2),
]


@pytest.mark.parametrize("topology", PIPE_TOPOLOGIES, ids=lambda t: t.label)
@pytest.mark.parametrize(("model", "dimensions"), [(PIPE, True), (TWICE, False)], ids=["one file", "older-two files"])
def test_pipelines(tmp_path: Path, model: Model, topology: Topology, dimensions: bool) -> None:
    """The tied head has a file or not; older releases only store the product of the degrees."""
    state = draw(model, topology)
    index = write_and_open(tmp_path, model, state, topology, Run(parallel_dimensions=dimensions))
    check_parallel(index, model, state, topology)


LOOSE = Model(
    tuple(param for param in PIPE.params if param.name != "tied_modules.embed.fixed"),
    {"1.count": torch.arange(3)},
    PIPE.layers,
)


# -- copies and ties --------------------------------------------------------------------------------------------------


def copies(index: AtomicIndex) -> set[ParamKey]:
    return {key.param for key in index.atoms if key.state == COPY}


def test_a_tied_modules_copy_belongs_to_the_stage_that_wrote_it(tmp_path: Path) -> None:
    topology = Topology(1, 2, "bf16", tp=2, pp=2)
    index = write_and_open(tmp_path / "one", PIPE, draw(PIPE, topology), topology)
    assert index.instances[WORD] == 2
    assert {ParamKey(WORD), ParamKey(POSITION)} <= copies(index)
    assert not {ParamKey(WORD, 1), ParamKey(POSITION, 1)} & copies(index)
    index = write_and_open(tmp_path / "two", TWICE, draw(TWICE, topology), topology)
    both = {ParamKey(name, number) for name in (WORD, POSITION) for number in (0, 1)}
    assert both <= copies(index)
    for param in both:
        check_copy(index, param)


def test_copies_are_omitted_if_the_stage_of_a_tied_file_is_ambiguous(tmp_path: Path) -> None:
    topology = Topology(1, 1, pp=2, placement=interleaved(7, 2, 3))
    model = Model(LOOSE.params, LOOSE.buffers, TWICE.layers)
    index = write_and_open(tmp_path, model, draw(model, topology), topology)
    held = {param for param in copies(index) if param.name.startswith("tied_modules")}
    assert all(index.find(param.name, MASTER, param.instance) for param in copies(index))
    for param in held:
        check_copy(index, param)


BIDIRECTIONAL = Topology(1, 1, "bf16", pp=2, placement=bidirectional(7, 2))


def test_buffers_of_tied_files_that_are_equal_are_taken_once(tmp_path: Path) -> None:
    """Both ranks hold both ends of the pipeline: either may have written either file."""
    index = write_and_open(tmp_path, TWICE, draw(TWICE, BIDIRECTIONAL), BIDIRECTIONAL)
    buffer = "tied_modules.embed.scale"
    assert read_atom(index, index.atoms[AtomKey(buffer, MODULE)]).equal(TWICE.buffers[buffer])
    assert buffer not in index.instances
    assert not index.find(buffer, MODULE, 1)


@pytest.mark.parametrize("legacy", [False, True], ids=["other value", "no checksums"])
def test_buffers_of_tied_files_that_may_differ_are_refused(tmp_path: Path, legacy: bool) -> None:
    files = build_files(TWICE, draw(TWICE, BIDIRECTIONAL), BIDIRECTIONAL)
    if not legacy:
        files["layer_06-model_states.pt"]["scale"] += 1
    write_files(tmp_path, files, legacy=legacy)
    with pytest.raises(UnsupportedError, match=r"layer_00-model_states.pt: holds fixed, scale of a tied module"):
        open_checkpoint(str(tmp_path), Comm())


def test_a_layer_of_frozen_parameters_alone_is_kept(tmp_path: Path) -> None:
    model = Model((Param("0.col", (4, 3)), Param("1.col", (4, 3), frozen=True)), {}, (Layer(), Layer()))
    topology = Topology(1, 1, "bf16", tp=2, pp=2, placement=((0, 1), ()))
    index = write_and_open(tmp_path, model, draw(model, topology), topology)
    assert index.find("1.col", MODULE)
