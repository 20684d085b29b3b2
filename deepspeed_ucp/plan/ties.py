"""Tensors that a model ties and a checkpoint holds one by one: whether they are the same, by their checksums."""

from __future__ import annotations

from collections import Counter

from ..atoms import ITEMSIZE, Atom, AtomicIndex

Sums = list[tuple[int, ...]]
"""Of the blocks of an atom: shard, first element, elements, byte of the record, and the record's CRC32."""


def are_same(index: AtomicIndex, one: Atom | None, other: Atom | None) -> bool | None:
    """Whether two atoms have the same elements; None where nothing tells.

    Only blocks that are cut alike, each of records that hold nothing else, have checksums to be compared.
    """
    if one is None or other is None or one.dtype != other.dtype:
        return None
    if [each.shape for each in one.shards] != [each.shape for each in other.shards]:
        return None
    sums, others = _list_sums(index, one), _list_sums(index, other)
    if sums is None or others is None or [each[:-1] for each in sums] != [each[:-1] for each in others]:
        return None
    return sums == others


def _list_sums(index: AtomicIndex, atom: Atom) -> Sums | None:
    """None where a record has no checksum, or one of other bytes too."""
    records, found = index.stored.records, Sums()
    held = Counter[int]()
    for shard, each in enumerate(atom.shards):
        for part in each.pieces:
            crc = records[part.record].crc
            if crc is None:
                return None
            held[part.record] += part.numel * ITEMSIZE[atom.dtype]
            found.append((shard, part.start, part.numel, part.offset, crc))
    return found if all(records[number].nbytes == nbytes for number, nbytes in held.items()) else None
