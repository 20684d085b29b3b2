"""Pair the atoms of two checkpoints, with the layouts of both sides' shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..extensions.rename import apply_renames
from ..io.cast import FLOATING
from ..model.index import AtomicIndex
from ..model.storage import COPY, MASTER, MODULE, WEIGHTS, Atom, AtomKey, ParamKey, count
from ..model.view import Shapes
from ..plan.settling import list_shapes, order_rules
from ..stream.full_tensors import FullTensor, assemble_full_tensor, is_remade
from ..tensor_parallel.kinds import SameShards
from ..tensor_parallel.layout import Shape
from ..tensor_parallel.rules import RuleSet
from ..tensor_parallel.settle import Settled, settle


@dataclass(frozen=True, slots=True)
class Pair:
    """One logical atom of two checkpoints.

    Attributes:
        left, right: full tensors of A and B. With ``shard_shapes`` both are concatenated shards.
        vocab: rows of a vocabulary without padding; None without known padding.
        shard_shapes: local shapes by tensor-parallel rank, if both sides are cut alike by an unknown pattern.
    """

    left: FullTensor
    right: FullTensor
    vocab: int | None = None
    shard_shapes: tuple[Shape, ...] = ()

    @property
    def rounded_to(self) -> str:
        """Type of a smaller weight to which the master is rounded, or an empty string."""
        master, weight = sorted((self.left, self.right), key=lambda side: side.atom.state != MASTER)
        is_pair = master.atom.state == MASTER != weight.atom.state and {master.dtype, weight.dtype} <= FLOATING
        return weight.dtype if is_pair and weight.itemsize < master.itemsize else ""

    @property
    def numel(self) -> int:
        """Number of common elements."""
        shape = self.left.shape
        rows = min(shape[0], self.right.shape[0]) if shape else 1
        return rows * count(shape[1:])

    @property
    def unpadded_numel(self) -> int:
        """Number of common elements before the padding."""
        return self.numel if self.vocab is None else min(self.vocab * count(self.left.shape[1:]), self.numel)

    def locate(self, position: int) -> tuple[tuple[int, ...], int | None]:
        """Return an element's logical index, or its index in a shard and the shard's rank."""
        for rank, shape in enumerate(self.shard_shapes):
            if position < count(shape):
                return _find_index(position, shape), rank
            position -= count(shape)
        return _find_index(position, self.left.shape), None


def _find_index(position: int, shape: Shape) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(position, shape)))


@dataclass(frozen=True, slots=True)
class Pairs:
    """The atoms of two checkpoints.

    Attributes:
        reshaped: (atom, description) of atoms with different logical shapes.
        names: A's name → B's name, if they differ.
    """

    both: list[Pair]
    only_left: list[Atom]
    only_right: list[Atom]
    reshaped: list[tuple[Atom, str]]
    names: dict[str, str]
    unused: list[str]

    def __bool__(self) -> bool:
        return bool(self.both or self.only_left or self.only_right or self.reshaped)


def pair_atoms(
    left: AtomicIndex, right: AtomicIndex, rules: Sequence[RuleSet], wanted: Callable[[str, str], bool]
) -> Pairs:
    """Pair the atoms of two checkpoints by name and state.

    Copies of parameters that have a master are left out. An instance that only one side has is compared with the other
    side's first one, and a parameter that is tied on one side with its owner. If one side has no masters, its weights
    are compared with the other side's masters. If it has weights alone, optimizer states are left out. An atom is
    ``wanted`` by any of its names in either checkpoint.
    """
    rules = [replace(rule, resizes=()) for rule in rules]  # another shape is a difference
    renamed = apply_renames(left, list_shapes(right), rules, right.aliases)
    names = {old: new for new, old in renamed.items()}
    weights_alone = left.is_weights_alone or right.is_weights_alone
    mine, theirs = _list_atoms(left, weights_alone), _list_atoms(right, weights_alone)
    lacks_masters = any(all(key.state != MASTER for key in atoms) for atoms in (mine, theirs))
    keys = _match_atoms(mine, theirs, left, right, names, lacks_masters)
    paired = {a for a, _ in keys}, {b for _, b in keys}
    chosen = _select_wanted(mine, left, wanted, lacks_masters), _select_wanted(theirs, right, wanted, lacks_masters)
    keys = [(a, b) for a, b in keys if a in chosen[0] or b in chosen[1]]
    first = dict(reversed(keys))  # a tensor of A that is tied may be two tensors in B, even of two shapes
    mismatched = dict.fromkeys((a, b) for a, b in keys if _list_shapes(theirs[b]) != _list_shapes(theirs[first[a]]))
    keys = [pair for pair in keys if pair not in mismatched]
    settled = _settle_both(left, right, keys, rules)
    layouts, both = settled.pairs, []
    for a, b in keys:
        if a.name not in settled.wrong:
            (have, want), pattern = layouts[a.name], settled.patterns[a.name]
            shapes = have.local_shapes if isinstance(pattern, SameShards) else ()
            both.append(
                Pair(assemble_full_tensor(mine[a], have), assemble_full_tensor(theirs[b], want), pattern.vocab, shapes)
            )
    return Pairs(
        both=both,
        only_left=[mine[key] for key in chosen[0] if key not in paired[0]],
        only_right=[theirs[key] for key in chosen[1] if key not in paired[1]],
        reshaped=[
            *((mine[a], settled.wrong[a.name]) for a, _ in keys if a.name in settled.wrong),
            *((theirs[b], f"another shape than {a.param}, to which A ties it") for a, b in mismatched),
        ],
        names=names,
        unused=settled.unused,
    )


def _list_atoms(index: AtomicIndex, weights_alone: bool) -> dict[AtomKey, Atom]:
    keys = (key for key in index.atoms if not is_remade(key, index) and (key.state in WEIGHTS or not weights_alone))
    return {key: index.atoms[key] for key in keys}


def _select_wanted(
    keys: Iterable[AtomKey], index: AtomicIndex, wanted: Callable[[str, str], bool], lacks_masters: bool
) -> dict[AtomKey, None]:
    """Return the wanted atoms; ``lacks_masters``: one of the sides has no masters."""
    names: dict[str, list[str]] = {}
    for alias, owner in index.aliases.items():
        names.setdefault(owner, []).append(alias)

    def is_wanted(key: AtomKey) -> bool:
        states = WEIGHTS if lacks_masters and key.state in WEIGHTS else (key.state,)
        return any(wanted(name, state) for name in (key.name, *names.get(key.name, ())) for state in states)

    return dict.fromkeys(filter(is_wanted, keys))


def _match_atoms(
    mine: Mapping[AtomKey, Atom],
    theirs: Mapping[AtomKey, Atom],
    left: AtomicIndex,
    right: AtomicIndex,
    names: Mapping[str, str],
    lacks_masters: bool,
) -> list[tuple[AtomKey, AtomKey]]:
    back = {new: old for old, new in names.items()}
    partners = [(key, partner) for key in mine if (partner := _find_partner(key, right, names, theirs, lacks_masters))]
    paired = {partner for _, partner in partners}
    others = [(_find_partner(key, left, back, mine, lacks_masters), key) for key in theirs if key not in paired]
    return [*partners, *((partner, key) for partner, key in others if partner)]


def _find_partner(
    key: AtomKey, index: AtomicIndex, names: Mapping[str, str], atoms: Mapping[AtomKey, Atom], lacks_masters: bool
) -> AtomKey | None:
    partners = list_partners(key.param, index, names)
    is_tied_there = partners[-1] != partners[1]  # FSDP saves a tied tensor twice, the second time without states
    is_any = key.state in WEIGHTS if lacks_masters else key.state == MODULE and is_tied_there
    states = WEIGHTS if is_any else (key.state,)
    keys = (AtomKey(param.name, state, param.instance) for param in partners for state in states)
    return next((candidate for candidate in keys if candidate in atoms), None)


def list_partners(param: ParamKey, index: AtomicIndex, names: Mapping[str, str]) -> tuple[ParamKey, ...]:
    """List a parameter's candidates in the other checkpoint, the best first."""
    name = names.get(param.name, param.name)
    return ParamKey(name, param.instance), ParamKey(name), ParamKey(index.resolve(name))


