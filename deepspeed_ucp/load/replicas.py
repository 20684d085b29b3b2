"""Replicas in the source: those that have to be equal are compared, those that may differ are told of."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..atoms import ITEMSIZE, Atom, AtomicIndex, AtomKey
from ..comm import Comm
from ..errors import CheckpointError, MismatchError, shorten
from ..stream.pairs import Elements, compare_pairs
from ..stream.samples import find_parted

logger = logging.getLogger("deepspeed_ucp")

_CHUNK = 4 << 20


_Difference = tuple[AtomKey, float, int, int]
"""The largest one between parts of two replicas: of which atom, how large, which rank's, at which element."""


def check_replicas(atoms: Sequence[Atom], index: AtomicIndex, comm: Comm) -> None:
    """Compare, byte by byte, what tensor-parallel ranks saved of parameters that they replicate; collective.

    Raises:
        MismatchError: naming the parameter, the ranks and the largest difference.
    """

    pairs, found = _list_pairs(atoms)[comm.rank :: comm.size], list[_Difference]()
    compare_pairs(index, pairs, lambda number, *values: found.extend(_compare(pairs[number][1], *values)), comm)
    largest = list({each[0]: each for each in sorted(found)}.values())  # one per atom: what is told stays short
    differences = sorted(each for part in comm.gather(largest) for each in part)
    if differences:  # the same on every rank
        comm.run(lambda: _refuse(*max(each for each in differences if each[0] == differences[0][0])))


def _list_pairs(atoms: Sequence[Atom]) -> list[tuple[Elements, Elements]]:
    """Parts of rank 0's shards, and the same of another rank's."""
    pairs = []
    for atom in atoms:
        step, numel = _CHUNK // ITEMSIZE[atom.dtype], atom.shards[0].numel
        for low in range(0, numel, step):
            high = min(low + step, numel)
            first = Elements(atom, 0, low, high)
            pairs += [(first, Elements(atom, rank, low, high)) for rank in range(1, len(atom.shards))]
    return pairs


def _compare(part: Elements, first: bytearray, other: bytearray) -> list[_Difference]:
    if first == other:
        return []
    dtype = getattr(torch, part.atom.dtype)
    gap = (torch.frombuffer(first, dtype=dtype).double() - torch.frombuffer(other, dtype=dtype).double()).abs()
    return [(part.atom.key, float(gap.max()), part.shard, part.low + int(gap.argmax()))]


def _refuse(key: AtomKey, size: float, rank: int, element: int) -> None:
    raise MismatchError(
        f"{key.name} ({key.state}) is replicated over tensor-parallel ranks, but ranks 0 and {rank} saved different "
        f"values: the largest difference is {size:.3e} at element {element}. If the mean is what counts, say so: "
        f'"patterns": {{"rules": [{{"match": "{key.name}", "pattern": "partial"}}]}}.'
    )


def check_instances(index: AtomicIndex, counts: Mapping[str, int], touched: Iterable[AtomKey], comm: Comm) -> None:
    """What several pipeline stages saved under one name: equal copies, or values of their own; collective.

    DeepSpeed ties only ``tied_weight_attr``; a tied module's other parameters live on apart in every stage.

    Args:
        counts: how many stages of the live engine hold a parameter, of those that several do.

    Raises:
        CheckpointError: copies differ of a parameter that is not of a tied module (bidirectional placements).
    """
    loaded = {key.name for key in touched}
    names = [name for name in index.model.instances if name in loaded]
    parted = find_parted(index, names, comm) if names else []
    if parted:  # the same on every rank
        comm.run(lambda: _refuse_parted(index, parted))
    dropped = sorted(name for name in parted if counts.get(name, 1) != index.model.instances[name])
    if dropped and comm.rank == 0:
        logger.warning(
            "%s: every pipeline stage that holds the tied module trained values of its own (DeepSpeed ties only "
            "tied_weight_attr); where one copy remains the first stage's counts",
            shorten(dropped),
        )


def _refuse_parted(index: AtomicIndex, parted: Iterable[str]) -> None:
    for name in parted:
        if "tied_modules." not in name:
            raise CheckpointError(
                f"{name} is held by {index.model.instances[name]} pipeline stages with different values; they have to "
                "be replicas. The folder mixes files of several saves."
            )
