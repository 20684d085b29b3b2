"""An index with derived parameters: joined from saved ones, cut out, or left out.

A :class:`DerivedParam` consists of slices of saved parameters, and its fragments of theirs: users of the index cannot
tell it from a saved one. Fused parameters and Hugging Face folders are read in this way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from ..errors import MismatchError, shorten
from ..extensions.registry import find_for_names
from ..model.flat import Shape
from ..model.index import AtomicIndex, GroupInfo
from ..model.storage import ITEMSIZE, Atom, AtomKey, Atoms, Fragment, Fragments, ParamKey, ParamStorage
from ..model.view import EngineView, Shapes
from .match import Adaptation

Repeated = tuple[tuple[int, Fragment], ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Runs of elements of a saved parameter's shard, by default the whole shard.

    The shard is divided into ``count`` equal runs, of which ``width`` begin with run ``number``.
    """

    name: str
    number: int = 0
    count: int = 1
    width: int = 1


@dataclass(frozen=True, slots=True)
class DerivedParam:
    """A parameter that concatenates slices, the same on every tensor-parallel rank.

    Attributes:
        dims: number of dimensions; the last ones are those of the first slice's parameter.
        lead: sizes before the dimension along which the slices' rows are concatenated.
    """

    slices: tuple[Slice, ...]
    dims: int
    lead: Shape = ()

    @classmethod
    def whole(cls, name: str, shape: Shape) -> DerivedParam:
        """Return a saved parameter of a shape, unchanged."""
        return cls((Slice(name),), len(shape))

    def find_shape(self, numel: int, saved: Shape) -> Shape:
        """Return the derived shape of ``numel`` elements; ``saved``: the first slice's."""
        if (len(self.slices), self.slices[0].count, self.dims) == (1, 1, len(saved)):
            return saved
        inner = self.dims - len(self.lead) - 1
        if inner < 0:
            return self.lead
        rest = saved[len(saved) - inner :]
        return (*self.lead, numel // (prod((*self.lead, *rest)) or 1), *rest)


MOST_FUSED = 1 << 14
"""Limit of atoms in a fused parameter of a file."""


def can_fuse(shape: Shape, parts: int) -> bool:
    """Return True if a tensor of this shape can be a stack of ``parts`` atoms."""
    return 0 < parts <= MOST_FUSED and shape[:1] == (parts,) and prod(shape) > 0


def fuse(index: AtomicIndex) -> AtomicIndex:
    """Join the atoms of each name in ``index.fused`` into one parameter [count, …]."""
    dims = {key.name: len(atom.shape) for key, atom in index.atoms.items() if index.fused}
    made = {}
    for name, count in index.fused.items():
        parts = tuple(Slice(f"{name}.{number}") for number in range(count))
        made[name] = DerivedParam(parts, dims.get(parts[0].name, 0) + 1, (count,))
    return derive(index, made)


def split(index: AtomicIndex, fused: Mapping[str, int]) -> AtomicIndex:
    """Split each parameter in ``fused`` (→ count) into atoms ``name.0``, ``name.1``…"""
    shapes = {key.name: atom.shape for key, atom in index.atoms.items() if key.name in fused}
    made = {
        f"{name}.{number}": DerivedParam((Slice(name, number, fused[name]),), len(shape) - 1)
        for name, shape in shapes.items()
        for number in range(fused[name])
    }
    return replace(derive(index, made), fused=dict(fused))


def recast(index: AtomicIndex, live: Shapes) -> AtomicIndex:
    """Return the index with the live parameters, which extensions derive from saved."""
    adaptation = Adaptation(index, EngineView(live), (), None, False, index, frozenset())
    for extension in find_for_names([*(param.name for param in index.atoms.storages), *live]):
        extension.adapt(adaptation)
    return adaptation.index


def rename_all(index: AtomicIndex, renamed: Mapping[str, str]) -> AtomicIndex:
    """Return the index under other names (new → saved name), without its ties."""
    if not renamed:
        return index
    saved = {key.name: atom.shape for key, atom in index.atoms.items()}
    return derive(index, {new: DerivedParam.whole(old, saved[old]) for new, old in renamed.items() if old in saved})


def derive(index: AtomicIndex, made: Mapping[str, DerivedParam], dropped: Iterable[str] = ()) -> AtomicIndex:
    """Return the index with derived parameters in place of the saved ones they use.

    Args:
        made: the derived parameters by name; every state is derived alike.
        dropped: saved parameters that are left out.

    Raises:
        MismatchError: a derived parameter exists already, its elements are no whole rows, or it is derived from
            parameters with different states, dtypes, step counts or hyper-parameters.
    """
    used = {piece.name for derived in made.values() for piece in derived.slices} | set(dropped)
    if twice := sorted({key.name for key in index.atoms} & made.keys() - used):
        feeding = shorten([piece.name for piece in made[twice[0]].slices])
        raise MismatchError(
            f"The checkpoint has {shorten(twice)} itself, which {feeding} would fill too; leave one of them out."
        )
    heads: dict[str, list[str]] = defaultdict(list)
    for name, derived in made.items():
        heads[derived.slices[0].name].append(name)
    _check_alike(index, made, used)

    def follow(name: str) -> Sequence[str]:
        """Return a name's replacements: if it is used, those whose first slice it feeds."""
        return heads.get(name, ()) if name in used else (name,)

    def follow_all(params: Iterable[ParamKey]) -> Iterator[ParamKey]:
        return (param._replace(name=new) for param in params for new in follow(param.name))

    storages, repeated = _derive_atoms(index, made, used, follow_all)
    return replace(
        index,
        atoms=Atoms(storages, follow_all(index.atoms.module)),
        repeated=repeated,
        scalars={new: facts for param, facts in index.scalars.items() for new in follow_all((param,))},
        groups=tuple(GroupInfo(tuple(follow_all(group.members)), group.hyper) for group in index.groups),
        instances={new: count for name, count in index.instances.items() for new in follow(name)},
        aliases={alias: name for alias, name in index.aliases.items() if not {alias, name} & used},
        buffers=frozenset(new for name in index.buffers for new in follow(name)),
    )


def _derive_atoms(
    index: AtomicIndex,
    made: Mapping[str, DerivedParam],
    used: Container[str],
    follow: Callable[[Iterable[ParamKey]], Iterable[ParamKey]],
) -> tuple[dict[ParamKey, list[ParamStorage]], dict[AtomKey, Repeated]]:
    """Return the storages after the derivation, and the parts that files hold twice."""
    storages: dict[ParamKey, list[ParamStorage]] = {}
    repeated = {key: parts for key, parts in index.repeated.items() if key.name not in used}
    for param, shards in index.atoms.storages.items():
        if param.name not in used:
            storages[param] = list(shards)
            continue
        for new in follow((param,)):
            storages[new] = []
            for state in index.atoms.find_states(param):
                key = AtomKey(new.name, state, new.instance)
                atom, again = _make_atom(index, key, made[new.name])
                storages[new] += atom.shards
                repeated.update({key: again} if again else {})
    return storages, repeated


def _make_atom(index: AtomicIndex, key: AtomKey, made: DerivedParam) -> tuple[Atom, Repeated]:
    """Derive one state, and its parts that are in the files a second time."""
    sources = [key._replace(name=piece.name) for piece in made.slices]
    atom_of = {source: index.atoms[source] for source in dict.fromkeys(sources)}
    atoms = [atom_of[source] for source in sources]
    shards, again, itemsize = list[tuple[Shape, Fragments]](), list[tuple[int, Fragment]](), ITEMSIZE[atoms[0].dtype]
    for at, saved in enumerate(zip(*(atom.shards for atom in atoms), strict=True)):
        spans = list(_place_slices(made.slices, [shard.numel for shard in saved]))
        numel = sum(high - low for low, high, _ in spans)
        shape = made.find_shape(numel, saved[0].shape)
        if prod(shape) != numel:
            used = shorten(dict.fromkeys(piece.name for piece in made.slices))
            raise MismatchError(f"{key.name}: {numel} elements of {used} are no whole rows of {shape[1:]}.")
        storage = saved[0].states[key.state]
        has_blocks = len(saved) == 1 and isinstance(storage, Fragments) and storage.shape
        blocks = storage.cut_blocks(*spans[0][:2], shape) if has_blocks else None
        moved = (
            _clip(shard.find(key.state, *span[:2]), *span, itemsize) for shard, span in zip(saved, spans, strict=True)
        )
        shards.append((shape, blocks or Fragments(atoms[0].dtype, list(chain.from_iterable(moved)))))
        for source, span in zip(sources, spans, strict=True):
            parts = (part for shard, part in index.repeated.get(source, ()) if shard == at)
            again += [(at, part) for part in _clip(parts, *span, itemsize)]
    return Atom.of(key.name, key.state, shards, key.instance), tuple(again)


def _place_slices(slices: Iterable[Slice], numels: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (low, high, position in the derived shard) of each slice of saved shards."""
    position = 0
    for piece, numel in zip(slices, numels, strict=True):
        low, high = (number * numel // piece.count for number in (piece.number, piece.number + piece.width))
        yield low, high, position
        position += high - low


def _clip(fragments: Iterable[Fragment], begin: int, end: int, position: int, itemsize: int) -> Iterator[Fragment]:
    """Yield fragments clipped to elements [begin, end) and moved to ``position``."""
    for fragment in fragments:
        low, high = max(fragment.start, begin), min(fragment.start + fragment.numel, end)
        if low < high:
            offset = fragment.offset + (low - fragment.start) * itemsize
            yield Fragment(position + low - begin, high - low, fragment.record, offset)


def _check_alike(index: AtomicIndex, made: Mapping[str, DerivedParam], used: Container[str]) -> None:
    """Raise MismatchError if joined parameters differ in states, steps or groups."""
    kinds: dict[str, set[tuple[str, int, str]]] = defaultdict(set)
    for key, atom in index.atoms.items():
        if key.name in used:
            kinds[key.name].add((key.state, key.instance, atom.dtype))
    hypers = {param.name: group.hyper for group in index.groups for param in group.members if param.name in used}
    scalars = {param.name: facts for param, facts in index.scalars.items() if param.name in used}
    for name, derived in made.items():
        first, *others = dict.fromkeys(piece.name for piece in derived.slices)
        for other in others:
            for kind, facts in (("states", kinds), ("step counts", scalars), ("hyper-parameters", hypers)):
                if facts.get(first) != facts.get(other):
                    raise MismatchError(
                        f"{name} joins {first} and {other}, which were saved with different {kind}: "
                        f"{_show(facts.get(first))} and {_show(facts.get(other))}. Remove the rules that join them, "
                        "or resume with weights alone (load_optimizer_states=False)."
                    )


def _show(fact: object) -> str:
    return f"{sorted(fact) if isinstance(fact, set) else fact}"
