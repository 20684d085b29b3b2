"""Holds what the files hold twice against each other: shards of another run or step are found out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, Atom, AtomicIndex, Fragment
from ..comm import Comm
from ..errors import CheckpointError
from ..io.cast import cast
from ..io.store import choose_map
from .reader import AtomReader

_PER_FILE, _PER_SHARD = 48, 64
_CHUNK = 4 << 20
_TOLERATED = 0.1
"""Share of differing elements up to which a model that was edited by hand is assumed, not a foreign file."""

_TOLERATED_STAGE0 = 0.75
"""The FP16 wrappers take an optimizer step at construction that weight decay feels, and their copies do not."""

_Sample = tuple[Atom, Atom, int, Fragment]
"""A master, the atom that holds the model's own copy, and of which shard which fragment is compared."""


def check_samples(index: AtomicIndex, touched: Iterable[Atom], comm: Comm) -> None:
    """Compare ``cast(master)`` with the copy in the model states at some elements of each shard; collective.

    Training keeps them equal (the copies are made from the masters after each step), so a shard whose elements differ
    was not saved together with the model states. ZeRO 3 saves no copies; there is nothing to compare then.

    What the files hold twice (:class:`~deepspeed_ucp.atoms.StoredAtoms`) is compared as a whole.

    Raises:
        CheckpointError: a shard of another run or step.
    """
    atoms = list(touched)

    def check() -> None:
        _check_share(index, atoms, comm)
        _check_repeated(index, atoms, comm)

    comm.run(check)


def _check_repeated(index: AtomicIndex, touched: Iterable[Atom], comm: Comm) -> None:
    """Compare this rank's share of what lies in the files a second time."""
    with AtomReader(index, checksum=False) as reader:
        parts = [(atom, *each) for atom in touched for each in index.stored.repeated.get(atom.key, ())]
        for atom, lane, again in parts[comm.rank :: comm.size]:
            step, end = _CHUNK // ITEMSIZE[atom.dtype], again.start + again.numel
            for low in range(again.start, end, step):
                _compare_repeated(reader, atom, lane, again, low, min(low + step, end))


def _compare_repeated(reader: AtomReader, atom: Atom, lane: int, again: Fragment, low: int, high: int) -> None:
    shards = [replace(shard, fragments=(again,)) for shard in atom.shards]
    here, there = (reader.read_elements(one, lane, low, high) for one in (replace(atom, shards=tuple(shards)), atom))
    if here != there:
        path = reader.index.stored.files[reader.index.stored.records[again.record].file].path
        raise CheckpointError(
            f"{path}: {atom.name} ({atom.state}) is in the files of several ranks, and this one has other values of "
            f"its elements [{low}, {high}). The file belongs to another run or step; put the right one back."
        )


def _check_share(index: AtomicIndex, touched: Iterable[Atom], comm: Comm) -> None:
    """Compare what lies in this rank's files."""
    by_file: dict[int, list[_Sample]] = {}
    for atom in touched:
        twin = index.find(atom.name, COPY, atom.instance) if atom.state == MASTER else None
        if twin is None or index.run.topology.wrapper == "torch":
            continue
        for rank, shard in enumerate(atom.shards):
            for fragment in shard.fragments:
                file = index.stored.records[fragment.record].file
                by_file.setdefault(file, []).append((atom, twin, rank, fragment))
    with AtomReader(index, checksum=False) as reader:
        for file in sorted(by_file)[comm.rank :: comm.size]:
            _check_file(reader, file, by_file[file])


def _check_file(reader: AtomReader, file: int, entries: list[_Sample]) -> None:
    index, differing, first, total = reader.index, 0, "", 0
    samples = list(_spread(entries))

    def read(sample: tuple[_Sample, int]) -> list[bytearray]:
        (master, twin, shard, _), position = sample
        return [reader.read_elements(atom, shard, position, position + 1) for atom in (master, twin)]

    pairs = choose_map(index.stored.files[file].path)(read, samples)
    for ((master, twin, *_), position), (here, there) in zip(samples, pairs, strict=True):
        total += 1
        if _cast(here, master.dtype, twin.dtype) != there:
            differing += 1
            values = _show(here, master.dtype), _show(there, twin.dtype)
            first = first or f"{master.name}[{position}] is {values[0]} here and {values[1]} there"
    tolerated = _TOLERATED if index.run.topology.zero_stage else _TOLERATED_STAGE0
    if differing > max(tolerated * total, 1):
        raise CheckpointError(
            f"{index.stored.files[file].path}: its fp32 weights are not those of the model states in "
            f"{index.run.state_file} ({differing} of {total} elements compared differ; {first}). The file belongs to "
            "another run or step; put the right one back. If the copies were changed on purpose (averaged "
            "or merged weights), take them with "
            "load_optimizer_states=False or load_module_only=True; training that goes on with optimizer states goes "
            'on from the fp32 weights, which "verify": "off" loads.'
        )


def _spread(entries: list[_Sample]) -> Iterator[tuple[_Sample, int]]:
    """Elements spread evenly over the fragments of a file."""
    wanted = spread_evenly(sum(fragment.numel for *_, fragment in entries), _PER_FILE)
    begin = 0
    for entry in entries:
        fragment = entry[-1]
        while wanted and wanted[0] < begin + fragment.numel:
            yield entry, fragment.start + wanted.pop(0) - begin
        begin += fragment.numel


def spread_evenly(total: int, most: int) -> list[int]:
    """At most so many of ``total`` places, the first and the last among them."""
    count = min(total, most)
    return [number * (total - 1) // max(count - 1, 1) for number in range(count)]


def _cast(data: bytearray, source: str, target: str) -> bytearray:
    result = bytearray(ITEMSIZE[target])
    cast(memoryview(data), source, memoryview(result), target)
    return result


def _show(data: bytearray, dtype: str) -> float:
    return float(np.frombuffer(_cast(data, dtype, "float64"), np.float64)[0])


def stages_agree(name: str, index: AtomicIndex) -> bool:
    """Whether the copies that several pipeline stages hold of a parameter agree at some elements of each shard."""
    atoms = [index.find(name, MASTER, at) or index.find(name, MODULE, at) for at in range(index.model.instances[name])]
    held = [atom for atom in atoms if atom]
    with AtomReader(index, checksum=False) as reader:
        return all(_agree(held[0], atom, reader) for atom in held[1:])


def _agree(first: Atom, other: Atom, reader: AtomReader) -> bool:
    if first.dtype != other.dtype or [s.shape for s in first.shards] != [s.shape for s in other.shards]:
        return False

    def compare(element: tuple[int, int]) -> bool:
        rank, place = element
        here, there = (reader.read_elements(atom, rank, place, place + 1) for atom in (first, other))
        return here == there

    shards = enumerate(first.shards)
    elements = [(rank, place) for rank, shard in shards for place in spread_evenly(shard.numel, _PER_SHARD)]
    return all(choose_map(reader.index.run.state_file)(compare, elements))
