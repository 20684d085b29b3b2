"""Replicas in the source: those that have to be equal are compared, those that may differ are told of."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..atoms import ITEMSIZE, MASTER, Atom, AtomicIndex, AtomKey
from ..comm import Comm
from ..errors import CheckpointError, MismatchError, shorten
from ..stream.reader import Reader
from ..stream.samples import spread_evenly

logger = logging.getLogger("deepspeed_ucp")

_CHUNK = 4 << 20
_SAMPLES = 64


_Part = tuple[Atom, int, int, int]
"""(atom, rank of the other shard, first element, behind the last)."""


@dataclass(frozen=True, slots=True, order=True)
class _Gap:
    """The largest difference found between two replicas: in which atom, how large, of which rank, at which element."""

    name: str
    state: str
    size: float
    rank: int
    element: int


def check_replicas(atoms: Sequence[Atom], index: AtomicIndex, comm: Comm) -> None:
    """Compare, byte by byte, what tensor-parallel ranks saved of parameters that they replicate; collective.

    Raises:
        MismatchError: naming the parameter, the ranks and the largest difference.
    """
    gathered = comm.each(lambda: _compare_parts(_list_parts(atoms)[comm.rank :: comm.size], index))
    gaps = sorted(gap for part in gathered for gap in part)
    if gaps:  # the same on every rank
        _refuse(max(gap for gap in gaps if gap.name == gaps[0].name and gap.state == gaps[0].state))


def _compare_parts(parts: Sequence[_Part], index: AtomicIndex) -> list[_Gap]:
    """The largest gap of each atom: what is told to the other ranks stays short."""
    largest: dict[tuple[str, str], _Gap] = {}
    with Reader(index, checksum=False) as reader:
        for gap in sorted(gap for part in parts for gap in _compare(*part, reader)):
            largest[gap.name, gap.state] = gap
    return list(largest.values())


def _list_parts(atoms: Sequence[Atom]) -> list[_Part]:
    """What is compared with rank 0's shard: (atom, other rank, first element, behind the last)."""
    parts = []
    for atom in atoms:
        step, numel = _CHUNK // ITEMSIZE[atom.dtype], atom.shards[0].numel
        for low in range(0, numel, step):
            parts += [(atom, rank, low, min(low + step, numel)) for rank in range(1, len(atom.shards))]
    return parts


def _compare(atom: Atom, rank: int, low: int, high: int, reader: Reader) -> list[_Gap]:
    first, other = (reader.read_elements(atom, shard, low, high) for shard in (0, rank))
    if first == other:
        return []
    dtype = getattr(torch, atom.dtype)
    gap = (torch.frombuffer(first, dtype=dtype).double() - torch.frombuffer(other, dtype=dtype).double()).abs()
    return [_Gap(atom.name, atom.state, float(gap.max()), rank, low + int(gap.argmax()))]


def _refuse(gap: _Gap) -> None:
    raise MismatchError(
        f"{gap.name} ({gap.state}) is replicated over tensor-parallel ranks, but ranks 0 and {gap.rank} saved "
        f"different values: the largest difference is {gap.size:.3e} at element {gap.element}. If the mean is what "
        f'counts, say so: "patterns": {{"rules": [{{"match": "{gap.name}", "pattern": "partial"}}]}}.'
    )


def check_instances(index: AtomicIndex, live: Iterable[tuple[str, int, int]], touched: Iterable[AtomKey]) -> None:
    """What several pipeline stages saved under one name: equal copies, or values of their own.

    DeepSpeed ties only ``tied_weight_attr``; a tied module's other parameters live on apart in every stage.

    Args:
        live: (name, ordinal, count) of parameters that several stages of the live engine hold.

    Raises:
        CheckpointError: copies differ of a parameter that is not of a tied module (bidirectional placements).
    """
    loaded = {key.name for key in touched}
    counts = {name: count for name, _, count in live}
    parted = [name for name in index.model.instances if name in loaded and not look_equal(name, index)]
    for name in parted:
        if "tied_modules." not in name:
            raise CheckpointError(
                f"{name} is held by {index.model.instances[name]} pipeline stages with different values; they have to "
                "be replicas. The folder mixes files of several saves."
            )
    dropped = sorted(name for name in parted if counts.get(name, 1) != index.model.instances[name])
    if dropped:
        logger.warning(
            "%s: every pipeline stage that holds the tied module trained values of its own (DeepSpeed ties only "
            "tied_weight_attr); where one copy remains the first stage's counts",
            shorten(dropped),
        )


def look_equal(name: str, index: AtomicIndex) -> bool:
    """Whether the stages' copies of a parameter agree at some elements of each shard."""
    found = [index.find(name, MASTER, instance) for instance in range(index.model.instances[name])]
    atoms = [atom for atom in found if atom]
    with Reader(index, checksum=False) as reader:
        return all(_sample(atoms[0], atom, reader) for atom in atoms[1:])


def _sample(first: Atom, other: Atom, reader: Reader) -> bool:
    if first.dtype != other.dtype or [s.shape for s in first.shards] != [s.shape for s in other.shards]:
        return False
    return all(
        reader.read_elements(first, shard, place, place + 1) == reader.read_elements(other, shard, place, place + 1)
        for shard, held in enumerate(first.shards)
        for place in spread_evenly(held.numel, _SAMPLES)
    )
