"""A checkpoint's index locates every element of every atom; its bytes equal the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.headers import Piece
from deepspeed_ucp.formats.deepspeed.module import drop_ties
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.records import Record
from deepspeed_ucp.model.storage import MASTER, MODULE, AtomKey
from tests.formats.saves import STATES, check_atom, check_index, edit, make_files, open_alone, open_files
from tests.support.cases import Case, cases
from tests.support.descriptors import count_read_bytes
from tests.support.reshard import examples, temporary_folder
from tests.synth import Model, Param, Run, Topology, partition_layout, random_state, read_state, write_checkpoint


@examples(200)
@given(case=cases())
def test_the_indexed_bytes_equal_the_state(case: Case) -> None:
    with temporary_folder() as folder:
        path = case.write(folder)
        index = open_checkpoint(str(path), Comm(), Naming(case.model.live_groups))
        check_index(index, case, read_state(path, case.model, case.topology))
    topology, found = case.topology, index.topology
    wrappers = {"raw": "torch", "unfused": "fp16_unfused", "fused": "fp16_fused", "bf16": "bf16"}
    assert found.wrapper == wrappers.get(topology.kind, "zero3" if topology.stage == 3 else "zero12")
    assert found.zero_stage == topology.stage
    assert found.dp == (topology.dp if topology.stage else 1)
    assert getattr(torch, found.precision) == topology.dtype
    assert (found.tp, found.pp, found.sp, found.ep, found.master) == (1, 1, 1, 1, "float32")
    assert found.elastic == topology.keeps_lean_states
    if topology.kind != "raw":
        held = partition_layout(case.model, topology)[0]
        assert [(f.group, f.names, f.partition) for f in found.flats] == [(h.group, h.names, h.numel) for h in held]
        assert index.flats == {0: found.flats}
        assert [f.numels for f in found.flats] == [
            tuple(index.atoms[AtomKey(n, MASTER)].numel for n in h.names) for h in held
        ]


def test_views_with_another_dtype_are_no_ties() -> None:
    pieces = {dtype: Piece(Record(64, 24, 7), 0, (6,), dtype) for dtype in ("float32", "int32")}
    aliases: dict[str, str] = {}
    assert dict(drop_ties({**pieces, "again": pieces["int32"]}, aliases)) == pieces
    assert aliases == {"again": "int32"}


SMALL = Model((Param("a", (3, 5)), Param("b", (7,), group=1)))


def test_the_index_has_counters_scaler_and_clipping(tmp_path: Path) -> None:
    run = Run(global_steps=12, global_samples=345, skipped_steps=2, clip_grad=0.5)
    path = write_checkpoint(tmp_path, SMALL, random_state(SMALL, 0, precision="fp16"), Topology(2, 3, "fp16"), run=run)
    index = open_alone(path)
    steps = {"global_steps": 12, "global_samples": 345, "skipped_steps": 2}
    assert index.counters == {**steps, "dp_world_size": 3, "mp_world_size": 1}
    assert [index.scaler[key] for key in ("cur_scale", "dynamic", "cur_iter")] == [2**16, True, 12]
    assert index.clip_grad == 0.5
    assert index.state_file == str(path / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("topology", [Topology(0), Topology(2, 3, "bf16"), Topology(3, 3)], ids=lambda t: t.label)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_only_headers_are_read(tmp_path: Path, topology: Topology, legacy: bool) -> None:
    model = Model((Param("a", (1000, 1000)), Param("b", (500, 1000)), Param("c", (1000, 500), frozen=True)))
    state = random_state(model, 0, precision=topology.precision)
    path = write_checkpoint(tmp_path, model, state, topology, legacy=legacy)
    size = sum(file.stat().st_size for file in path.iterdir())
    before = count_read_bytes()
    index = open_checkpoint(str(path), Comm(), Naming([[("a", True), ("b", True), ("c", False)]]))
    assert count_read_bytes() - before < size / 20
    assert sum(atom.nbytes for atom in index.atoms.values()) > size * 0.9


@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(1, 2, "bf16", "bf16")], ids=lambda t: t.label)
def test_empty_parameters_in_groups_of_older_releases_are_read(tmp_path: Path, topology: Topology) -> None:
    def keep(content: Any) -> None:
        content["param_shapes"][1]["hollow"] = torch.Size((0, 2))
        content["module"]["hollow"] = torch.empty(0, 2)

    def forget(content: Any) -> None:
        content["optimizer_state_dict"].pop("param_alignment_paddings", None)

    index = open_files(tmp_path, edit("optim", forget)(edit(STATES, keep)(make_files(SMALL, topology))))
    check_atom(index, AtomKey("hollow", MASTER), torch.empty(0, 2))
    assert index.groups[1].names == ("b", "hollow")


def test_views_in_another_order_are_no_ties(tmp_path: Path) -> None:
    """A transposed view has the offset and shape of the other tensor; a negated view also its strides."""
    files = make_files(SMALL, Topology(1, 1))
    square = torch.arange(9.0).view(3, 3)
    negated = torch.complex(square, square + 1).conj().imag.contiguous()
    views = {"square": square, "turned": square.T, "same": square, "negated": negated}
    views["bits"] = torch._neg_view(square)
    files[STATES]["module"] |= views
    index = open_files(tmp_path, files)
    assert {name: index.resolve(name) for name in views} == {name: name for name in views} | {"same": "square"}
    assert {key.name for key in index.unreadable} == {"turned", "bits"}
    check_atom(index, AtomKey("negated", MODULE), -(square + 1))


def test_the_prefix_of_torch_compile_is_removed_from_names(tmp_path: Path) -> None:
    model = Model(
        (Param("_orig_mod.a", (3, 5)), Param("_orig_mod.b", (2,), frozen=True)), {"_orig_mod.c": torch.ones(2)}
    )
    for topology in (Topology(0), Topology(1, 2), Topology(3, 2)):
        path = write_checkpoint(tmp_path, model, random_state(model, 0), topology, tag=topology.label)
        index = open_checkpoint(str(path), Comm(), Naming([[("_orig_mod.a", True), ("_orig_mod.b", False)]]))
        assert {key.name for key in index.atoms} == {"a", "b", "c"}
        assert index.buffers == {"c"}
        assert index.groups[0].names == ("a",)
