"""Optimizer states that a save keeps in swap files beside the state files (ZeRO-Infinity; ``save_checkpoint``).

A swap file is raw numbers, padded to what asynchronous I/O takes; it has neither header nor checksum. Its name has the
numbers that DeepSpeed gave to the first and to the last parameter of a sub-group, which no state file tells. They are
given one after the other, in the order of the module (``zero/partition_parameters.py`` ``Init``), or with ``zero.Init``
as modules are constructed: children before their parent's own parameters. The folder may hold files of other engines
that swapped to the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from ..atoms import ITEMSIZE, MASTER, strip_compiled
from ..errors import CheckpointError, shorten
from ..flat import reserve
from ..torchsave.records import FileRecord
from ..wrappers import MOMENTUM, Form
from .files import OFFLOADED, SwapName
from .findings import COPY, WARNING, Finding, from_error
from .headers import FileHeader, OptimHeader, Piece
from .save import Save, describe_offload

_LEAST = 1 << 20
"""Bytes of a sub-group below which it is never swapped (swap_tensor/utils.py ``MIN_AIO_BYTES``)."""

_ALIGNED = 1024
"""Bytes to which each thread of asynchronous I/O pads (``AIO_ALIGNED_BYTES``)."""

Span = tuple[int, int]
"""DeepSpeed's numbers of the first and the last parameter of a sub-group."""


@dataclass(frozen=True, slots=True)
class SubGroup:
    """A sub-group that is swapped: its place among all, its parameters, elements of a rank's partition, the dtype."""

    index: int
    names: tuple[str, ...]
    numel: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's partition."""
        return self.numel * ITEMSIZE[self.dtype]


def add_swapped(save: Save) -> list[Finding]:
    """Give a save the swap files that belong to it; what is wrong with them."""
    swapped = _list_swapped(save)
    if not swapped:
        return []
    if len(save.models) > 1:
        text = (
            f"{save.listing.path(OFFLOADED)}: with tensor parallelism nothing tells which of its folders is of which "
            "rank. Take a save of an engine whose optimizer states are not on NVMe."
        )
        return [Finding("unsupported", OFFLOADED, text)]
    try:
        spans = _find_spans(save, swapped)
    except CheckpointError as error:
        return from_error(save.listing.folder, error)
    faults: list[Finding] = []
    for rank, shard in enumerate(save.shards[0]):
        for group, span in zip(swapped, spans, strict=True):
            held = save.swaps[shard.name, group.index] = {}
            for state in _list_states(save, shard.optim, group.index):
                look = _look_at(save, SwapName(rank, state, *span), group)
                if isinstance(look, Finding):
                    faults.append(look)
                else:
                    held[state or MASTER] = look
    return [*faults, *_warn_longer(save, swapped)]


def adopt_sums(save: Save, sums: Mapping[str, int]) -> None:
    """Give the swap files the CRC32s of their bytes, by name, as a seal tells them."""
    for held in save.swaps.values():
        for state, header in held.items():
            if header.swap is not None and header.name in sums:
                record = header.swap.record._replace(crc=sums[header.name])
                held[state] = replace(header, swap=replace(header.swap, record=record))


def _list_swapped(save: Save) -> list[SubGroup]:
    """What is swapped, by the size; where the engine swaps nothing, nothing."""
    first = save.shards[0][0].optim if save.shards[0] else None
    if first is None or first.traits.form is not Form.RESERVED or not describe_offload(save.zero).startswith("nvme/"):
        return []
    least = max(_LEAST, _read_option(save, "block_size", _LEAST))
    found = []
    for index, (master, group) in enumerate(zip(first.masters, save.model(0).param_shapes or (), strict=False)):
        names, numel = tuple(name for name, _ in group), sum(reserve(prod(shape), save.dp) for _, shape in group)
        swapped = SubGroup(index, tuple(map(strip_compiled, names)), numel, master.dtype)
        if numel and not master.fault and (swapped.nbytes >= least or not master.numel):
            found.append(swapped)
    return found


def _read_option(save: Save, key: str, default: int) -> int:
    """A number of the ds_config's section ``aio``."""
    value: Any = save.main.config.get("aio", {}).get(key, default)
    return value if isinstance(value, int) and value > 0 else default


def _list_states(save: Save, optim: OptimHeader | None, index: int) -> list[str]:
    """States of a swapped sub-group that are in files of their own, the master (without a name) in front.

    What the state file has of them may be what other sub-groups left in memory: pipelined swapping keeps the buffers.
    """
    held = optim.tensors[index].states if optim and index < len(optim.tensors) else {}
    in_memory = {MOMENTUM} if save.zero.get("save_muon_momentum_buffer_in_memory") else set()
    return ["", *(state for state in held if state not in in_memory)]


def _look_at(save: Save, name: SwapName, group: SubGroup) -> FileHeader | Finding:
    """A swap file as its sub-group has it, or what is wrong with it."""
    listing = save.listing
    state = f"{name.state}-" if name.state else ""  # as DeepSpeed spells it
    spelled = f"{OFFLOADED}/rank{name.rank:02d}/{state}{name.begin}_{name.end}.tensor.swp"
    file = listing.swaps.get(name) or spelled
    size, whole = listing.sizes.get(file), _pad(save, group)
    if size is None:
        text = f"{listing.path(file)} is missing; it holds {_describe(name, group)}. {COPY}"
        return Finding("missing", file, text)
    if size < whole:
        text = (
            f"{listing.path(file)}: has {size} bytes, {_describe(name, group)} takes {whole}. The file is truncated, "
            "or belongs to another run; put the right one back."
        )
        return Finding("inconsistent", file, text)
    record = FileRecord("", 0, size, None)
    return FileHeader(file, size, swap=Piece(record, 0, (group.numel,), group.dtype))


