"""Checks the index of a tensor- or pipeline-parallel checkpoint against the synthesiser's local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model import COPY, MASTER, MODULE, AtomicIndex, AtomKey, ParamKey
from tests.formats.test_index import check_atom, read_atom
from tests.synth import Local, Model, Run, State, Topology, instance_names, partition_layout, split, write_checkpoint
from tests.synth.stages import holders, layers_of, placement_of

TIED = "tied_modules."


def tail_cut(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Cuts by the parameter's last word: columns in uneven widths, rows, blocks of both, or not at all."""
    kind = name.rpartition(".")[2]
    if kind.startswith("col"):
        return tensor.tensor_split(tp, 0)[rank]
    if kind.startswith("row"):
        return tensor.tensor_split(tp, 1)[rank]
    if kind.startswith("mix"):
        return torch.cat([half.tensor_split(tp, 0)[rank] for half in tensor.chunk(2)])
    return tensor


def write_and_open(
    folder: Path, model: Model, state: State, topology: Topology, run: Run | None = None, *, legacy: bool = False
) -> AtomicIndex:
    """Write a checkpoint of the state and return its index; a live engine's groups name a stage-0 source."""
    run = run or Run(garbage=float("nan"))
    path = write_checkpoint(folder, model, state, topology, run=run, cut=tail_cut, legacy=legacy)
    return open_checkpoint(str(path), Comm(), Naming(model.live_groups))


def check_parallel(index: AtomicIndex, model: Model, state: State, topology: Topology) -> None:
    """Check every shard, and the groups, scalars and flat buffers of every model-parallel rank."""
    assert (index.topology.tp, index.topology.pp) == (topology.tp, topology.pp)
    expected: set[AtomKey] = set()
    for rank, local in split(model, state, topology, tail_cut).items():
        expected |= check_rank(index, local, model, topology, rank)
    assert {key for key in index.atoms if key[1] != COPY} == expected
    for key in index.atoms:
        if key.state == COPY:
            check_copy(index, key.param)
    kept = {key.param for key in expected if key.state == MASTER}
    counts = {name: sum(param.name == name for param in kept) for name in instance_names(model, topology)}
    optimized = {name: count for name, count in index.instances.items() if index.find(name, MASTER)}
    assert optimized == {name: count for name, count in counts.items() if count > 1}
    assert index.buffers == set(model.buffers)
    members = [param for group in index.groups for param in group.members]
    assert sorted(members) == sorted(kept)
    assert set(index.flats) == set(range(topology.mp))
    assert index.flats[0] == index.topology.flats


def check_rank(index: AtomicIndex, local: Local, model: Model, topology: Topology, rank: int) -> set[AtomKey]:
    """Check that one rank's shards are its local tensors; return their atoms."""
    pp, tp = divmod(rank, topology.tp)
    found = set()
    trained = trained_anywhere(model, topology)
    for param in local.model.owners:
        if param.name not in trained:
            found |= check_untrained(index, model, topology, rank, param.name, local.state.atoms[param.name]["fp32"])
            continue
        if not has_master(model, topology, param.name, pp):
            continue
        held = ParamKey(param.name, held_masters(model, topology, param.name).index(pp))
        for state, value in local.state.atoms[param.name].items():
            key = AtomKey(held.name, state, held.instance)
            found.add(key)
            check_atom(index, key, value, tp)
        if param.trains:
            scalars = local.state.scalars.get(param.name, {})
            assert index.scalars.get(held, {}) == scalars, held
            check_group(index, held, local.state, None if topology.keeps_lean_states else param.group)
    for name, value in local.model.buffers.items():
        found |= check_untrained(index, model, topology, rank, name, value, is_buffer=True)
    check_flats(index, local.model, topology, rank)
    return found


def trained_anywhere(model: Model, topology: Topology) -> set[str]:
    """Return the parameters that some tensor-parallel rank trains; uneven shards may be empty."""
    return {param.name for param in model.owners if not param.frozen and param.group is not None and param.numel}


def has_master(model: Model, topology: Topology, name: str, pp: int) -> bool:
    """Return True if a stage's master is in a file; in fp32 without ZeRO it is the layer's tensor."""
    return topology.kind != "raw" or not model.layers or pp in writers(model, topology, name)


def held_masters(model: Model, topology: Topology, name: str) -> list[int]:
    """Return the stages whose master is in a file."""
    return [stage for stage in holders(model, topology, name) if has_master(model, topology, name, stage)]


def writers(model: Model, topology: Topology, name: str) -> list[int]:
    """Return the stages that write a file with a parameter or buffer."""
    if not model.layers:
        return [0]
    layers = [layer for layer in layers_of(model, name) if model.layers[layer].file]
    return [stage for stage, held in enumerate(placement_of(model, topology)) if set(layers) & set(held)]


def check_copy(index: AtomicIndex, param: ParamKey) -> None:
    """Check that the model's copy is the rounded master on every tensor-parallel rank."""
    for rank in range(index.topology.tp):
        keys = (AtomKey(param.name, state, param.instance) for state in (COPY, MASTER))
        copy, master = (read_atom(index, index.atoms[key], rank) for key in keys)
        assert copy.equal(master.to(copy.dtype)), param


def check_untrained(
    index: AtomicIndex,
    model: Model,
    topology: Topology,
    rank: int,
    name: str,
    value: torch.Tensor,
    *,
    is_buffer: bool = False,
) -> set[AtomKey]:
    """Check a buffer or frozen parameter: one atom, or for a tied module one per stage that wrote it."""
    pp, tp = divmod(rank, topology.tp)
    stages = writers(model, topology, name)
    if not stages or pp not in stages:
        return set()
    key = AtomKey(name, MODULE, stages.index(pp) if name.startswith(TIED) else 0)
    check_atom(index, key, value if is_buffer else value.to(topology.dtype), tp)
    if name.startswith(TIED) and len(stages) > 1:
        assert index.instances[name] == len(stages)
    return {key}


def check_group(index: AtomicIndex, param: ParamKey, state: State, group: int | None) -> None:
    """Check that the parameter's group keeps its hyper-parameters."""
    owners = [info for info in index.groups if param in info.members]
    assert len(owners) == 1, param
    if state.groups and group is not None:
        assert owners[0].hyper in [dict(hyper) for hyper in state.groups]


def check_flats(index: AtomicIndex, model: Model, topology: Topology, rank: int) -> None:
    """Check the local names and numels of a rank's flat buffers."""
    if topology.kind == "raw":
        return
    held: Sequence[object] = [
        (f.group, f.names, f.numel) for f in partition_layout(model, topology)[0] if f.names or topology.stage
    ]
    assert [(f.group, f.names, f.partition) for f in index.flats[rank]] == held
