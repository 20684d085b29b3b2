"""Atoms: their keys, and the storages in which their elements are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, product
from math import prod
from operator import attrgetter, mul
from typing import NamedTuple

from ..errors import CheckpointError
from .flat import Cut, FlatBuffer, Shape

_START = attrgetter("start")

TIED = "tied_modules."
"""Prefix of the parameter names of a pipeline's tied modules."""

MASTER = "fp32"
"""State name of the master weight."""

MODULE = "module"
"""State name of tensors without optimizer: frozen or unoptimized parameters, and buffers."""

COPY = "copy"
"""State name of the model's copy of an optimized parameter (16-bit or fp32) in the model states."""

WEIGHTS = (MASTER, MODULE, COPY)
"""States of a weight or a buffer, by precedence."""

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class ParamKey(NamedTuple):
    """A parameter; ``instance`` counts the pipeline stages with own values of it."""

    name: str
    instance: int = 0

    def __str__(self) -> str:
        return f"{self.name} (instance {self.instance})" if self.instance else self.name

    def atom(self, state: str) -> AtomKey:
        return AtomKey(self.name, state, self.instance)


class AtomKey(NamedTuple):
    """One state of a parameter; ``instance`` as in :class:`ParamKey`."""

    name: str
    state: str
    instance: int = 0

    @property
    def param(self) -> ParamKey:
        return ParamKey(self.name, self.instance)


