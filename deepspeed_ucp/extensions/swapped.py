"""Find optimizer states in swap files (ZeRO-Infinity; ``save_checkpoint``).

A swap file has raw numbers, padded for asynchronous I/O, without header or checksum. Its name has DeepSpeed's numbers
of the first and last parameter of a sub-group, which no state file records. DeepSpeed numbers the parameters in module
order (``zero/partition_parameters.py`` ``Init``), or under ``zero.Init`` in the order of construction: children before
their parent's parameters. The folder may contain files of other engines that swapped to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from ..errors import CheckpointError, shorten
from ..formats.deepspeed.files import OFFLOADED, SwapName
from ..formats.deepspeed.headers import FileHeader, OptimHeader, Piece
from ..formats.deepspeed.save import Save, describe_offload
from ..formats.findings import COPY, WARNING, Finding, from_error
from ..model.flat import divide_padded
from ..model.records import Record
from ..model.storage import ITEMSIZE, MASTER, strip_compiled
from ..model.wrappers import MOMENTUM, Form
from .registry import SaveExtension

_LEAST = 1 << 20
"""Least bytes of a swapped sub-group (swap_tensor/utils.py ``MIN_AIO_BYTES``)."""

_ALIGNED = 1024
"""Alignment in bytes for each thread of asynchronous I/O (``AIO_ALIGNED_BYTES``)."""

ParamRange = tuple[int, int]
"""DeepSpeed's numbers of the first and the last parameter of a sub-group."""


@dataclass(frozen=True, slots=True)
class SubGroup:
    """A swapped sub-group, with the elements and dtype of a rank's partition."""

    index: int
    names: tuple[str, ...]
    numel: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's partition."""
        return self.numel * ITEMSIZE[self.dtype]


class Swapped(SaveExtension):
    """Saves with optimizer states in swap files."""

    def arrange(self, save: Save, headers: Mapping[str, FileHeader]) -> list[Finding]:
        """Add a save's swap files, if it has all state files; return their faults."""
        swapped = _list_swapped(save)
        if not swapped or any(len(shards) != save.dp for shards in save.shards):
            return []
        if len(save.models) > 1:
            text = (
                f"{save.path(OFFLOADED)}: under tensor parallelism its folders cannot be assigned to ranks. Use "
                "a save without optimizer states on NVMe."
            )
            return [Finding("unsupported", OFFLOADED, text)]
        try:
            spans = _find_spans(save, swapped)
        except CheckpointError as error:
            return from_error(save.folder, error)
        faults: list[Finding] = []
        for rank, shard in enumerate(save.shards[0]):
            for group, span in zip(swapped, spans, strict=True):
                states = save.swaps[shard.name, group.index] = {}
                for state in _list_states(save, shard.optim, group.index):
                    file = _make_header(save, SwapName(rank, state, *span), group)
                    if isinstance(file, Finding):
                        faults.append(file)
                    else:
                        states[state or MASTER] = file
        return [*faults, *_warn_longer(save, swapped)]


def _list_swapped(save: Save) -> list[SubGroup]:
    """List the swapped sub-groups, which their size determines."""
    first = save.shards[0][0].optim if save.shards[0] else None
    if first is None or first.traits.form is not Form.RESERVED or not describe_offload(save.zero).startswith("nvme/"):
        return []
    least = max(_LEAST, _read_option(save, "block_size", _LEAST))
    groups = []
    for index, (master, group) in enumerate(zip(first.masters, save.model(0).param_shapes or (), strict=False)):
        names, numel = tuple(name for name, _ in group), sum(divide_padded(prod(shape), save.dp) for _, shape in group)
        swapped = SubGroup(index, tuple(map(strip_compiled, names)), numel, master.dtype)
        if numel and not master.fault and (swapped.nbytes >= least or not master.numel):
            groups.append(swapped)
    return groups


def _read_option(save: Save, key: str, default: int) -> int:
    """Return a positive number of the ds_config's section ``aio``, or the default."""
    value: Any = save.main.config.get("aio", {}).get(key, default)
    return value if isinstance(value, int) and value > 0 else default


def _list_states(save: Save, optim: OptimHeader | None, index: int) -> list[str]:
    """List a sub-group's states with swap files; first the master, without a name.

    The state file may contain other sub-groups' values for them: pipelined swapping reuses the buffers.
    """
    states = optim.tensors[index].states if optim and index < len(optim.tensors) else {}
    in_memory = {MOMENTUM} if save.zero.get("save_muon_momentum_buffer_in_memory") else set()
    return ["", *(state for state in states if state not in in_memory)]


def _make_header(save: Save, name: SwapName, group: SubGroup) -> FileHeader | Finding:
    """Return a swap file with its expected content, or its fault."""
    file, least_size = save.name("swap", *name), _padded_nbytes(save, group)
    entry = save.where.entries.get(file)
    if entry is None:
        text = f"{save.path(file)} is missing; it holds {_describe(name, group)}. {COPY}"
        return Finding("missing", file, text)
    size = entry.size
    if size < least_size:
        text = (
            f"{save.path(file)}: has {size} bytes, {_describe(name, group)} takes {least_size}. The file is truncated, "
            "or belongs to another run; put the right one back."
        )
        return Finding("inconsistent", file, text)
    record = Record(0, size, None)
    return FileHeader(file, size, swap=Piece(record, 0, (group.numel,), group.dtype))


