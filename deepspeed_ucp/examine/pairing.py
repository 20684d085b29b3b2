"""Which atom of one checkpoint is which of another, and how the shards of both make up the same logical tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, AtomKey, count
from ..errors import MismatchError
from ..patterns import Kept, Layout, Pattern, RuleSet, Settled, rename_names, settle
from ..patterns.layout import Shape
from ..union.wholes import Whole, is_remade, list_rules, make_whole

Shapes = Mapping[str, tuple[Shape, ...]]


@dataclass(frozen=True, slots=True)
class Pair:
    """One logical atom of two checkpoints.

    Attributes:
        left, right: of A and of B. With ``kept`` both are the shards one behind the other.
        vocab: rows that mean something, where the rest of dimension 0 is padding; None: no padding is known.
        kept: both sides are cut alike, and nothing tells how: local shapes by tensor-parallel rank.
    """

    left: Whole
    right: Whole
    vocab: int | None = None
    kept: tuple[Shape, ...] = ()

    @property
    def numel(self) -> int:
        """Elements that both sides have."""
        shape = self.left.shape
        rows = min(shape[0], self.right.shape[0]) if shape else 1
        return rows * count(shape[1:])

    @property
    def meaning(self) -> int:
        """Elements in front of the padding."""
        return self.numel if self.vocab is None else min(self.vocab * count(self.left.shape[1:]), self.numel)

    def locate(self, position: int) -> tuple[tuple[int, ...], int | None]:
        """Index of an element in the logical tensor and None; or, of ``kept``, in a rank's shard, and the rank."""
        for rank, shape in enumerate(self.kept):
            if position < count(shape):
                return _unravel(position, shape), rank
            position -= count(shape)
        return _unravel(position, self.left.shape), None


def _unravel(position: int, shape: Shape) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        position, at = divmod(position, size)
        place.append(at)
    return tuple(reversed(place))