def count(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return prod(shape)


def make_strides(sizes: Sequence[int]) -> Shape:
    """Return the strides of a row-major block."""
    strides = accumulate((max(size, 1) for size in reversed(sizes[1:])), mul, initial=1)
    return tuple(reversed([*strides]))[: len(sizes)]


def strip_compiled(name: str) -> str:
    """Return a parameter name without the prefixes that ``torch.compile`` inserts."""
    return name.replace("_orig_mod.", "")


def find_owner(name: str) -> str:
    """Return a pipeline parameter's layer number (as text), or its tied module's key."""
    return strip_compiled(name).removeprefix(TIED).partition(".")[0]


def number_layer(name: str) -> int:
    """Return a pipeline parameter's layer number, or -1 for tied modules (first)."""
    head = strip_compiled(name).partition(".")[0]
    return int(head) if head.isdecimal() else -1


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive elements of a flattened shard, from byte ``offset`` of a record on.

    Attributes:
        block: shape of a block of a tensor that is cut along several dimensions, stored row-major; empty for the
            consecutive elements [start, start + numel).
    """

    start: int
    numel: int
    record: int
    offset: int
    block: Shape = ()

    @classmethod
    def of_block(cls, begins: Shape, block: Shape, shape: Shape, record: int, offset: int) -> Fragment:
        """Make a block of a tensor from the block's first index along each dimension."""
        return cls(_flatten(begins, shape), count(block), record, offset, block)

    def find_begins(self, shape: Shape) -> Shape:
        """Return the first index of a block along each dimension of a tensor of a shape."""
        begins, rest = [], self.start
        for dim in range(len(shape)):
            begin, rest = divmod(rest, count(shape[dim + 1 :]))
            begins.append(begin)
        return tuple(begins)

    def find_end(self, shape: Shape) -> int:
        """Return the end of the range that a block spans in a flattened tensor of a shape."""
        return self.start + _flatten(tuple(width - 1 for width in self.block), shape) + 1

    def count_runs(self, shape: Shape) -> int:
        return count(self.block[: self._find_inner(shape)])

    def list_runs(self, shape: Shape, itemsize: int) -> Iterator[Fragment]:
        """Yield a block's consecutive elements of a flattened tensor, in record order."""
        inner, offset = self._find_inner(shape), self.offset
        strides = [count(shape[dim + 1 :]) for dim in range(inner)]
        numel = count(self.block[inner:])
        for indices in product(*map(range, self.block[:inner])):
            start = self.start + sum(index * stride for index, stride in zip(indices, strides, strict=True))
            yield Fragment(start, numel, self.record, offset)
            offset += numel * itemsize

    def _find_inner(self, shape: Shape) -> int:
        """Return the first dimension of contiguous runs; later ones are whole."""
        inner = len(shape)
        while inner > 0 and self.block[inner - 1] == shape[inner - 1]:
            inner -= 1
        return max(inner - 1, 0)


def _flatten(indices: Shape, shape: Shape) -> int:
    """Return the element number in a flattened tensor, given one index per dimension."""
    return sum(index * count(shape[dim + 1 :]) for dim, index in enumerate(indices))


@dataclass(frozen=True, slots=True)
class Fragments:
    """One state of one parameter, as fragments in the order of their first elements.

    Attributes:
        fragments: all of them blocks, or all of them consecutive elements.
        shape: of the tensor whose blocks the fragments are; empty without blocks.
    """

    dtype: str
    fragments: list[Fragment]
    shape: Shape = ()

    def covers(self, shape: Shape) -> bool:
        """Return True for one fragment of all elements, or blocks of such a tensor."""
        if self.shape:
            return shape == self.shape
        numel, parts = count(shape), self.fragments
        return (len(parts) == 1 and (parts[0].start, parts[0].numel) == (0, numel)) or not (parts or numel)

    def find(self, position: int, low: int, high: int) -> Sequence[Fragment]:
        """Return the fragments that have some of the elements [low, high), in order."""
        if self.shape:
            runs = (run for block in self.find_blocks(low, high) for run in self._list_runs(block))
            return sorted((run for run in runs if run.start < high and low < run.start + run.numel), key=_START)
        first = max(bisect_right(self.fragments, low, key=_START) - 1, 0)
        return self.fragments[first : bisect_right(self.fragments, high - 1, key=_START)]

    def find_blocks(self, low: int, high: int) -> Iterator[Fragment]:
        """Yield the blocks that may hold some of the elements [low, high)."""
        return (block for block in self.fragments if block.start < high and low < block.find_end(self.shape))

    def cut_blocks(self, low: int, high: int, shape: Shape) -> Fragments | None:
        """Return elements [low, high) of blocks as a tensor, or None if not whole rows."""
        row, itemsize = count(self.shape[1:]), ITEMSIZE[self.dtype]
        if not row or low % row or high % row:
            return None
        low, high = low // row, high // row
        dropped = int((high - low, shape) == (1, self.shape[1:]))  # one of many stacked tensors lacks a dimension
        if not dropped and shape != (high - low, *self.shape[1:]):
            return None
        cut = []
        for fragment in self.fragments:
            (begin, *begins), (rows, *sizes) = fragment.find_begins(self.shape), fragment.block
            first, last = max(begin, low), min(begin + rows, high)
            if first < last:
                first_indices, block = (first - low, *begins)[dropped:], (last - first, *sizes)[dropped:]
                offset = fragment.offset + (first - begin) * count(tuple(sizes)) * itemsize
                cut.append(Fragment.of_block(first_indices, block, shape, fragment.record, offset))
        return Fragments(self.dtype, cut, shape)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Yield (number, record) of all fragments."""
        return enumerate(fragment.record for fragment in self.fragments)

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """Yield (0, fragment) for the consecutive elements of fragment number ``part``."""
        return ((0, run) for run in self._list_runs(self.fragments[part]))

    def _list_runs(self, fragment: Fragment) -> Iterable[Fragment]:
        return fragment.list_runs(self.shape, ITEMSIZE[self.dtype]) if self.shape else (fragment,)


@dataclass(frozen=True)
class PartitionedState:
    """One state of all parameters of a flat buffer, with one record per partition.

    Tensors of equal size in a record each are stored likewise, as a buffer with one partition per tensor.

    Attributes:
        buffer: its parameters under the whole model's names.
        records: record of each partition; -1 if no file has it.
        offsets: byte in the record at which each partition begins.
    """

    buffer: FlatBuffer
    dtype: str
    records: Sequence[int]
    offsets: Sequence[int]

    @cached_property
    def _is_whole(self) -> bool:
        return self.buffer.is_whole and len(self.records) == self.buffer.parts and min(self.records) >= 0

    def covers(self, shape: Shape) -> bool:
        """Return True if all partitions exist and hold every element once."""
        return self._is_whole

    def find(self, position: int, low: int, high: int) -> Iterator[Fragment]:
        """Yield the fragments of exactly the elements [low, high) of a parameter."""
        for part, cut in self.buffer.find_holders(position, low, high):
            if part < len(self.records) and self.records[part] >= 0:
                yield self._locate(part, cut)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Yield (partition, record) of all partitions that a file has."""
        return ((part, record) for part, record in enumerate(self.records) if record >= 0)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.buffer.names)}

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """Yield (position of the parameter, fragment) of the fragments in a partition."""
        return ((self._positions[cut.name], self._locate(part, cut)) for cut in self.buffer.cuts(part))

    def _locate(self, part: int, cut: Cut) -> Fragment:
        offset = self.offsets[part] + cut.offset * ITEMSIZE[self.dtype]
        return Fragment(cut.start, cut.numel, self.records[part], offset)


