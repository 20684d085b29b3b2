"""Atoms, which are built from their storages on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError
from .flat import Shape
from .keys import COPY, ITEMSIZE, MODULE, AtomKey, ParamKey, count
from .storage import Fragment, Fragments, ParamStorage


@dataclass(frozen=True, slots=True)
class Atom:
    """One state of one parameter: its stored dtype, and the parameter's shards on the source's tensor-parallel ranks.

    Parameters that tensor-parallel ranks do not cut have a single shard. The files do not record how
    shards form the whole; patterns decide that once the target is known. ``instance`` as in :class:`ParamKey`.
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
        """Its key in an index."""
        return AtomKey(self.name, self.state, self.instance)

    @property
    def param(self) -> ParamKey:
        """Its parameter."""
        return ParamKey(self.name, self.instance)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard of tensor-parallel rank 0; the logical shape if the tensor is not sharded."""
        return self.shards[0].shape

    @property
    def numel(self) -> int:
        """Elements of all shards together."""
        return sum(shard.numel for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together."""
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
        """Build the mapping from atoms."""
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
        """Return the total bytes of some atoms."""
        pairs = ((shard, key.state) for key in keys for shard in self.storages[key.param] if key.state in shard.states)
        return sum(count(shard.shape) * ITEMSIZE[shard.states[state].dtype] for shard, state in pairs)

    def list_states(self) -> list[str]:
        """Return the names of all states, each once."""
        return list(dict.fromkeys(state for shards in self.storages.values() for state in _list_states(shards)))

    def list_names(self, states: Collection[str]) -> set[str]:
        """Return the names of the parameters that have one of these states."""
        return {
            param.name
            for param, shards in self.storages.items()
            if any(state in shard.states for shard in shards for state in states)
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
    """Return the names of a parameter's states, each once, in order."""
    return dict.fromkeys(state for shard in shards for state in shard.states)


def are_alike(tensors: Iterable[tuple[tuple[int, ...], str, int, int, int | None]]) -> bool:
    """Return True if checksums prove that tensors have the same bytes; False if a checksum is missing.

    Args:
        tensors: (shape, dtype, byte offset in its record, bytes of the record, CRC32 of the record or None) of each.
    """
    distinct = set(tensors)
    return len(distinct) == 1 and None not in distinct.pop()


def check_coverage(atom: Atom, find_path: Callable[[Fragment], str]) -> None:
    """Verify that every element of every shard comes from exactly one fragment (invariant 1).

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
    """Describe the first gap or overlap of a shard's fragments; empty if there is none."""
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