@dataclass(slots=True)
class Pairs:
    """The atoms of two checkpoints.

    Attributes:
        both: in A and in B.
        only_left, only_right: in one of them.
        shapes: (atom of A, told shapes) of those whose logical shapes differ.
        names: A's name → B's, of those that differ.
        unused: rules of the user's that match nothing.
    """

    both: list[Pair] = field(default_factory=list)
    only_left: list[Atom] = field(default_factory=list)
    only_right: list[Atom] = field(default_factory=list)
    shapes: list[tuple[Atom, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


def pair_atoms(
    left: AtomicIndex,
    right: AtomicIndex,
    rules: Sequence[RuleSet] = (),
    wanted: Callable[[str, str], bool] = lambda name, state: True,
) -> Pairs:
    """Bring the atoms of two checkpoints together by name and state.

    Copies of parameters that have a master are left out. What only one side holds for several pipeline stages is held
    against the other's first; what is tied on one side only, against what it is tied to.

    Args:
        rules: the user's; their renames lead from A's names to B's.
        wanted: (name, state) → whether it is compared.

    Raises:
        MismatchError: parameters that the two cut differently, and nothing tells how; all in one message.
    """
    found = Pairs(names=_rename(left, right, rules))
    mine, theirs = _list_wanted(left, wanted), _list_wanted(right, wanted)
    keys = _match(mine, theirs, left, right, found.names)
    found.only_left = [atom for key, atom in mine.items() if key not in {a for a, _ in keys}]
    found.only_right = [atom for key, atom in theirs.items() if key not in {b for _, b in keys}]
    layouts = _settle_both(left, right, keys, rules)
    found.unused = layouts.unused
    for a, b in keys:
        name = a.name
        if name in layouts.wrong:
            found.shapes.append((left.atoms[a], layouts.wrong[name]))
        else:
            have, want = layouts.layouts[name]
            kept = have.local_shapes if name in layouts.kept else ()
            pair = Pair(make_whole(left.atoms[a], have), make_whole(right.atoms[b], want), layouts.vocab[name], kept)
            found.both.append(pair)
    return found


def _list_wanted(index: AtomicIndex, wanted: Callable[[str, str], bool]) -> dict[AtomKey, Atom]:
    return {key: atom for key, atom in index.atoms.items() if wanted(key.name, key.state) and not is_remade(key, index)}


def _rename(left: AtomicIndex, right: AtomicIndex, rules: Sequence[RuleSet]) -> dict[str, str]:
    """A's names → B's by the user's rules, where they lead to a name that B has."""
    renames = [rename for each in rules for rename in each.renames]
    live = {key.name for key in right.atoms}
    names = sorted({key.name for key in left.atoms})
    return {old: new for old, new in rename_names(names, renames, live).items() if old != new} if renames else {}


def _match(
    mine: Mapping[AtomKey, Atom],
    theirs: Mapping[AtomKey, Atom],
    left: AtomicIndex,
    right: AtomicIndex,
    names: Mapping[str, str],
) -> list[tuple[AtomKey, AtomKey]]:
    back = {new: old for old, new in names.items()}
    found = [(key, partner) for key in mine if (partner := _find_partner(key, right, names)) in theirs]
    met = {partner for _, partner in found}
    others = [(_find_partner(key, left, back), key) for key in theirs if key not in met]
    return [*found, *((partner, key) for partner, key in others if partner in mine)]


def _find_partner(key: AtomKey, index: AtomicIndex, names: Mapping[str, str]) -> AtomKey:
    """The other side's atom: of the same stage's instance, of the first one, or of what it is tied to."""
    name = names.get(key.name, key.name)
    candidates = [AtomKey(name, key.state, number) for number in (key.instance, 0)]
    candidates.append(AtomKey(index.resolve(name), key.state))
    return next((each for each in candidates if each in index.atoms), candidates[1])


@dataclass(slots=True)
class _Layouts:
    """Per name of A: both sides' layouts, the vocabulary, and what is wrong with the shapes."""

    layouts: dict[str, tuple[Layout, Layout]] = field(default_factory=dict)
    vocab: dict[str, int | None] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    wrong: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def take(self, settled: Settled) -> None:
        for name, (have, want) in settled.layouts.items():
            self.store(name, have, want or have, settled.patterns[name])

    def store(self, name: str, have: Layout, want: Layout, pattern: Pattern) -> None:
        self.layouts[name], self.vocab[name] = (have, want), pattern.vocab
        if isinstance(pattern, Kept):
            self.kept.add(name)
        else:
            self.kept.discard(name)


def _settle_both(
    left: AtomicIndex, right: AtomicIndex, keys: Iterable[tuple[AtomKey, AtomKey]], rules: Sequence[RuleSet]
) -> _Layouts:
    """Layouts of all names; alike on both sides, or by patterns."""
    keys = sorted(keys, key=lambda pair: _RANKS.get(pair[0].state, 1), reverse=True)  # the weights' shapes count
    source = {a.name: _local(left.atoms[a]) for a, _ in keys}
    target = {a.name: _local(right.atoms[b]) for a, b in keys}
    theirs = [replace(each, side="target") for each in list_rules(right, ())]
    both = [*list_rules(left, rules), *theirs]
    found = _Layouts()
    try:
        settled = settle(sorted(source), source, target, both, left.hints)
        found.take(settled)
        found.unused = settled.unused
    except MismatchError:
        _settle_each(found, source, target, both, left)
    alike = [name for name in sorted(found.layouts) if source[name] == target[name]]
    for index, own in ((left, list_rules(left, rules)), (right, list_rules(right, rules))):
        _refine(found, [name for name in alike if name in found.kept or found.vocab[name] is None], source, index, own)
    return found


_RANKS = {MASTER: 3, MODULE: 2, COPY: 0}


def _local(atom: Atom) -> tuple[Shape, ...]:
    return tuple(shard.shape for shard in atom.shards)


def _settle_each(found: _Layouts, source: Shapes, target: Shapes, rules: Sequence[RuleSet], left: AtomicIndex) -> None:
    """One parameter after the other: logical shapes that differ are a finding, unknown patterns an error."""
    unknown = []
    for name in sorted(source):
        try:
            found.take(settle([name], source, target, rules, left.hints))
        except MismatchError as error:
            sides = _find_logical(name, source, target, rules, left)
            if sides is None:
                unknown.append(name)
            else:
                found.wrong[name] = f"shape {sides[0]} ≠ {sides[1]}" if sides[0] != sides[1] else str(error)
    if unknown:
        settle(unknown, source, target, rules, left.hints)


def _find_logical(
    name: str, source: Shapes, target: Shapes, rules: Sequence[RuleSet], left: AtomicIndex
) -> tuple[Shape, Shape] | None:
    """Logical shapes of both sides, each taken for itself; None where they are not known."""
    try:
        have, want = (settle([name], side, None, rules, left.hints).layouts[name][0] for side in (source, target))
    except MismatchError:
        return None
    return have.shape, want.shape


def _refine(
    found: _Layouts, names: Sequence[str], shapes: Shapes, index: AtomicIndex, rules: Sequence[RuleSet]
) -> None:
    """What is cut alike on both sides needs no pattern; with one, places and padding rows can be told all the same."""
    for settled in _try_settle([name for name in names if name not in index.buffers], shapes, index, rules):
        for name, (have, _) in settled.layouts.items():
            if not have.replicated and have.claims is None:  # replicas are compared rank by rank
                found.store(name, have, have, settled.patterns[name])


def _try_settle(
    names: Sequence[str], shapes: Shapes, index: AtomicIndex, rules: Sequence[RuleSet]
) -> Iterator[Settled]:
    """Together, or one by one those that can be settled."""
    try:
        yield settle(names, shapes, None, rules, index.hints)
    except MismatchError:
        for name in names if len(names) > 1 else ():
            yield from _try_settle([name], shapes, index, rules)
