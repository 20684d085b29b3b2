"""Compare redundant data: copies of masters, replicas, and pipeline instances.

This detects shards of another run or step, and replicas that differ. Pairs of elements may be in files that only other
ranks can read.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from ..comm import Comm
from ..errors import CheckpointError, MismatchError, Objections, shorten
from ..io.cast import cast
from ..io.paths import choose_map
from ..io.read import MemorySink
from ..model.flat import Span
from ..model.index import AtomicIndex
from ..model.records import CopyItem, Read
from ..model.storage import COPY, ITEMSIZE, MASTER, MODULE, Atom, AtomKey, Fragment, Fragments, ParamKey, Storage
from ..plan.locate import Want, list_reads
from ..plan.wants import list_overlaps
from ..tensor_parallel.layout import Layout
from .reader import AtomReader, describe_overlap

logger = logging.getLogger("deepspeed_ucp")

_RUNS, _WIDTH = 16, 3
"""Number of compared runs of elements per file or shard, and elements per run; a run is one request to a store."""

_TOLERATED = 0.1
"""Maximum share of differing elements that is attributed to manual edits instead of a foreign file."""

_TOLERATED_STAGE0 = 0.75
"""The FP16 wrappers take an optimizer step at construction, whose weight decay changes masters but not copies."""

_Sample = tuple[ParamKey, int, Fragment]
"""Parameter, shard of its master, and compared fragment."""


def check_samples(index: AtomicIndex, touched: Iterable[AtomKey], comm: Comm) -> None:
    """Compare samples of masters and copies, and all repeated fragments (collective).

    At some elements of each shard ``cast(master)`` is compared with the copy in the model states. Training keeps them
    equal, so a differing shard was not saved together with the model states. ZeRO 3 saves no copies.

    Repeated fragments (:class:`~deepspeed_ucp.model.index.AtomicIndex`) are compared completely.

    Raises:
        CheckpointError: a shard is of another run or step.
    """
    keys = list(touched)
    _check_master_samples(index, keys, comm)
    if index.repeated:
        _check_repeated(index, keys, comm)


def _check_repeated(index: AtomicIndex, touched: Iterable[AtomKey], comm: Comm) -> None:
    """Compare repeated fragments with their first occurrences (collective)."""
    pairs = list[Pair]()
    parts = [(key, *repeat) for key in touched for repeat in index.repeated.get(key, ())]
    for key, tp_shard, repeat in parts[comm.rank :: comm.size]:
        atom = index.atoms[key]
        want = Want(atom, repeat.start, repeat.numel, shard=tp_shard)
        shards = [(shard.shape, Fragments(atom.dtype, [repeat])) for shard in atom.shards]
        again = Atom.of(atom.name, atom.state, shards, atom.instance)
        pairs += cut_pair(replace(want, atom=again), want)

    def judge(number: int, here: bytearray, there: bytearray) -> None:
        if here != there:
            want = pairs[number][0]
            record = want.atom.shards[want.shard].list_fragments(want.atom.state)[0].record
            raise CheckpointError(
                f"{want.atom.name} ({want.atom.state}) is in the files of several ranks, and this one has other values "
                f"of its elements [{want.start}, {want.end}). The file belongs to another run or step; put the right "
                "one back.",
                path=index.files[index.records.files[record]].path,
            )

    compare_pairs(index, pairs, judge, comm)


def _check_master_samples(index: AtomicIndex, touched: Iterable[AtomKey], comm: Comm) -> None:
    """Compare samples of masters and copies, each rank in some files (collective)."""
    atoms, files, pairs = index.atoms, list[int](), list[Pair]()
    compared, differing, first = Counter[int](), Counter[int](), dict[int, str]()
    for file, samples in _find_samples(index, touched, comm).items():
        for (param, shard, _), (low, high) in _list_sampled_runs(samples):
            master, copy = (Want(atoms[param.atom(state)], low, high - low, shard=shard) for state in (MASTER, COPY))
            pairs.append((master, copy))
            files.append(file)

    def judge(number: int, values: bytearray, others: bytearray) -> None:
        file, (master, copy) = files[number], pairs[number]
        made = _cast(values, master.atom.dtype, copy.atom.dtype)
        size, width = master.itemsize, copy.itemsize
        unequal = [at for at in range(master.numel) if made[at * width :][:width] != others[at * width :][:width]]
        compared[file] += master.numel
        differing[file] += len(unequal)
        for at in unequal[:1]:
            here = _to_float(values[at * size :][:size], master.atom.dtype)
            there = _to_float(others[at * width :][:width], copy.atom.dtype)
            first.setdefault(file, f"{master.atom.name}[{master.start + at}] is {here} here and {there} there")

    def check_fractions() -> None:
        tolerated = _TOLERATED if index.topology.zero_stage else _TOLERATED_STAGE0
        for file, count in differing.items():
            if count > max(tolerated * compared[file], 1):
                path, state_file = index.files[file].path, index.state_file
                advice = _ONE_FILE if path == state_file else _FOREIGN
                raise CheckpointError(
                    f"its fp32 weights differ from the model states in {state_file} ({count} of {compared[file]} "
                    f"elements compared differ; {first[file]}). {advice}",
                    path=path,
                )
            if count:
                logger.warning(
                    "%s: %d of %d elements compared differ from the model states (%s); the fp32 weights count, the "
                    "others only for load_optimizer_states=False or load_module_only=True",
                    *(index.files[file].path, count, compared[file], first[file]),
                )

    compare_pairs(index, pairs, judge, comm)
    comm.run(check_fractions)


def _find_samples(index: AtomicIndex, touched: Iterable[AtomKey], comm: Comm) -> dict[int, list[_Sample]]:
    """Return file → fragments of masters that have copies, for a part of the files.

    Each of thousands of ranks has few files, and creates no objects for the others.
    """
    storages = index.atoms.storages if index.topology.traits.has_copies else {}
    masters: dict[int, tuple[Storage, dict[int, tuple[ParamKey, int]]]] = {}  # with the owners by position in it
    for param in [key.param for key in touched if key.state == MASTER]:
        shards = storages.get(param, ())
        if any(COPY in shard.states for shard in shards):
            for tp_shard, _, position, states in shards:
                if master := states.get(MASTER):
                    masters.setdefault(id(master), (master, {}))[1][position] = param, tp_shard
    parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, (storage, _) in masters.items():
        for part, record in storage.list_records():
            parts[index.records.files[record]].append((number, part))
    samples: dict[int, list[_Sample]] = {}
    for file in sorted(parts)[comm.rank :: comm.size]:
        samples[file] = []
        for number, part in parts[file]:
            storage, owners = masters[number]
            samples[file] += [(*owners[at], fragment) for at, fragment in storage.list_part(part) if at in owners]
    return samples


_FOREIGN = (
    "The file belongs to another run or step; put the right one back. If the copies were changed on purpose (averaged "
    "or merged weights), load them with load_optimizer_states=False or load_module_only=True. To resume with optimizer "
    'states from the fp32 weights, use "verify": "off".'
)

_ONE_FILE = (
    "Both are of one save, and stage 0 saves fp32 weights by position, without names: this run gives its parameters to "
    "the optimizer in another order than the saved run did. Use the saved order. If the copies were changed on purpose "
    "(averaged or merged weights), load them with load_optimizer_states=False or load_module_only=True."
)


def _list_sampled_runs(entries: list[_Sample]) -> Iterator[tuple[_Sample, Span]]:
    """Yield evenly spread runs of a file's elements, each within one fragment."""
    wanted = _spread_runs(sum(fragment.numel for *_, fragment in entries))
    begin = 0
    for entry in entries:
        fragment = entry[-1]
        while wanted and wanted[0][0] < begin + fragment.numel:
            low, high = wanted.pop(0)
            shift = fragment.start - begin
            yield entry, (low + shift, min(high, begin + fragment.numel) + shift)
        begin += fragment.numel


