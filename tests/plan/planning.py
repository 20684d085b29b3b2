"""Atoms, and indexes of atoms alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.model.storage import MASTER, Atom, Fragment, Fragments
from deepspeed_ucp.model.topology import Topology


def make_atom(
    name: str, numel: int, *fragments: tuple[int, int, int, int], dtype: str = "float32", state: str = MASTER
) -> Atom:
    """Build an atom with one shard; fragments as (start, numel, record, byte offset)."""
    return Atom.of(name, state, [((numel,), Fragments(dtype, [Fragment(*fragment) for fragment in fragments]))])


def make_index(atoms: Iterable[Atom], records: Records | None = None, tp: int = 1, **fields: Any) -> AtomicIndex:
    """Build an index of these atoms; `fields` are its further fields."""
    topology = Topology(1, "zero12", "float32", tp=tp)
    return AtomicIndex.of((), records or Records(), atoms, topology, "tag/mp_rank_00_model_states.pt", **fields)
