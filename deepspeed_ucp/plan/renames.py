"""Which saved parameters feed which live ones, by the user's ``rename`` rules: renamed, cut, joined, copied."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from ..atoms import AtomicIndex, GroupInfo
from ..errors import MismatchError, fold_names, shorten
from ..flat import Shape
from ..patterns import Facts, Rename, Rows, RuleSet, list_renames, rename_names
from .derive import DerivedParam, Slice, derive, divide, take, unite
from .settling import Shapes, list_weights, settle_index

_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)", re.ASCII)
_ADVICE = "docs/patterns.md tells what rules there are."
_NUMBERS = f'Give the numbers of this model under "variables". {_ADVICE}'

Ends = tuple[str, str]
"""A live name without an expert's number: what is in front of it, and behind."""


@dataclass(frozen=True, slots=True)
class RemappedIndex:
    """A checkpoint as the rules make it.

    Attributes:
        index: with the live parameters in the place of the saved ones that are cut, joined or copied into them.
        renamed: live name → name in the index, of those that rules do no more than rename.
        made: names in the index of what rules cut, join or copy.
        unfed: live parameters that nothing feeds, by the user's word.
        notes: what is copied and what is left out, in words.
    """

    index: AtomicIndex
    renamed: Mapping[str, str] = field(default_factory=dict)
    made: Set[str] = frozenset()
    unfed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def apply_renames(
    index: AtomicIndex,
    live: Shapes,
    rules: Sequence[RuleSet],
    aliases: Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
) -> RemappedIndex:
    """Carry out the ``rename`` rules.

    A rule counts where the live model does not have the saved names (of experts: with the saved shapes), so that one
    set of rules serves both directions, and a run that goes on under the names it has.

    Args:
        live: local shapes of what the live model holds, by tensor-parallel rank.
        rules: the user's.
        aliases: other names of what it holds.
        config: of the live model, where it is one of transformers.

    Raises:
        MismatchError: what a rule says does not fit the shapes, or the experts' numbers; it needs a number that nothing
            tells.
        ConfigError: a rule asks for what is not there.
    """
    renames = list_renames(rules)
    if not renames:
        return RemappedIndex(index)
    index = unite_cut(index, rules, live)
    saved = list_shapes(index)
    feeds = _Feeds(saved, live, replace(Facts.of(index.model.hints, saved), model=config or {}))
    for rule in renames:
        feeds.add(rule)
    feeds.join()
    if feeds.made or feeds.left:
        index = _unite_groups(derive(index, feeds.made, feeds.left), feeds.made.keys() - feeds.pieces.keys())
    renamed = find_renamed(list_names(index), {*live, *aliases}, renames)
    if renamed or feeds.made:
        for each in (each for each in rules if each.renames):
            each.check(feeds.facts)
    _refuse_transposed({new: (saved[old], live[new]) for new, old in renamed.items() if old in saved and new in live})
    return RemappedIndex(index, renamed, feeds.made.keys(), feeds.unfed, feeds.notes)


def _refuse_transposed(shapes: Mapping[str, tuple[tuple[Shape, ...], tuple[Shape, ...]]]) -> None:
    """Hold renamed matrices against the live ones.

    Args:
        shapes: by live name the saved local shapes, and the live ones.

    Raises:
        MismatchError: one is there with rows and columns exchanged.
    """
    odd = [
        f"{name} {theirs[0]}, saved {mine[0]}"
        for name, (mine, theirs) in shapes.items()
        if mine != theirs and len(mine) == len(theirs) == 1 and len(mine[0]) == 2 and mine[0][::-1] == theirs[0]
    ]
    if odd:
        raise MismatchError(
            f"rename: {shorten(odd)}: the model holds its matrices transposed, as Hugging Face's GPT-2 does (Conv1D); "
            "no rule transposes. Take a model of linear layers, such as GPTBigCode."
        )


