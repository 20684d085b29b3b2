"""Atoms of an index: read shard by shard, and compared with the state that was saved."""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import COPY, ITEMSIZE, MODULE, Atom, AtomKey, ParamKey
from deepspeed_ucp.stream.full_tensors import assemble_full_tensors
from deepspeed_ucp.stream.reader import AtomReader
from tests.support import wholes
from tests.support.cases import Case
from tests.synth import State


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


def read_whole(index: AtomicIndex, atom: Atom) -> torch.Tensor:
    with AtomReader(index) as reader:
        return wholes.read_whole(reader, assemble_full_tensors(index).tensors[atom.key])