def _warn_longer(save: Save, swapped: Sequence[SubGroup]) -> Iterator[Finding]:
    """DeepSpeed writes over an earlier engine's file without cutting it; another world size's file looks the same."""
    wholes = {group.index: _pad(save, group) for group in swapped}
    held = [(header, wholes[index]) for (_, index), states in save.swaps.items() for header in states.values()]
    longer = sorted(header.name for header, whole in held if header.size > whole)
    if longer:
        text = (
            f"{save.listing.path(longer[0])}: is longer than what it has to hold, as {len(longer)} swap files are. An "
            "earlier engine's file that was written over is, and so is one of another world size; only a seal tells "
            "them apart."
        )
        yield Finding("inconsistent", longer[0], text, WARNING, tuple(longer))


def _describe(name: SwapName, group: SubGroup) -> str:
    return f"{name.state or MASTER} of {shorten(group.names, 3)} ({group.numel} elements of {group.dtype})"


def _pad(save: Save, group: SubGroup) -> int:
    """Bytes of a file that holds a partition."""
    threads = _read_option(save, "intra_op_parallelism", _read_option(save, "thread_count", 1))
    return reserve(group.nbytes, _ALIGNED * threads) * _ALIGNED * threads


def _find_spans(save: Save, swapped: Sequence[SubGroup]) -> list[Span]:
    """The numbers that name each sub-group's files: those that follow an order in which parameters are numbered.

    Raises:
        CheckpointError: none do, or several.
    """
    listing = save.listing
    present = {(name.begin, name.end) for name in listing.swaps if not name.state}
    known = _list_parameters(save)
    trained = {strip_compiled(name) for group in save.model(0).param_shapes or () for name, _ in group}
    found = {each for order in (known, _order_as_constructed(known)) for each in _fit(swapped, present, order, trained)}
    fitting = found
    for exact in (False, True):
        if len(fitting) > 1:
            fitting = {each for each in found if _has_sizes(save, swapped, each, exact=exact)}
    if len(fitting) == 1:
        return list(fitting.pop())
    path, listed = listing.path(OFFLOADED), shorten([f"{begin}_{end}" for begin, end in sorted(present)])
    what = f"{path}: holds swap files of parameters {listed or 'none'}"
    if found:
        several = " or ".join(shorten([f"{begin}_{end}" for begin, end in each], 3) for each in sorted(found)[:2])
        raise CheckpointError(
            f"{what}; those of this save's {len(swapped)} swapped sub-groups could be {several}. They are of several "
            "engines that swapped to one place: remove the files of the others."
        )
    raise CheckpointError(
        f"{what}; no choice of them follows the order of the parameters in this save's {len(swapped)} swapped "
        "sub-groups. The folder lacks files, or they belong to another run; put the right ones back."
    )


def _has_sizes(save: Save, swapped: Sequence[SubGroup], spans: Sequence[Span], *, exact: bool) -> bool:
    """Whether the files of the masters are long enough; ``exact``: and no longer."""
    for rank in range(save.dp):
        for group, span in zip(swapped, spans, strict=True):
            look = _look_at(save, SwapName(rank, "", *span), group)
            if isinstance(look, Finding) or (exact and look.size > _pad(save, group)):
                return False
    return True


def _fit(
    swapped: Sequence[SubGroup], present: set[Span], order: Sequence[str], trained: set[str]
) -> Iterator[tuple[Span, ...]]:
    """Numbers of all sub-groups that are those of some files and follow an order of the parameters.

    They do without a gap. Or, where there are no other files, with gaps: for parameters that are tied, that the save
    does not tell, or that are frozen, which may have been numbered before the others.
    """
    if not trained.issubset(order):
        return
    ends = _find_ends(swapped, order)
    for begin, _ in present:
        shift = begin - ends[0][0]
        if all((first + shift, last + shift) in present for first, last in ends):
            yield tuple((first + shift, last + shift) for first, last in ends)
    if len(present) == len(swapped):
        ends = _find_ends(swapped, [name for name in order if name in trained])
        by_first = sorted(range(len(ends)), key=ends.__getitem__)
        found = dict(zip(by_first, sorted(present), strict=True))
        spans = tuple(found[number] for number in range(len(ends)))
        if _is_ordered(ends, spans):
            yield spans


def _find_ends(swapped: Sequence[SubGroup], order: Sequence[str]) -> list[Span]:
    """The places in an order of each sub-group's first and last parameter."""
    places = {name: number for number, name in enumerate(order)}
    return [(places[group.names[0]], places[group.names[-1]]) for group in swapped]


def _is_ordered(ends: Sequence[Span], spans: Sequence[Span]) -> bool:
    """Whether numbers grow with the places of the parameters, and by as many at least."""
    pairs = sorted({pair for one, other in zip(ends, spans, strict=True) for pair in zip(one, other, strict=True)})
    return all(after[1] - before[1] >= after[0] - before[0] > 0 for before, after in pairwise(pairs))


def _list_parameters(save: Save) -> list[str]:
    """Parameters in the order of the module, each once, as far as the save tells them."""
    model = save.model(0)
    left_out = {*model.buffers, *(one for one, other in model.shared.items() if one != other)}
    return [name for name in model.module or {} if name not in left_out]


def _order_as_constructed(names: Iterable[str]) -> list[str]:
    """Parameters behind those of the modules inside their own."""
    places: dict[tuple[int, str], int] = {}

    def find_key(name: str) -> list[tuple[bool, int]]:
        *modules, own = name.split(".")
        key, parent = [], -1
        for part, is_own in [*((module, False) for module in modules), (own, True)]:
            parent = places.setdefault((parent, part), len(places))
            key.append((is_own, parent))
        return key

    return sorted(names, key={name: find_key(name) for name in names}.__getitem__)
