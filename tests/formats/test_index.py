"""A checkpoint's index locates every element of every atom; its bytes are the state, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import COPY, ITEMSIZE, MASTER, MODULE, Atom, AtomKey, ParamKey
from tests.support.reshard import Case, cases, examples, temporary_folder
from tests.synth import Model, Param, Run, State, Topology, partition_layout, random_state, read_state, write_checkpoint


def read_atom(index: AtomicIndex, atom: Atom, rank: int = 0) -> torch.Tensor:
    """Read a shard's elements, each from exactly one fragment (invariant 1)."""
    itemsize, shard = ITEMSIZE[atom.dtype], atom.shards[rank]
    out, counts = bytearray(shard.numel * itemsize), np.zeros(shard.numel, np.int64)
    for fragment in shard.list_fragments(atom.state):
        record = index.records[fragment.record]
        assert 0 <= fragment.offset <= record.nbytes - fragment.numel * itemsize
        with open(index.files[record.file].path, "rb") as stream:
            stream.seek(record.offset + fragment.offset)
            data = stream.read(fragment.numel * itemsize)
        out[fragment.start * itemsize : fragment.start * itemsize + len(data)] = data
        counts[fragment.start : fragment.start + fragment.numel] += 1
    assert (counts == 1).all(), f"{atom.name} ({atom.state}): {counts}"
    dtype = getattr(torch, atom.dtype)
    return torch.frombuffer(out, dtype=dtype).view(shard.shape) if out else torch.empty(shard.shape, dtype=dtype)


def read_all(index: AtomicIndex) -> dict[AtomKey, list[torch.Tensor]]:
    """Read all shards of all atoms."""
    return {k: [read_atom(index, atom, rank) for rank in range(len(atom.shards))] for k, atom in index.atoms.items()}


def check_atom(index: AtomicIndex, key: AtomKey, value: torch.Tensor) -> None:
    """Check that an atom holds ``value``."""
    found = read_atom(index, index.atoms[key])
    assert (found.shape, found.dtype) == (value.shape, value.dtype), key
    assert found.numel() == 0 or found.reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8)), key


def check_index(index: AtomicIndex, case: Case, saved: State) -> None:
    """Check atoms, scalars, groups, ties and buffers against the state."""
    model, topology = case.model, case.topology
    expected = set()
    for param in model.owners:
        trained = param.trains and param.group is not None
        for state, value in saved.atoms[param.name].items():
            key = AtomKey(param.name, state if trained else MODULE)
            expected.add(key)
            check_atom(index, key, value if trained else value.to(topology.dtype))
        if trained:
            assert index.scalars.get(ParamKey(param.name), {}) == saved.scalars.get(param.name, {}), param.name
    for name, value in model.buffers.items():
        expected.add(AtomKey(name, MODULE))
        check_atom(index, AtomKey(name, MODULE), value)
    assert {key for key in index.atoms if key[1] != COPY} == expected
    assert index.buffers == set(model.buffers)
    for param in model.params:
        assert index.resolve(param.name) == (param.alias_of or param.name)
    members = [tuple(p.name for p in group if p.trains) for group in model.groups]
    assert [set(group.names) for group in index.groups] == [set(names) for names in members]
    if saved.groups:
        assert [group.hyper for group in index.groups] == [dict(hyper) for hyper in saved.groups]


@examples(200)
@given(case=cases())
def test_the_index_is_the_state(case: Case) -> None:
    with temporary_folder() as folder:
        path = case.write(folder)
        index = open_checkpoint(str(path), Comm(), Naming(case.model.live_groups))
        check_index(index, case, read_state(path, case.model, case.topology))
    check_topology(index, case)


def check_topology(index: AtomicIndex, case: Case) -> None:
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


SMALL = Model((Param("a", (3, 5)), Param("b", (7,), group=1)))


def test_counters_scaler_and_clipping_are_taken_over(tmp_path: Path) -> None:
    run = Run(global_steps=12, global_samples=345, skipped_steps=2, clip_grad=0.5)
    path = write_checkpoint(tmp_path, SMALL, random_state(SMALL, 0, precision="fp16"), Topology(2, 3, "fp16"), run=run)
    index = open_checkpoint(str(path), Comm())
    assert index.counters == {
        "global_steps": 12,
        "global_samples": 345,
        "skipped_steps": 2,
        "dp_world_size": 3,
        "mp_world_size": 1,
    }
    assert (index.scaler["cur_scale"], index.scaler["dynamic"], index.scaler["cur_iter"]) == (
        2**16,
        True,
        12,
    )
    assert index.clip_grad == 0.5
    assert index.state_file == str(path / "mp_rank_00_model_states.pt")


def count_read_bytes() -> int:
    """Return the bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


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


def test_names_lose_the_prefix_of_torch_compile(tmp_path: Path) -> None:
    model = Model(
        (Param("_orig_mod.a", (3, 5)), Param("_orig_mod.b", (2,), frozen=True)), {"_orig_mod.c": torch.ones(2)}
    )
    for topology in (Topology(0), Topology(1, 2), Topology(3, 2)):
        path = write_checkpoint(tmp_path, model, random_state(model, 0), topology, tag=topology.label)
        index = open_checkpoint(str(path), Comm(), Naming([[("_orig_mod.a", True), ("_orig_mod.b", False)]]))
        assert {key.name for key in index.atoms} == {"a", "b", "c"}
        assert index.buffers == {"c"}
        assert index.groups[0].names == ("a",)
