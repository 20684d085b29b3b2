"""Replicas in the source: those that have to be equal are compared, those that may differ are told of."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..atoms import ITEMSIZE, Atom, AtomicIndex, AtomKey
from ..comm import Comm
from ..errors import CheckpointError, MismatchError, shorten
from ..io.store import choose_map
from ..stream.reader import AtomReader
from ..stream.samples import stages_agree

logger = logging.getLogger("deepspeed_ucp")

_CHUNK = 4 << 20


_Difference = tuple[AtomKey, float, int, int]
"""The largest one between parts of two replicas: of which atom, how large, which rank's, at which element."""


def check_replicas(atoms: Sequence[Atom], index: AtomicIndex, comm: Comm) -> None:
    """Compare, byte by byte, what tensor-parallel ranks saved of parameters that they replicate; collective.

    Raises:
        MismatchError: naming the parameter, the ranks and the largest difference.
    """

    def compare_share() -> list[_Difference]:
        with AtomReader(index, checksum=False) as reader:
            parts = _list_parts(atoms)[comm.rank :: comm.size]
            compared = choose_map(index.run.state_file)(lambda part: _compare(*part, reader), parts)
            found = sorted(each for one in compared for each in one)
        return list({each[0]: each for each in found}.values())  # one per atom: what is told to the others stays short

    differences = sorted(each for part in comm.each(compare_share) for each in part)
    if differences:  # the same on every rank
        comm.run(lambda: _refuse(*max(each for each in differences if each[0] == differences[0][0])))


def _list_parts(atoms: Sequence[Atom]) -> list[tuple[Atom, int, int, int]]:
    """What is compared with rank 0's shard: (atom, other rank, first element, behind the last)."""
    parts = []
    for atom in atoms:
        step, numel = _CHUNK // ITEMSIZE[atom.dtype], atom.shards[0].numel
        for low in range(0, numel, step):
            parts += [(atom, rank, low, min(low + step, numel)) for rank in range(1, len(atom.shards))]
    return parts


def _compare(atom: Atom, rank: int, low: int, high: int, reader: AtomReader) -> list[_Difference]:
    first, other = (reader.read_elements(atom, shard, low, high) for shard in (0, rank))
    if first == other:
        return []
    dtype = getattr(torch, atom.dtype)
    gap = (torch.frombuffer(first, dtype=dtype).double() - torch.frombuffer(other, dtype=dtype).double()).abs()
    return [(atom.key, float(gap.max()), rank, low + int(gap.argmax()))]


def _refuse(key: AtomKey, size: float, rank: int, element: int) -> None:
    raise MismatchError(
        f"{key.name} ({key.state}) is replicated over tensor-parallel ranks, but ranks 0 and {rank} saved different "
        f"values: the largest difference is {size:.3e} at element {element}. If the mean is what counts, say so: "
        f'"patterns": {{"rules": [{{"match": "{key.name}", "pattern": "partial"}}]}}.'
    )


def check_instances(index: AtomicIndex, counts: Mapping[str, int], touched: Iterable[AtomKey]) -> None:
    """What several pipeline stages saved under one name: equal copies, or values of their own.

    DeepSpeed ties only ``tied_weight_attr``; a tied module's other parameters live on apart in every stage.

    Args:
        counts: how many stages of the live engine hold a parameter, of those that several do.

    Raises:
        CheckpointError: copies differ of a parameter that is not of a tied module (bidirectional placements).
    """
    loaded = {key.name for key in touched}
    parted = [name for name in index.model.instances if name in loaded and not stages_agree(name, index)]
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
