"""Tensor- and pipeline-parallel checkpoints of all wrappers: every rank's tensors, copies and ties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import COPY, MASTER, MODULE, AtomKey, ParamKey
from tests.formats.saves import PIPE, PLAIN, POSITION, WORD, make_files, open_files, read_atom
from tests.support.reshard import LIVE_LR
from tests.support.reshard3d import PIPELINE, PIPELINES, PLAINS, draw_state, expect, load_wanted, make_config
from tests.support.reshard3d import PLAIN as BODY
from tests.synth import Layer, Model, Param, Run, Topology, bidirectional, interleaved, partition_layout

TWICE = Model(PIPE.params, PIPE.buffers, (*PIPE.layers[:-1], Layer("embed")))


TWO_FILES = replace(PIPELINE, layers=(*PIPELINE.layers[:-1], Layer("embed")))
OLDER = [
    *((BODY, topology) for topology in PLAINS),
    (BODY, Topology(2, 3, "fp32", tp=2, elastic=True)),
    *((TWO_FILES, topology) for topology in PIPELINES),
    (TWO_FILES, Topology(0, 1, "fp16", "fused", tp=2, pp=3)),
    (TWO_FILES, Topology(0, 2, "fp16", "unfused", tp=3, pp=2)),
    (TWO_FILES, Topology(1, 3, "fp16", pp=4, placement=((0, 1), (2,), (3,), (4,)))),
]


@pytest.mark.parametrize(("model", "topology"), OLDER, ids=lambda each: getattr(each, "label", ""))
def test_saves_of_older_releases_load(tmp_path: Path, model: Model, topology: Topology) -> None:
    """They only store the product of the degrees. ``tests/load/test_reshard_3d.py`` loads newer ones."""
    source = draw_state(model, topology)
    source.write(tmp_path, Run(garbage=float("nan"), parallel_dimensions=False))
    wanted = expect(source, Topology(1, 2))
    if topology.keeps_lean_states:  # these have no hyper-parameters
        wanted = replace(wanted, state=replace(wanted.state, groups=({"lr": LIVE_LR},) * len(model.groups)))
    index, _ = load_wanted(tmp_path, wanted, make_config(model))
    assert (index.topology.tp, index.topology.pp) == (topology.tp, topology.pp)
    assert index.buffers == set(model.buffers)
    for rank, local in source.locals.items() if topology.kind != "raw" else ():
        flats = partition_layout(local.model, topology)[0]
        held = [(flat.group, flat.names, flat.numel) for flat in flats if flat.names or topology.stage]
        assert [(flat.group, flat.names, flat.partition) for flat in index.flats[rank]] == held


def test_ties_of_tensor_parallel_ranks_are_read(tmp_path: Path) -> None:
    assert open_files(tmp_path, make_files(PLAIN, Topology(1, 2, tp=2))).resolve("head") == "a.col"


def test_extra_states_in_layer_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = make_files(PIPE, Topology(1, 1, "fp32", pp=2))
    for name in [name for name in files if name.startswith("layer_")][:2]:
        files[name]["block._extra_state"] = b"fp8"
    open_files(tmp_path, files)
    assert (
        caplog.text.count("layer files are neither loaded nor converted: ") == 1
        and ".block._extra_state, " in caplog.text
    )


def check_copy(index: AtomicIndex, param: ParamKey) -> None:
    """Check that the model's copy is the rounded master on every tensor-parallel rank."""
    for rank in range(index.topology.tp):
        keys = (AtomKey(param.name, state, param.instance) for state in (COPY, MASTER))
        copy, master = (read_atom(index, index.atoms[key], rank) for key in keys)
        assert copy.equal(master.to(copy.dtype)), param


def copies(index: AtomicIndex) -> set[ParamKey]:
    return {key.param for key in index.atoms if key.state == COPY}


