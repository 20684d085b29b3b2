"""An index under other names: parameters that are joined of several saved ones, cut out of one, copied, left out.

A :class:`DerivedParam` is slices of saved ones, one behind the other, and so are its fragments: nothing behind the
index knows that it is not a saved one. AutoEP's universal form and the user's rules about experts
(:mod:`deepspeed_ucp.plan.renames`) are told so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from ..atoms import ITEMSIZE, Atom, AtomicIndex, AtomKey, Atoms, Fragment, GroupInfo, Holding, ParamKey, Shard
from ..errors import MismatchError, shorten
from ..flat import Shape

T = TypeVar("T")
Repeated = tuple[tuple[int, Fragment], ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """One of ``count`` equal runs of elements, in their order, of a saved parameter's shard; by default all of it."""

    name: str
    number: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class DerivedParam:
    """A parameter that is made of slices, one behind the other, on every tensor-parallel rank alike.

    Attributes:
        slices: of saved parameters.
        dims: dimensions of its shape, of which the last are the first slice's parameter's.
        lead: sizes in front of the dimension along which the slices' rows follow each other.
    """

    slices: tuple[Slice, ...]
    dims: int
    lead: Shape = ()

    def find_shape(self, numel: int, saved: Shape) -> Shape:
        """Its shape, with so many elements; ``saved`` is that of the first slice's parameter."""
        if (len(self.slices), self.slices[0].count, self.dims) == (1, 1, len(saved)):
            return saved
        inner = self.dims - len(self.lead) - 1
        if inner < 0:
            return self.lead
        rest = saved[len(saved) - inner :]
        return (*self.lead, numel // (prod((*self.lead, *rest)) or 1), *rest)


def fuse_experts(index: AtomicIndex) -> AtomicIndex:
    """The index with one parameter [experts, …] for all experts of a layer, where ``fused`` tells of it."""
    dims = {key.name: len(atom.shape) for key, atom in index.stored.atoms.items()}
    made = {}
    for name, count in index.model.fused.items():
        experts = tuple(Slice(f"{name}.{expert}") for expert in range(count))
        made[name] = DerivedParam(experts, dims.get(experts[0].name, 0) + 1, (count,))
    return derive(index, made)


def split_experts(index: AtomicIndex, fused: Mapping[str, int]) -> AtomicIndex:
    """The inverse: an atom for each expert of parameters that hold so many of them, one behind the other."""
    shapes = {key.name: atom.shape for key, atom in index.stored.atoms.items() if key.name in fused}
    made = {
        f"{name}.{expert}": DerivedParam((Slice(name, expert, fused[name]),), len(shape) - 1)
        for name, shape in shapes.items()
        for expert in range(fused[name])
    }
    return derive(index, made).change(fused=dict(fused))


def rename_all(index: AtomicIndex, renamed: Mapping[str, str]) -> AtomicIndex:
    """The index under other names, without its ties.

    Args:
        renamed: new name → its own.
    """
    if not renamed:
        return index
    dims = {key.name: len(atom.shape) for key, atom in index.stored.atoms.items()}
    return derive(index, {new: DerivedParam((Slice(old),), dims[old]) for new, old in renamed.items() if old in dims})


def derive(index: AtomicIndex, made: Mapping[str, DerivedParam], dropped: Iterable[str] = ()) -> AtomicIndex:
    """The index with parameters in the place of those that they are made of.

    Args:
        made: by name; every state is made alike.
        dropped: saved parameters that are left out.

    Raises:
        MismatchError: a parameter that is made is there already; what one is made of has different states, dtypes, step
            counts or hyper-parameters.
    """
    used = {piece.name for each in made.values() for piece in each.slices} | set(dropped)
    if twice := sorted({key.name for key in index.stored.atoms} & made.keys() - used):
        feeding = shorten([piece.name for piece in made[twice[0]].slices])
        raise MismatchError(
            f"The checkpoint has {shorten(twice)} itself, which {feeding} is to feed; leave one of them out."
        )
    heads: dict[str, list[str]] = defaultdict(list)
    for name, each in made.items():
        heads[each.slices[0].name].append(name)
    _check_alike(index, made, used)
    view = _View(used, heads)
    held: dict[ParamKey, list[Holding]] = {}
    repeated: dict[AtomKey, Repeated] = {}
    for param, holdings in index.stored.atoms.held.items():
        for new in view.params((param,)):
            held[new] = list(holdings) if param.name not in used else []
            for state in index.stored.atoms.find_states(param):
                key = AtomKey(new.name, state, new.instance)
                if param.name in used:
                    held[new] += _make_atom(index, key, made[new.name]).list_holdings()
                    again = _repeat(index, key, made[new.name])
                else:
                    again = index.stored.repeated.get(key, ())
                repeated.update({key: again} if again else {})
    return index.change(
        atoms=Atoms(held, view.params(index.stored.atoms.module)),
        repeated=repeated,
        scalars=view.move(index.run.scalars),
        groups=tuple(GroupInfo(tuple(view.params(group.members)), group.hyper) for group in index.run.groups),
        instances={new: count for name, count in index.model.instances.items() for new in view.names(name)},
        aliases={alias: name for alias, name in index.model.aliases.items() if not {alias, name} & used},
        buffers=frozenset(new for name in index.model.buffers for new in view.names(name)),
    )


@dataclass(frozen=True, slots=True)
class _View:
    """What stands in the place of a saved parameter that is used: those whose first piece is of it."""

    used: Container[str]
    heads: Mapping[str, Sequence[str]]

    def names(self, name: str) -> Sequence[str]:
        return self.heads.get(name, ()) if name in self.used else (name,)

    def params(self, params: Iterable[ParamKey]) -> Iterator[ParamKey]:
        return (param._replace(name=new) for param in params for new in self.names(param.name))

    def move(self, held: Mapping[ParamKey, T]) -> dict[ParamKey, T]:
        return {new: value for param, value in held.items() for new in self.params((param,))}


def _make_atom(index: AtomicIndex, key: AtomKey, made: DerivedParam) -> Atom:
    atoms = index.stored.atoms
    sources = [atoms[key._replace(name=piece.name)] for piece in made.slices]
    shards = []
    for tp_shard, first in enumerate(sources[0].shards):
        held = [(piece, source.shards[tp_shard]) for piece, source in zip(made.slices, sources, strict=True)]
        fragments = [part for piece, shard in held for part in [(piece, shard.numel, shard.fragments)]]
        numel = sum(shard.numel // piece.count for piece, shard in held)
        shape = made.find_shape(numel, first.shape)
        shards.append(Shard(shape, tuple(_move(fragments, ITEMSIZE[sources[0].dtype]))))
    return Atom(key.name, key.state, sources[0].dtype, tuple(shards), key.instance)


def _repeat(index: AtomicIndex, key: AtomKey, made: DerivedParam) -> Repeated:
    """What of it lies in the files a second time."""
    atoms, parts = index.stored.atoms, []
    sources = [key._replace(name=piece.name) for piece in made.slices]
    for tp_shard in range(len(atoms[sources[0]].shards)):
        held = []
        for piece, source in zip(made.slices, sources, strict=True):
            again = tuple(fragment for at, fragment in index.stored.repeated.get(source, ()) if at == tp_shard)
            held.append((piece, atoms[source].shards[tp_shard].numel, again))
        parts += [(tp_shard, fragment) for fragment in _move(held, ITEMSIZE[atoms[sources[0]].dtype])]
    return tuple(parts)


def _move(held: Iterable[tuple[Slice, int, tuple[Fragment, ...]]], itemsize: int) -> Iterator[Fragment]:
    """What fragments hold of slices, where these follow each other.

    Args:
        held: per piece the elements of the shard that it is cut out of, and the shard's fragments.
    """
    position = 0
    for piece, numel, fragments in held:
        size = numel // piece.count
        begin = piece.number * size
        for each in fragments:
            low, high = max(each.start, begin), min(each.start + each.numel, begin + size)
            if low < high:
                offset = each.offset + (low - each.start) * itemsize
                yield Fragment(position + low - begin, high - low, each.record, offset)
        position += size


def _check_alike(index: AtomicIndex, made: Mapping[str, DerivedParam], used: Container[str]) -> None:
    """Whether what parameters are made of goes together."""
    kinds: dict[str, set[tuple[str, int, str]]] = defaultdict(set)
    for key, atom in index.stored.atoms.items():
        if key.name in used:
            kinds[key.name].add((key.state, key.instance, atom.dtype))
    hypers = {param.name: group.hyper for group in index.run.groups for param in group.members if param.name in used}
    scalars = {param.name: facts for param, facts in index.run.scalars.items() if param.name in used}
    for name, each in made.items():
        first, *others = dict.fromkeys(piece.name for piece in each.slices)
        for other in others:
            for what, facts in (("states", kinds), ("step counts", scalars), ("hyper-parameters", hypers)):
                if facts.get(first) != facts.get(other):
                    raise MismatchError(
                        f"{name} is made of {first} and {other}, which were saved with other {what}: "
                        f"{_show(facts.get(first))} and {_show(facts.get(other))}. Leave the rules that join them out, "
                        "or resume with weights alone (load_optimizer_states=False)."
                    )


def _show(fact: object) -> str:
    return f"{sorted(fact) if isinstance(fact, set) else fact}"