def unite_cut(index: AtomicIndex, rules: Sequence[RuleSet], live: Collection[str] = ()) -> AtomicIndex:
    """The index with one shard of each parameter that ``rename`` rules cut or join by its rows.

    Args:
        rules: the user's.
        live: names that these leave alone.

    Raises:
        MismatchError: nothing tells how tensor parallelism has cut one of them, or it has not cut rows.
    """
    cuts = [rule for rule in list_renames(rules) if rule.cuts]
    several = (name for name, shapes in list_shapes(index).items() if len(shapes) > 1) if cuts else ()
    names = [name for name in several if name not in live and any(rule.match(name) is not None for rule in cuts)]
    if not names:
        return index
    settled = settle_index(index, rules, names=names).require()
    return unite(index, {name: have for name, (have, _) in settled.layouts.items()})


def find_renamed(saved: Set[str], live: Set[str], renames: Sequence[Rename]) -> dict[str, str]:
    """Live name → saved name, of the saved names that are not live and that rules give a live one."""
    return {new: old for old, new in rename_names(sorted(saved - live), renames, live).items() if new in live}


def list_renamed(index: AtomicIndex, live: Set[str], renames: Sequence[Rename]) -> set[str]:
    """Saved names that rules leave out, or give a live name."""
    saved = list_names(index)
    left = {name for rule in renames if rule.template is None for name in saved if rule.match(name) is not None}
    return left | set(find_renamed(saved, live, renames).values())


def list_names(index: AtomicIndex) -> set[str]:
    """All names that a checkpoint has."""
    return {param.name for param in index.stored.atoms.held} | set(index.model.aliases)


def list_shapes(index: AtomicIndex) -> Shapes:
    """Local shapes of the weights by tensor-parallel rank."""
    return {name: tuple(shard.shape for shard in atom.shards) for name, atom in list_weights(index).items()}