def test_a_tied_modules_copy_belongs_to_the_stage_that_wrote_it(tmp_path: Path) -> None:
    topology = Topology(1, 2, "bf16", tp=2, pp=2)
    index = open_files(tmp_path / "one", make_files(PIPE, topology), Naming(PIPE.live_groups))
    assert index.instances[WORD] == 2
    assert {ParamKey(WORD), ParamKey(POSITION)} <= copies(index)
    assert not {ParamKey(WORD, 1), ParamKey(POSITION, 1)} & copies(index)
    index = open_files(tmp_path / "two", make_files(TWICE, topology), Naming(TWICE.live_groups))
    both = {ParamKey(name, number) for name in (WORD, POSITION) for number in (0, 1)}
    assert both <= copies(index)
    for param in both:
        check_copy(index, param)


def test_copies_are_omitted_if_the_stage_of_a_tied_file_is_ambiguous(tmp_path: Path) -> None:
    topology = Topology(1, 1, pp=2, placement=interleaved(7, 2, 3))
    params = tuple(param for param in TWICE.params if param.name != "tied_modules.embed.fixed")
    model = replace(TWICE, params=params, buffers={"1.count": torch.arange(3)})
    index = open_files(tmp_path, make_files(model, topology), Naming(model.live_groups))
    held = {param for param in copies(index) if param.name.startswith("tied_modules")}
    assert all(index.find(param.name, MASTER, param.instance) for param in copies(index))
    for param in held:
        check_copy(index, param)


BIDIRECTIONAL = Topology(1, 1, "bf16", pp=2, placement=bidirectional(7, 2))


def test_equal_buffers_of_tied_files_are_read_once(tmp_path: Path) -> None:
    """Both ranks hold both ends of the pipeline, so either may have written either file."""
    index = open_files(tmp_path, make_files(TWICE, BIDIRECTIONAL), Naming(TWICE.live_groups))
    buffer = "tied_modules.embed.scale"
    assert read_atom(index, index.atoms[AtomKey(buffer, MODULE)]).equal(TWICE.buffers[buffer])
    assert buffer not in index.instances
    assert not index.find(buffer, MODULE, 1)


@pytest.mark.parametrize("legacy", [False, True], ids=["other value", "no checksums"])
def test_buffers_of_tied_files_that_may_differ_are_refused(tmp_path: Path, legacy: bool) -> None:
    files = make_files(TWICE, BIDIRECTIONAL)
    if not legacy:
        files["layer_06-model_states.pt"]["scale"] += 1
    with pytest.raises(UnsupportedError, match=r"layer_00-model_states.pt: holds fixed, scale of a tied module"):
        open_files(tmp_path, files, legacy=legacy)


@pytest.mark.parametrize("tp", [1, 2])
def test_tied_files_of_one_stage_are_compared(tp: int, tmp_path: Path) -> None:
    """DeepSpeed's load uses the last file. With `parallel_write` several ranks write, so buffers may differ."""
    axis = "" if tp == 1 else "-model_01"
    for key in ("col", "fixed", "scale"):
        files = make_files(TWICE, Topology(1, 2, "bf16", tp=tp))
        files[f"layer_06{axis}-model_states.pt"][key] += 1
        if key == "scale":
            index = open_files(tmp_path / key, files, Naming(TWICE.live_groups))
            found = read_atom(index, index.atoms[AtomKey("tied_modules.embed.scale", MODULE)], tp - 1)
            assert found.equal(TWICE.buffers["tied_modules.embed.scale"] + 1)
            continue
        with pytest.raises(CheckpointError, match=rf"layer_06.*values of tied_modules.embed.{key} than layer_00"):
            open_files(tmp_path / key, files, Naming(TWICE.live_groups))


def test_a_layer_with_only_frozen_parameters_is_kept(tmp_path: Path) -> None:
    model = Model((Param("0.col", (4, 3)), Param("1.col", (4, 3), frozen=True)), {}, (Layer(), Layer()))
    topology = Topology(1, 1, "bf16", tp=2, pp=2, placement=((0, 1), ()))
    index = open_files(tmp_path, make_files(model, topology), Naming(model.live_groups))
    assert index.find("1.col", MODULE)