Storage = PartitionedState | Fragments
"""The storage of one state."""


class ParamStorage(NamedTuple):
    """A parameter's storages in one tensor-parallel shard, one for each state.

    Attributes:
        shape: local.
        position: of the parameter in its flat buffer, or 0.
        states: state name → storage.
    """

    tp_shard: int
    shape: Shape
    position: int
    states: Mapping[str, Storage]

    @property
    def numel(self) -> int:
        return count(self.shape)

    def find(self, state: str, low: int, high: int) -> Iterable[Fragment]:
        """Return a state's fragments that hold some of the elements [low, high)."""
        return self.states[state].find(self.position, low, high)

    def list_fragments(self, state: str) -> Sequence[Fragment]:
        """Return all fragments of a state in order; those of a faulty file may overlap."""
        storage = self.states[state]
        return storage.fragments if isinstance(storage, Fragments) else list(self.find(state, 0, self.numel))


@dataclass(frozen=True, slots=True)
class Atom:
    """One state of one parameter: its stored dtype, and its shards on the saved ranks.

    Parameters that tensor-parallel ranks do not cut have a single shard. The files do not record how shards form the
    whole; patterns decide that once the target is known. ``instance`` as in :class:`ParamKey`.
    """

    name: str
    state: str
    dtype: str
    shards: tuple[ParamStorage, ...]
    instance: int = 0

    @classmethod
    def of(cls, name: str, state: str, shards: Iterable[tuple[Shape, Fragments]], instance: int = 0) -> Atom:
        """Make an atom of shards, each a local shape and its fragments."""
        made = tuple(ParamStorage(number, shape, 0, {state: part}) for number, (shape, part) in enumerate(shards))
        return cls(name, state, made[0].states[state].dtype, made, instance)

    @property
    def key(self) -> AtomKey:
        return AtomKey(self.name, self.state, self.instance)

    @property
    def param(self) -> ParamKey:
        return ParamKey(self.name, self.instance)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of tensor-parallel rank 0's shard: the logical shape if it is not sharded."""
        return self.shards[0].shape

    @property
    def numel(self) -> int:
        return sum(shard.numel for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


class Atoms(Mapping[AtomKey, Atom]):
    """Atoms by key, built on demand: one rank uses few of hundreds of thousands.

    The order is: the optimizer's states, parameter by parameter; then the tensors that the model holds,
    in module order.

    Args:
        storages: parameter → its storages, in ascending order of the tensor-parallel shards for each state.
        module: parameters and buffers with tensors that the model holds itself, in module order.
    """

    __slots__ = ("module", "storages")

    def __init__(self, storages: Mapping[ParamKey, Sequence[ParamStorage]], module: Iterable[ParamKey]) -> None:
        self.storages, self.module = storages, tuple(module)

    @classmethod
    def of(cls, atoms: Iterable[Atom]) -> Atoms:
        storages: dict[ParamKey, list[ParamStorage]] = {}
        module: dict[ParamKey, None] = {}
        for atom in atoms:
            shards = (shard._replace(states={atom.state: shard.states[atom.state]}) for shard in atom.shards)
            storages.setdefault(atom.param, []).extend(shards)
            module.update({atom.param: None} if atom.state in (COPY, MODULE) else {})
        return cls(storages, module)

    def find_states(self, param: ParamKey) -> dict[str, str]:
        """Return the dtypes of a parameter's states by state name."""
        shards = self.storages.get(param, ())
        return {state: storage.dtype for shard in shards for state, storage in shard.states.items()}

    def count_bytes(self, keys: Iterable[AtomKey]) -> int:
        pairs = ((shard, key.state) for key in keys for shard in self.storages[key.param] if key.state in shard.states)
        return sum(count(shard.shape) * ITEMSIZE[shard.states[state].dtype] for shard, state in pairs)

    def list_states(self) -> list[str]:
        return list(_list_states(chain.from_iterable(self.storages.values())))

    def list_names(self, states: Collection[str]) -> set[str]:
        """Return the names of the parameters that have one of these states."""
        wanted = frozenset(states)
        return {
            param.name
            for param, shards in self.storages.items()
            for shard in shards
            if not wanted.isdisjoint(shard.states)
        }

    def __getitem__(self, key: AtomKey) -> Atom:
        name, state, instance = key
        shards = tuple(shard for shard in self.storages[ParamKey(name, instance)] if state in shard.states)
        if not shards:
            raise KeyError(key)
        return Atom(name, state, shards[0].states[state].dtype, shards, instance)

    def __iter__(self) -> Iterator[AtomKey]:
        for param, shards in self.storages.items():
            yield from (param.atom(state) for state in _list_states(shards) if state not in (COPY, MODULE))
        for param in self.module:
            yield from (param.atom(state) for state in _list_states(self.storages[param]) if state in (COPY, MODULE))

    def __len__(self) -> int:
        return sum(len(_list_states(shards)) for shards in self.storages.values())


def _list_states(shards: Iterable[ParamStorage]) -> dict[str, None]:
    return dict.fromkeys(chain.from_iterable([shard.states for shard in shards]))


def are_alike(tensors: Iterable[tuple[object, ...]]) -> bool:
    """Return True if checksums prove that all tensors are equal.

    Args:
        tensors: (shape, dtype, byte offset in its record, bytes of the record, CRC32 of the record or None) of each,
            and further values that equal tensors have in common.
    """
    distinct = set(tensors)
    return len(distinct) == 1 and None not in distinct.pop()


def check_coverage(atom: Atom, find_path: Callable[[Fragment], str]) -> None:
    """Verify that exactly one fragment has each element of each shard (invariant 1).

    Args:
        atom: its fragments sorted by start.
        find_path: returns the path of a fragment's file, for the message.

    Raises:
        CheckpointError: a gap, an overlap, or elements beyond the shape.
    """
    for rank, shard in enumerate(atom.shards):
        if fault := _find_uncovered(shard, atom.state, find_path):
            of = f", tensor-parallel rank {rank}" if len(atom.shards) > 1 else ""
            raise CheckpointError(
                f"{atom.param} ({atom.state}, shape {shard.shape}{of}): {fault}. "
                "The checkpoint folder lacks a file or holds one of another save."
            )


def _find_uncovered(shard: ParamStorage, state: str, find_path: Callable[[Fragment], str]) -> str:
    """Describe the first gap or overlap of a shard's fragments, or return ""."""
    position, fragments = 0, shard.list_fragments(state)
    for fragment in fragments:
        if fragment.start != position:
            kind = "missing" if fragment.start > position else "covered twice"
            low, high = sorted((fragment.start, position))
            return f"elements [{low}, {high}) are {kind}; the next fragment is in {find_path(fragment)}"
        position += fragment.numel
    if position == shard.numel:
        return ""
    where = f" (last fragment in {find_path(fragments[-1])})" if fragments else ""
    return f"the shape has {shard.numel} elements, the fragments hold {position}{where}"
