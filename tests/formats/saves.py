"""Build, change, write, open and read the files of synthesised saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import COPY, ITEMSIZE, MODULE, Atom, AtomKey, ParamKey
from deepspeed_ucp.stream.full_tensors import assemble_full_tensors
from deepspeed_ucp.stream.reader import AtomReader
from tests.support import wholes
from tests.support.cases import Case
from tests.synth import Layer, Model, Param, Run, State, Topology, build_files, random_state, write_files

Files = dict[str, dict[str, Any]]
Change = Callable[[Files], Files]

STATES = "mp_rank_00_model_states.pt"

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


def shard(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def tail_cut(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Cut by the parameter's last word: columns in uneven widths, rows, blocks of both, or no cut."""
    kind = name.rpartition(".")[2]
    if kind.startswith("col"):
        return tensor.tensor_split(tp, 0)[rank]
    if kind.startswith("row"):
        return tensor.tensor_split(tp, 1)[rank]
    if kind.startswith("mix"):
        return torch.cat([half.tensor_split(tp, 0)[rank] for half in tensor.chunk(2)])
    return tensor


def make_files(
    model: Model, topology: Topology, seed: int = 0, run: Run | None = None, *, zero: Any = (), **drawn: Any
) -> Files:
    """Return the contents of a save's files by name.

    Args:
        zero: further keys of the ds_config's `zero_optimization`.
        drawn: options of `random_state`.
    """
    state = random_state(model, seed, precision=topology.precision, topology=topology, **drawn)
    files = build_files(model, state, topology, run or Run(), cut=tail_cut)
    return edit("", lambda content: content.get("ds_config", {}).get("zero_optimization", {}).update(zero))(files)


def edit(part: str, work: Callable[[Any], object]) -> Change:
    """Change the contents of files whose names contain `part`, in place."""

    def change(files: Files) -> Files:
        for name, content in files.items():
            if part in name:
                work(content)
        return files

    return change


def assign(part: str, **fields: Any) -> Change:
    return edit(part, lambda content: content.update(fields))


def find_states(content: Any) -> Any:
    state = content["optimizer_state_dict"]
    return state.get("base_optimizer_state") or state["optimizer_state_dict"]


def open_files(folder: Path, files: Files, naming: Naming | None = None, *, legacy: bool = False) -> AtomicIndex:
    write_files(folder, files, legacy=legacy)
    return open_checkpoint(str(folder), Comm(), naming)


def open_alone(folder: Path | str) -> AtomicIndex:
    return open_checkpoint(str(folder), Comm())


def check_refused(folder: Path | str, text: str, kind: Any = CheckpointError) -> None:
    with pytest.raises(kind, match=text):
        open_alone(folder)


def read_atom(index: AtomicIndex, atom: Atom, rank: int = 0) -> torch.Tensor:
    """Read a shard's elements, each from exactly one fragment (invariant 1)."""
    itemsize, shard = ITEMSIZE[atom.dtype], atom.shards[rank]
    out, counts = bytearray(shard.numel * itemsize), np.zeros(shard.numel, np.int64)
    for fragment in shard.list_fragments(atom.state):
        record = index.records[fragment.record]
        assert 0 <= fragment.offset <= record.nbytes - fragment.numel * itemsize
        with open(index.files[index.records.files[fragment.record]].path, "rb") as stream:
            stream.seek(record.offset + fragment.offset)
            data = stream.read(fragment.numel * itemsize)
        out[fragment.start * itemsize : fragment.start * itemsize + len(data)] = data
        counts[fragment.start : fragment.start + fragment.numel] += 1
    assert (counts == 1).all(), f"{atom.name} ({atom.state}): {counts}"
    dtype = getattr(torch, atom.dtype)
    return torch.frombuffer(out, dtype=dtype).view(shard.shape) if out else torch.empty(shard.shape, dtype=dtype)


def read_all(index: AtomicIndex) -> dict[AtomKey, list[torch.Tensor]]:
    return {k: [read_atom(index, atom, rank) for rank in range(len(atom.shards))] for k, atom in index.atoms.items()}


def check_atom(index: AtomicIndex, key: AtomKey, value: torch.Tensor) -> None:
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