def _spread_runs(total: int) -> list[Span]:
    """Return disjoint runs [low, high) of ``total`` elements, spread evenly."""
    if total <= _RUNS * _WIDTH:
        return [(at, at + 1) for at in range(total)]
    begins = (number * (total - _WIDTH) // (_RUNS - 1) for number in range(_RUNS))  # the first and the last included
    return [(low, low + _WIDTH) for low in begins]


def _cast(data: bytearray, source: str, target: str) -> bytearray:
    result = bytearray(len(data) // ITEMSIZE[source] * ITEMSIZE[target])
    cast(memoryview(data), source, memoryview(result), target)
    return result


def _to_float(data: bytearray, dtype: str) -> float:
    return float(np.frombuffer(_cast(data, dtype, "float64"), np.float64)[0])


def find_diverged(index: AtomicIndex, names: Sequence[str], dropped: Container[str], comm: Comm) -> list[str]:
    """Return the parameters whose pipeline instances differ (collective).

    Args:
        dropped: parameters with instances that no live stage takes: compared completely, the others by samples.

    Returns:
        The same on all ranks.
    """
    diverged, every = set[str](), list[Pair]()
    for name in names:
        instances = range(index.instances[name])
        states_of = ((index.find(name, state, at) for state in (MASTER, MODULE, COPY)) for at in instances)
        atoms = [atom for states in states_of if (atom := next(filter(None, states), None))]
        for first, other in product(atoms[:1], atoms[1:]):
            if (first.dtype, *(s.shape for s in first.shards)) != (other.dtype, *(s.shape for s in other.shards)):
                diverged.add(name)
                continue
            for rank, shard in enumerate(first.shards):
                runs = [(0, shard.numel)] if name in dropped else _spread_runs(shard.numel)
                for low, high in runs:
                    here, there = (Want(atom, low, high - low, shard=rank) for atom in (first, other))
                    every += cut_pair(here, there)
    pairs = every[comm.rank :: comm.size]

    def judge(number: int, here: bytearray, there: bytearray) -> None:
        if here != there:
            diverged.add(pairs[number][0].atom.name)

    compare_pairs(index, pairs, judge, comm)
    all_diverged = set().union(*comm.gather(diverged))
    return [name for name in names if name in all_diverged]


def check_replicas(atoms: Sequence[Atom], index: AtomicIndex, comm: Comm) -> None:
    """Compare the replicas of tensor-parallel ranks byte by byte (collective).

    Raises:
        MismatchError: replicas differ; the message names the parameter, the ranks and the largest difference.
    """
    import torch

    every = list[Pair]()
    for atom in atoms:
        first, *others = [Want(atom, 0, shard.numel, shard=rank) for rank, shard in enumerate(atom.shards)]
        every += [chunk for other in others for chunk in cut_pair(first, other)]
    pairs = every[comm.rank :: comm.size]
    largest = dict[AtomKey, tuple[AtomKey, float, int, int]]()  # with size, rank and element of the difference

    def judge(number: int, first: bytearray, other: bytearray) -> None:
        if first != other:
            part = pairs[number][1]
            here, there = (torch.frombuffer(data, dtype=getattr(torch, part.atom.dtype)) for data in (first, other))
            gap, key = (here.double() - there.double()).abs(), part.atom.key
            difference = key, float(gap.max()), part.shard, part.start + int(gap.argmax())
            largest[key] = max(difference, largest.get(key, difference))  # one per atom keeps the exchange short

    compare_pairs(index, pairs, judge, comm)
    differences = sorted(difference for part in comm.gather([*largest.values()]) for difference in part)
    if differences:  # equal on all ranks
        key, size, rank, element = [entry for entry in differences if entry[0] == differences[0][0]][-1]
        text = (
            f"{key.name} ({key.state}) is replicated over tensor-parallel ranks, but ranks 0 and {rank} saved "
            f"different values: the largest difference is {size:.3e} at element {element}. To load their mean, use: "
            f'"patterns": {{"rules": [{{"match": "{key.name}", "pattern": "partial"}}]}}.'
        )
        raise comm.common(MismatchError(text))


def check_overlaps(atoms: Sequence[tuple[Atom, Layout]], index: AtomicIndex, comm: Comm) -> None:
    """Compare the parts that tensor-parallel shards have in common (collective).

    Raises:
        MismatchError: they differ.
    """
    every = [chunk for atom, layout in atoms for pair in list_overlaps(atom, layout) for chunk in cut_pair(*pair)]
    pairs = every[comm.rank :: comm.size]

    def judge(number: int, here: bytearray, there: bytearray) -> None:
        if here != there:
            raise MismatchError(describe_overlap(*pairs[number]), path=os.path.dirname(index.state_file))

    compare_pairs(index, pairs, judge, comm)


def check_instances(index: AtomicIndex, counts: Mapping[str, int], touched: Iterable[AtomKey], comm: Comm) -> None:
    """Compare the instances of parameters on several pipeline stages (collective).

    DeepSpeed ties only ``tied_weight_attr``; other parameters of a tied module diverge between stages.

    Args:
        counts: parameter → number of stages of the live engine that hold it, if several.

    Raises:
        CheckpointError: copies differ outside of tied modules (bidirectional placements).
    """
    loaded = {key.name for key in touched}
    names = [name for name in index.instances if name in loaded]
    changed = {name for name in names if counts.get(name, 1) != index.instances[name]}
    diverged = find_diverged(index, names, changed, comm) if names else []
    if untied := [name for name in diverged if "tied_modules." not in name]:  # equal on all ranks
        text = (
            f"{untied[0]} is held by {index.instances[untied[0]]} pipeline stages with different values; they "
            "must be equal. The folder mixes files of several saves."
        )
        raise comm.common(CheckpointError(text))
    dropped = sorted(changed.intersection(diverged))
    if dropped and comm.rank == 0:
        logger.warning(
            "%s: each pipeline stage with the tied module trained different values (DeepSpeed ties only "
            "tied_weight_attr); a single remaining copy gets the first stage's values",
            shorten(dropped),
        )


_AT_ONCE = 8 << 20
"""Bytes of pairs that are read together."""

_CHUNK = 4 << 20
"""Maximum bytes of each side of a pair."""


Pair = tuple[Want, Want]
Judge = Callable[[int, bytearray, bytearray], None]
"""Takes a pair's number and the bytes of both sides; its errors are raised on all ranks."""


def compare_pairs(index: AtomicIndex, pairs: Sequence[Pair], judge: Judge, comm: Comm) -> None:
    """Read pairs of elements, and call ``judge`` for each in order (collective).

    Args:
        pairs: this rank's pairs. Other ranks read for it if it cannot.

    Raises:
        UcpError: a file cannot be read, or the error of ``judge``; equal on all ranks.
    """
    if not index.access.is_partial or comm.size == 1:
        comm.run(lambda: _compare_readable(index, pairs, judge))
        return
    batches, first, failed = list(_batch_pairs(pairs)), 0, Objections()
    for at in range(max(comm.gather(len(batches)))):
        batch = batches[at] if at < len(batches) else []
        values = _read_by_others(index, batch, comm)
        with failed:
            for number, (here, there) in enumerate(() if failed.errors else values, first):
                judge(number, here, there)
        first += len(batch)
    comm.run(failed.settle)


def cut_pair(first: Want, other: Want) -> Iterator[Pair]:
    """Cut a pair into chunks of at most ``_CHUNK`` bytes per side."""
    step = _CHUNK // first.itemsize
    for low in range(0, first.numel, step):
        numel = min(step, first.numel - low)
        yield replace(first, start=first.start + low, numel=numel), replace(other, start=other.start + low, numel=numel)


def _compare_readable(index: AtomicIndex, pairs: Sequence[Pair], judge: Judge) -> None:
    apply, numbers = choose_map(index.state_file), iter(range(len(pairs)))
    with AtomReader(index) as reader:  # with checksums, from the places that a load reads
        for batch in _batch_pairs(pairs):
            for here, there in apply(lambda pair: (reader.read_want(pair[0]), reader.read_want(pair[1])), batch):
                judge(next(numbers), here, there)


def _batch_pairs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    batch, nbytes = list[Pair](), 0
    for pair in pairs:
        batch.append(pair)
        nbytes += pair[0].nbytes + pair[1].nbytes
        if nbytes >= _AT_ONCE:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _read_by_others(index: AtomicIndex, pairs: Sequence[Pair], comm: Comm) -> list[tuple[bytearray, bytearray]]:
    """Return the bytes of this rank's pairs, read by ranks that can (collective)."""
    wants = [want for pair in pairs for want in pair]
    reads = [list_reads([want]) for want in wants]
    spans = [(read.record, read.offset, read.end) for row in reads for read in row]
    files = [index.records.files[record] for record, _, _ in spans]
    turns = index.access.take_turns(files, comm.size)
    ranks = np.where(index.access.can_read(comm.rank, files), comm.rank, turns).tolist()
    with AtomReader(index) as reader:

        def serve_span(span: tuple[int, int, int]) -> bytes:
            """Read a span for the rank that asks for it."""
            record, low, high = span
            data = bytearray(high - low)
            item = CopyItem(record, low, len(data), len(data), 1, 0, 0)
            reader.read([Read.of(*span, item)], [MemorySink(memoryview(data))])
            return bytes(data)

        answers = iter(comm.ask(list(zip(ranks, spans, strict=True)), serve_span))
    values = [_assemble(want, row, answers) for want, row in zip(wants, reads, strict=True)]
    return list(zip(values[::2], values[1::2], strict=True))


def _assemble(want: Want, reads: Iterable[Read], answers: Iterator[bytes]) -> bytearray:
    values = bytearray(want.nbytes)
    sink = MemorySink(memoryview(values), want.itemsize)
    for read in reads:
        data = memoryview(next(answers))
        for item in read.items:
            sink.store(item, data[: item.nbytes])
            data = data[item.nbytes :]
    return values