@dataclass
class _Feeds:
    """What feeds what, rule by rule.

    Attributes:
        saved, live: local shapes by tensor-parallel rank.
        facts: what rules may ask for.
        made: live parameters that are made of saved ones.
        left: saved parameters that are left out.
        joined: by live parameter, by (expert, part) the saved parameter, and of how many parts.
        pieces: by live parameter, by the number of its part what feeds it, and as which part.
        taken: by saved parameter which of its runs of rows, and of how many, feed something.
        copied: live parameters of which several are fed by the same saved one, which is told.
        passed: saved parameters that hold several experts, and the numbers of those that are left out.
        unfed: see :class:`RemappedIndex`.
    """

    saved: Shapes
    live: Shapes
    facts: Facts
    made: dict[str, DerivedParam] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    joined: dict[str, dict[tuple[int, int], tuple[str, int]]] = field(default_factory=lambda: defaultdict(dict))
    pieces: dict[str, dict[int, tuple[tuple[Slice, ...], Rows]]] = field(default_factory=lambda: defaultdict(dict))
    taken: dict[str, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    copied: dict[str, str] = field(default_factory=dict)
    passed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    unfed: frozenset[str] = frozenset()

    @property
    def notes(self) -> tuple[str, ...]:
        """What is out of the ordinary, in words."""
        copied = f"{_fold(self.copied)} are copies of {_fold(sorted(set(self.copied.values())))}"
        passed = {name: shorten(map(str, numbers)) for name, numbers in self.passed.items()}
        return (
            *([f"rename: {copied}, optimizer states included"] if self.copied else ()),
            *([f"rename: {_fold(sorted(self.left))} of the checkpoint are left out"] if self.left else ()),
            *(f"rename: of {name} experts {numbers} are left out" for name, numbers in passed.items()),
            *([f"rename: {_fold(sorted(self.unfed))} keep the new model's values"] if self.unfed else ()),
        )

    @cached_property
    def experts(self) -> dict[Ends, dict[int, str]]:
        """Live names by every number in them, and what surrounds it."""
        found: dict[Ends, dict[int, str]] = defaultdict(dict)
        for name in self.live:
            for number in _NUMBER.finditer(name):
                found[name[: number.start()], name[number.end() :]][int(number[0])] = name
        return found

    def add(self, rule: Rename) -> None:
        if rule.is_plain:
            return
        if None in (rule.pattern, rule.template):
            self._leave_out(rule)
            return
        if rule.cuts:
            self._note_pieces(rule)
            return
        families: dict[Ends, dict[int, Slice]] = defaultdict(dict)
        for name in sorted(self.saved):
            if rule.source:
                self._note_numbered(rule, name, families)
            elif (groups := rule.match(name)) is None:
                continue
            elif rule.joins:
                self._note_joined(rule, name, groups)
            elif name not in self.live:
                self._spread(rule, name, self.experts.get(rule.split(groups, name), {}))
        for ends, held in families.items():
            self._choose(rule, ends, held)

    def _note_numbered(self, rule: Rename, name: str, families: dict[Ends, dict[int, Slice]]) -> None:
        """The expert that a saved parameter is, or the experts in it, which to a rule are ``name.0``, ``name.1``, …"""
        groups, part, parts = rule.match(name), rule.part.number, rule.part.count
        if groups is not None:
            own = {rule.find_saved(groups): Slice(name, part, parts)}
        elif rule.counts_inside and (groups := rule.match(f"{name}.0")):
            count = next(iter(self.saved[name][0]), 0)
            own = {number: Slice(name, number * parts + part, count * parts) for number in range(count)}
        else:
            return
        held = families[rule.split(groups, name)]
        for number, piece in own.items():
            if held.setdefault(number, piece) != piece:
                raise MismatchError(
                    f"rename: {held[number].name} and {name} are both number {number} there. Let the rules "
                    f"match one of them. {_ADVICE}"
                )

    def _leave_out(self, rule: Rename) -> None:
        named = {name for name in self.saved if rule.match(name) is not None}
        named |= {name for name in self.live if rule.match_live(name)}
        found = sorted(name for name in named if self.saved.get(name) != self.live.get(name))
        self.left.update(name for name in found if name in self.saved)
        self.unfed |= {name for name in found if name in self.live}

    def _note_pieces(self, rule: Rename) -> None:
        """Rows of saved parameters that are live ones, or parts of them."""
        for name in sorted(self.saved.keys() - self.live.keys()):
            groups = rule.match(name)
            new = "" if groups is None else rule.fill(rule.template or "", groups, name)
            if new not in self.live:
                continue
            part, into = rule.measure(replace(self.facts, name=name))
            slices = self._take(name, part)
            other, _ = self.pieces[new].setdefault(into.number, (slices, into))
            if other != slices:
                raise MismatchError(
                    f"rename: {other[0].name} and {name} both feed part {into.number + 1} of {new}; one rule only may."
                )
            self.taken[name] += slices

    def _take(self, name: str, part: Rows) -> tuple[Slice, ...]:
        rows = next(iter(self.saved[name][0]), 0)
        if not rows or rows % part.runs:
            raise MismatchError(
                f"rename: {name} {self.saved[name][0]}: {rows} rows are not {part.blocks} blocks of parts "
                f"{list(part.parts)}. {_NUMBERS}"
            )
        return take(name, part)

    def _note_joined(self, rule: Rename, name: str, groups: Mapping[str, str]) -> None:
        new = rule.fill(rule.template or "", groups, name)
        if new in self.live and name not in self.live:
            key = int(groups["e"]), rule.part.number
            other, _ = self.joined[new].setdefault(key, (name, rule.part.count))
            if other != name:
                raise MismatchError(
                    f"rename: {other} and {name} both feed expert {key[0]} of {new}. Let the rules match one of them. "
                    f"{_ADVICE}"
                )

    def _spread(self, rule: Rename, name: str, experts: Mapping[int, str]) -> None:
        """One saved parameter feeds all experts: it is cut into them, or, of the size of one, copied."""
        if not experts:
            return
        number, parts = rule.part.number, rule.part.count
        whole, each = _count(self.saved[name]), _count(self.live[experts[min(experts)]])
        if whole == each and parts == 1:
            self._copy(dict.fromkeys(experts.values(), name))
            return
        if whole != each * len(experts) * parts or sorted(experts) != list(range(len(experts))):
            raise MismatchError(
                f"rename: {name} {self.saved[name][0]} has to be of the size of one expert of this model, "
                f"{experts[min(experts)]} {self.live[experts[min(experts)]][0]}, to be copied, or of all "
                f"{len(experts)}{f' with {parts} parts each' if parts > 1 else ''}, to be cut. {_ADVICE}"
            )
        for expert, new in experts.items():
            piece = Slice(name, expert * parts + number, len(experts) * parts)
            self._make(new, DerivedParam((piece,), len(self.live[new][0])))

    def _choose(self, rule: Rename, ends: Ends, held: Mapping[int, Slice]) -> None:
        """Every new expert names the saved one that feeds it."""
        # The live parameter that holds all experts of a family, one behind the other; empty where each has its own.
        name = ends[0].removesuffix(".")
        whole = name if name != ends[0] and not ends[1] and self.live.get(name, ((),))[0] else ""
        experts = dict.fromkeys(range(self.live[whole][0][0]), whole) if whole else self.experts.get(ends, {})
        names = {piece.name for piece in held.values()}
        if not experts or (names == set(experts.values()) and all(self.saved[n] == self.live[n] for n in names)):
            return
        chosen = {expert: rule.choose(expert) for expert in sorted(experts)}
        if lacking := sorted(set(chosen.values()) - held.keys()):
            new = next(experts[expert] for expert, number in chosen.items() if number == lacking[0])
            raise MismatchError(
                f"rename: {rule.pattern!r} lets the saved number {lacking[0]} feed {new}; there are {sorted(held)}."
            )
        self._check_tp_shards(rule, [*names, *experts.values()], fused=bool(whole) or len(names) < len(held))
        slices: dict[str, list[Slice]] = defaultdict(list)
        for expert, number in chosen.items():
            slices[experts[expert]].append(held[number])
        for new, own in slices.items():
            shape = self.live[new][0]
            self._make(new, DerivedParam(tuple(own), len(shape), shape[:1] if whole else ()))
        if len(set(chosen.values())) < len(chosen):
            news = {expert: f"{whole}.{expert}" if whole else experts[expert] for expert in chosen}
            olds = {number: f"{b.name}.{number}" if len(names) < len(held) else b.name for number, b in held.items()}
            self.copied.update({news[expert]: olds[number] for expert, number in chosen.items()})
        self._leave_numbers(held, held.keys() - set(chosen.values()))

    def _check_tp_shards(self, rule: Rename, names: Iterable[str], *, fused: bool) -> None:
        """Which dimension of several experts' parameter tensor parallelism cuts is not known here.

        Raises:
            MismatchError: it is cut.
        """
        cut = sorted({name for name in names if max(len(self.saved.get(name, ())), len(self.live.get(name, ()))) > 1})
        if fused and cut:
            raise MismatchError(
                f"rename: {rule.pattern!r} counts the experts in {_fold(cut)}, of which each tensor-parallel rank has "
                "a part: which experts these are is not known. Resume with the number of experts that was saved, or "
                "without tensor parallelism on both sides."
            )

    def _leave_numbers(self, held: Mapping[int, Slice], numbers: Collection[int]) -> None:
        used = {piece.name for number, piece in held.items() if number not in numbers}
        for number in sorted(numbers):
            if held[number].name in used:
                self.passed[held[number].name].append(number)
            else:
                self.left.add(held[number].name)

    def _copy(self, sources: Mapping[str, str]) -> None:
        """Live parameters that are saved ones as they are, several of them the same one."""
        for new, name in sources.items():
            self._make(new, DerivedParam.whole(name, self.saved[name][0]))
        if len(set(sources.values())) < len(sources):
            self.copied.update(sources)

    def join(self) -> None:
        """Make what several parameters, or parts of them, feed."""
        for new, experts in self.joined.items():
            self._join_experts(new, experts)
        for new, pieces in self.pieces.items():
            self._join_pieces(new, pieces)
        for name, slices in self.taken.items():
            self._refuse_remainder(name, slices)

    def _join_experts(self, new: str, held: Mapping[tuple[int, int], tuple[str, int]]) -> None:
        parts, experts = max(count for _, count in held.values()), 1 + max(expert for expert, _ in held)
        wanted = [(expert, part) for expert in range(experts) for part in range(parts)]
        if sorted(held) != wanted or any(count != parts for _, count in held.values()):
            raise MismatchError(
                f"rename: {new} is to be made of {_fold(name for name, _ in held.values())}: of {experts} experts "
                f"not each is there once, with all of its parts. {_ADVICE}"
            )
        names = [held[place][0] for place in wanted]
        dims, one = len(self.live[new][0]), len(self.saved[names[0]][0])
        self._make(new, DerivedParam(tuple(map(Slice, names)), dims, (experts,) if dims > one else ()))

    def _join_pieces(self, new: str, held: Mapping[int, tuple[tuple[Slice, ...], Rows]]) -> None:
        """In each block of the live parameter its parts follow each other."""
        named = _fold(slices[0].name for slices, _ in held.values())
        (form, *others) = {replace(into, number=0) for _, into in held.values()}
        if others or len(held) != len(form.parts):
            raise MismatchError(
                f"rename: {new} is to be made of {named}: not each of its {len(form.parts)} parts is fed, or rules "
                f"tell other parts or blocks of it. {_ADVICE}"
            )
        pieces = [held[number][0] for number in range(len(form.parts))]
        sizes = [self._count_rows(slices) for slices in pieces]
        unit = sum(sizes) // form.runs
        if sizes != [part * form.blocks * unit for part in form.parts]:
            raise MismatchError(
                f"rename: {new} is to be {form.blocks} blocks of parts {list(form.parts)}, and {named} feed them "
                f"{sizes} rows. {_NUMBERS}"
            )
        blocks = zip(*(divide(slices, form.blocks) for slices in pieces), strict=True)
        slices = tuple(each for block in blocks for piece in block for each in piece)
        self._make(new, DerivedParam(slices, len(self.saved[slices[0].name][0])))

    def _count_rows(self, slices: Iterable[Slice]) -> int:
        return sum(self.saved[piece.name][0][0] * piece.width // piece.count for piece in slices)

    def _refuse_remainder(self, name: str, slices: Iterable[Slice]) -> None:
        """Rows that feed nothing would be lost without a word.

        Raises:
            MismatchError: there are some.
        """
        rows, end = self.saved[name][0][0], 0
        spans = sorted((rows * p.number // p.count, rows * (p.number + p.width) // p.count) for p in slices)
        for low, high in (*spans, (rows, rows)):
            if low > end:
                raise MismatchError(
                    f"rename: rows [{end}, {low}) of {name} {self.saved[name][0]} feed nothing of this model: a part "
                    f"has no rule, or one that names no live parameter. {_ADVICE}"
                )
            end = max(end, high)

    def _make(self, new: str, made: DerivedParam) -> None:
        if self.made.setdefault(new, made) != made:
            raise MismatchError(
                f"rename: {made.slices[0].name} and {self.made[new].slices[0].name} both feed {new}; one rule only may."
            )
        here, tp_shards = self.live[new], range(len(self.saved[made.slices[0].name]))
        numels = (sum(prod(self.saved[p.name][at]) * p.width // p.count for p in made.slices) for at in tp_shards)
        shapes = tuple(map(made.find_shape, numels, self.saved[made.slices[0].name]))
        alike = set(here) == set(shapes)  # replicas of one that is whole
        if not alike and (_count(shapes) != _count(here) or len(shapes) == len(here)):
            raise MismatchError(
                f"rename: {new} {self.live[new][0]} cannot be made of {_fold([b.name for b in made.slices])} "
                f"{self.saved[made.slices[0].name][0]}, which makes {shapes[0]}. {_ADVICE}"
            )


def _count(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements on all tensor-parallel ranks together."""
    return sum(map(prod, shapes))


def _fold(names: Iterable[str]) -> str:
    folded = fold_names([(name, None) for name in dict.fromkeys(names)], lambda _: None)
    return shorten([name for name, _ in folded], 4)


def _unite_groups(index: AtomicIndex, made: Set[str]) -> AtomicIndex:
    """A group of experts alone goes into another one of the same hyper-parameters: here they may be in one."""
    groups: list[GroupInfo] = []
    for group in sorted(index.run.groups, key=lambda group: _is_made(group, made)):
        at = next((at for at, each in enumerate(groups) if _describe(each) == _describe(group)), len(groups))
        if _is_made(group, made) and at < len(groups):
            groups[at] = GroupInfo((*groups[at].members, *group.members), group.hyper)
        else:
            groups.append(group)
    return index.change(groups=tuple(groups))


def _describe(group: GroupInfo) -> dict[str, Any]:
    """Hyper-parameters of a group, which DeepSpeed gives names beside experts."""
    return {key: value for key, value in group.hyper.items() if key != "name"}


def _is_made(group: GroupInfo, made: Set[str]) -> bool:
    return all(member.name in made for member in group.members)