def _settle_both(
    left: AtomicIndex, right: AtomicIndex, keys: Iterable[tuple[AtomKey, AtomKey]], rules: Sequence[RuleSet]
) -> Settled:
    """Settle both layouts by A's names; ``wrong`` describes different logical shapes."""
    keys = sorted(keys, key=lambda pair: _RANKS.get(pair[0].state, 1))  # weights determine the shapes
    source = {a.name: _list_shapes(left.atoms[a]) for a, _ in keys}
    target = {a.name: _list_shapes(right.atoms[b]) for a, b in keys}
    theirs = [replace(rule, source="target") for rule in order_rules(right, ())]
    both = [*order_rules(left, rules), *theirs]
    settled = settle(sorted(source), source, target, both, left.hints, sides=("A", "B"))
    both_ways = replace(settled, open={}, wrong=_compare_shapes(settled, source, target, both, left))
    _refine(both_ways, source, target, left, order_rules(left, rules))
    _refine(both_ways, source, target, right, order_rules(right, rules))
    return both_ways


_RANKS = {MASTER: 3, MODULE: 2, COPY: 0}


def _list_shapes(atom: Atom) -> tuple[Shape, ...]:
    return tuple(shard.shape for shard in atom.shards)


def _compare_shapes(
    settled: Settled, source: Shapes, target: Shapes, rules: Sequence[RuleSet], left: AtomicIndex
) -> dict[str, str]:
    """Describe parameters with different known shapes: a difference, not an error."""
    names = sorted({*settled.open, *settled.wrong})
    mine, theirs = (settle(names, side, None, rules, left.hints).layouts for side in (source, target))
    wrong = {}
    for name in (name for name in names if name in mine and name in theirs):
        shapes = [side[name][0].shape for side in (mine, theirs)]
        why = settled.wrong.get(name) or settled.open[name].text
        wrong[name] = f"shape {shapes[0]} ≠ {shapes[1]}" if shapes[0] != shapes[1] else why
    unknown = {name: reason for name, reason in settled.open.items() if name not in wrong}
    contradicted = {name: text for name, text in settled.wrong.items() if name not in wrong}
    replace(settled, open=unknown, wrong=contradicted, reshaped={}).require()  # no resize rule applies
    return wrong


def _refine(refined: Settled, source: Shapes, target: Shapes, index: AtomicIndex, rules: Sequence[RuleSet]) -> None:
    """Settle equally cut parameters, in place, to locate elements and padding rows."""
    alike = [name for name in refined.layouts if source[name] == target[name] and name not in index.buffers]
    names = [
        name for name in alike if isinstance(refined.patterns[name], SameShards) or refined.patterns[name].vocab is None
    ]
    settled = settle(sorted(names), source, None, rules, index.hints)
    for name, (have, _) in settled.layouts.items():
        if not have.replicated and have.claims is None:  # replicas are compared rank by rank
            refined.layouts[name], refined.patterns[name] = (have, have), settled.patterns[name]