def _warn_longer(save: Save, swapped: Sequence[SubGroup]) -> Iterator[Finding]:
    """Warn of too long files: of an earlier engine or another world size."""
    least_sizes = {group.index: _padded_nbytes(save, group) for group in swapped}
    files = [(header, least_sizes[index]) for (_, index), states in save.swaps.items() for header in states.values()]
    longer = sorted(header.name for header, least_size in files if header.size > least_size)
    if longer:
        text = (
            f"{save.path(longer[0])}: is longer than its states, as are {len(longer)} swap files in all. "
            "They were written over an earlier engine's files, or belong to another world size; only a seal can "
            "distinguish these."
        )
        yield Finding("inconsistent", longer[0], text, WARNING, tuple(longer))


def _describe(name: SwapName, group: SubGroup) -> str:
    return f"{name.state or MASTER} of {shorten(group.names, 3)} ({group.numel} elements of {group.dtype})"


def _padded_nbytes(save: Save, group: SubGroup) -> int:
    threads = _read_option(save, "intra_op_parallelism", _read_option(save, "thread_count", 1))
    return divide_padded(group.nbytes, _ALIGNED * threads) * _ALIGNED * threads


def _find_spans(save: Save, swapped: Sequence[SubGroup]) -> list[ParamRange]:
    """Find the only spans of sub-groups' files that follow an order of parameters.

    Raises:
        CheckpointError: no spans fit, or several do.
    """
    present = {(begin, end) for _, state, begin, end in save.names["swap"] if not state}
    model = save.model(0)
    left_out = {*model.buffers, *(one for one, other in model.shared.items() if one != other)}
    in_order = [name for name in model.module or {} if name not in left_out]  # in module order, each once
    trained = {strip_compiled(name) for group in model.param_shapes or () for name, _ in group}
    candidates = {
        spans
        for order in (in_order, _order_as_constructed(in_order))
        for spans in _iter_candidates(swapped, present, order, trained)
    }
    fitting = candidates
    for exact in (False, True):
        if len(fitting) > 1:
            fitting = {spans for spans in candidates if _sizes_match(save, swapped, spans, exact=exact)}
    if len(fitting) == 1:
        return list(fitting.pop())
    path, listed = save.path(OFFLOADED), shorten([f"{begin}_{end}" for begin, end in sorted(present)])
    holds = f"{path}: holds swap files of parameters {listed or 'none'}"
    if candidates:
        several = " or ".join(
            shorten([f"{begin}_{end}" for begin, end in spans], 3) for spans in sorted(candidates)[:2]
        )
        raise CheckpointError(
            f"{holds}; those of this save's {len(swapped)} swapped sub-groups could be {several}. Several engines "
            "swapped to one place: remove the files of the other engines."
        )
    raise CheckpointError(
        f"{holds}; no choice of them follows the order of the parameters in this save's {len(swapped)} swapped "
        "sub-groups. The folder lacks files, or they belong to another run; put the right ones back."
    )


def _sizes_match(save: Save, swapped: Sequence[SubGroup], spans: Sequence[ParamRange], *, exact: bool) -> bool:
    """Return True if the masters' files are long enough (if ``exact``, not longer)."""
    for rank in range(save.dp):
        for group, span in zip(swapped, spans, strict=True):
            file = _make_header(save, SwapName(rank, "", *span), group)
            if isinstance(file, Finding) or (exact and file.size > _padded_nbytes(save, group)):
                return False
    return True


def _iter_candidates(
    swapped: Sequence[SubGroup], present: set[ParamRange], order: Sequence[str], trained: set[str]
) -> Iterator[tuple[ParamRange, ...]]:
    """Yield spans of all sub-groups that have files and follow a parameter order.

    The numbers have no gaps. If there are no other files, gaps are accepted, as for tied or unknown parameters, or
    frozen ones, which may be numbered before the others.
    """
    if not trained.issubset(order):
        return
    ends = _index_ranges(swapped, order)
    for begin, _ in present:
        shift = begin - ends[0][0]
        if all((first + shift, last + shift) in present for first, last in ends):
            yield tuple((first + shift, last + shift) for first, last in ends)
    if len(present) == len(swapped):
        ends = _index_ranges(swapped, [name for name in order if name in trained])
        by_first = sorted(range(len(ends)), key=ends.__getitem__)
        by_group = dict(zip(by_first, sorted(present), strict=True))
        spans = tuple(by_group[number] for number in range(len(ends)))
        if _is_ordered(ends, spans):
            yield spans


def _index_ranges(swapped: Sequence[SubGroup], order: Sequence[str]) -> list[ParamRange]:
    """Return the indices of each sub-group's first and last parameter in an order."""
    numbers = {name: number for number, name in enumerate(order)}
    return [(numbers[group.names[0]], numbers[group.names[-1]]) for group in swapped]


def _is_ordered(ends: Sequence[ParamRange], spans: Sequence[ParamRange]) -> bool:
    """Return True if numbers grow at least as much as the parameters' places."""
    pairs = sorted({pair for one, other in zip(ends, spans, strict=True) for pair in zip(one, other, strict=True)})
    return all(after[1] - before[1] >= after[0] - before[0] > 0 for before, after in pairwise(pairs))


def _order_as_constructed(names: Iterable[str]) -> list[str]:
    """Order parameters after the parameters of their module's children."""
    numbers: dict[tuple[int, str], int] = {}

    def find_key(name: str) -> list[tuple[bool, int]]:
        *modules, last = name.split(".")
        key, parent = [], -1
        for part, is_own in [*((module, False) for module in modules), (last, True)]:
            parent = numbers.setdefault((parent, part), len(numbers))
            key.append((is_own, parent))
        return key

    return sorted(names, key={name: find_key(name) for name in names}.__getitem__)
