"""Atoms, which are made of what holds them when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError
from .held import Fragment, Fragments, ParamStorage, Shard
from .keys import COPY, ITEMSIZE, MODULE, AtomKey, ParamKey, count


@dataclass(frozen=True, slots=True)
class Atom:
    """One (parameter, state): dtype as stored, and a shard per tensor-parallel rank of the source.

    Experts that are spread over all ranks of a pipeline stage, whole, have one. How the shards make up the whole is not
    in the files: patterns settle it once the target is known. ``instance`` counts the pipeline stages that hold the
    parameter under one name, each with values of its own.
    """

    name: str
    state: str
    dtype: str
    shards: tuple[Shard, ...]
    instance: int = 0

    @property
    def key(self) -> AtomKey:
        """Under which an index holds it."""
        return AtomKey(self.name, self.state, self.instance)

    @property
    def param(self) -> ParamKey:
        """Its parameter."""
        return ParamKey(self.name, self.instance)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of tensor-parallel rank 0's shard: the logical shape where tensors are not cut."""
        return self.shards[0].shape

    @property
    def numel(self) -> int:
        """Elements that all shards together hold."""
        return sum(shard.numel for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes that all shards together hold."""
        return self.numel * ITEMSIZE[self.dtype]

    def list_storages(self) -> Iterator[ParamStorage]:
        """What holds it, shard by shard."""
        for tp_shard, shard in enumerate(self.shards):
            held = Fragments(self.dtype, list(shard.held)) if isinstance(shard.held, tuple) else shard.held
            yield ParamStorage(tp_shard, shard.shape, shard.place, {self.state: held})


class Atoms(Mapping[AtomKey, Atom]):
    """Atoms by key, made when they are asked for: of hundreds of thousands one rank looks at few.

    The optimizer's states come first, parameter by parameter, then the model's own tensors in the module's order.

    Args:
        held: by parameter what holds it, of each state in ascending order of the tensor-parallel shards.
        module: parameters and buffers of which there are the model's own tensors, in order.
    """

    __slots__ = ("held", "module")

    def __init__(self, held: Mapping[ParamKey, Sequence[ParamStorage]], module: Iterable[ParamKey]) -> None:
        self.held, self.module = held, tuple(module)

    @classmethod
    def of(cls, atoms: Iterable[Atom]) -> Atoms:
        """Some atoms."""
        held: dict[ParamKey, list[ParamStorage]] = {}
        module: dict[ParamKey, None] = {}
        for atom in atoms:
            held.setdefault(atom.param, []).extend(atom.list_storages())
            module.update({atom.param: None} if atom.state in (COPY, MODULE) else {})
        return cls(held, module)

    def find_states(self, param: ParamKey) -> dict[str, str]:
        """The states that a parameter has, with their dtypes."""
        return {state: what.dtype for each in self.held.get(param, ()) for state, what in each.states.items()}

    def count_bytes(self, keys: Iterable[AtomKey]) -> int:
        """Bytes of some atoms."""
        held = ((each, key.state) for key in keys for each in self.held[key.param] if key.state in each.states)
        return sum(count(each.shape) * ITEMSIZE[each.states[state].dtype] for each, state in held)

    def list_states(self) -> list[str]:
        """The states that there are."""
        return list(dict.fromkeys(state for held in self.held.values() for each in held for state in each.states))

    def list_names(self, states: Collection[str]) -> set[str]:
        """Names of the parameters that have one of these states."""
        return {
            param.name
            for param, held in self.held.items()
            if any(state in each.states for each in held for state in states)
        }

    def __getitem__(self, key: AtomKey) -> Atom:
        name, state, instance = key
        found = [each for each in self.held[ParamKey(name, instance)] if state in each.states]
        if not found:
            raise KeyError(key)
        shards = tuple(each.shard(state) for each in found)
        return Atom(name, state, found[0].states[state].dtype, shards, instance)

    def __iter__(self) -> Iterator[AtomKey]:
        for param, held in self.held.items():
            yield from _list_keys(param, held, of_module=False)
        for param in self.module:
            yield from _list_keys(param, self.held[param], of_module=True)

    def __len__(self) -> int:
        return sum(len({state for each in held for state in each.states}) for held in self.held.values())


def _list_keys(param: ParamKey, held: Iterable[ParamStorage], *, of_module: bool) -> Iterator[AtomKey]:
    for state in dict.fromkeys(state for each in held for state in each.states):
        if (state in (COPY, MODULE)) == of_module:
            yield AtomKey(param.name, state, param.instance)


def are_alike(tensors: Iterable[tuple[tuple[int, ...], str, int, int, int | None]]) -> bool:
    """Whether tensors hold the same bytes, as far as checksums prove it; without a checksum nothing is proven.

    Args:
        tensors: of each (shape, dtype, byte offset in its record, the record's bytes, the record's CRC32 or None).
    """
    told = set(tensors)
    return len(told) == 1 and None not in told.pop()


def check_coverage(atom: Atom, files: Callable[[Fragment], str]) -> None:
    """Every element of every shard comes from exactly one fragment (invariant 1).

    Args:
        atom: fragments sorted by start.
        files: path of a fragment's file, for the message.

    Raises:
        CheckpointError: a gap, an overlap, or elements beyond the shape.
    """
    for rank, shard in enumerate(atom.shards):
        if fault := _find_uncovered(shard, files):
            of = f", tensor-parallel rank {rank}" if len(atom.shards) > 1 else ""
            raise CheckpointError(
                f"{atom.param} ({atom.state}, shape {shard.shape}{of}): {fault}. "
                "The checkpoint folder lacks a file or holds one of another save."
            )


def _find_uncovered(shard: Shard, files: Callable[[Fragment], str]) -> str:
    """What is wrong with a shard's fragments; empty where nothing."""
    position = 0
    for fragment in shard.fragments:
        if fragment.start != position:
            kind = "missing" if fragment.start > position else "covered twice"
            low, high = sorted((fragment.start, position))
            return f"elements [{low}, {high}) are {kind}; the next fragment is in {files(fragment)}"
        position += fragment.numel
    if position == shard.numel:
        return ""
    where = f" (last fragment in {files(shard.fragments[-1])})" if shard.fragments else ""
    return f"the shape has {shard.numel} elements, the fragments hold {position}{where}"
