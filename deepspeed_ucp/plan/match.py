"""Which saved parameter a live one takes its state from, and which saved param group a live group continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, ParamKey
from ..errors import MismatchError, shorten

Shape = tuple[int, ...]
Shapes = Mapping[str, tuple[Shape, ...]]
"""Per name the local shape on each tensor-parallel rank."""

FIRST = (0, 1)


@dataclass(slots=True)
class Match:
    """Live parameter → saved parameter, live group → saved group, and what a lenient load passes over.

    Attributes:
        params: live name → the saved parameter, of several pipeline stages' the one that this stage takes.
        groups: live param group → saved one.
        skipped: what a lenient load passes over.
        kept: tensors that keep their fresh value, as the source's converter did not keep them.
        resized: live names with another number of rows than the saved, in words: a vocabulary's padding, or a fault.
    """

    params: dict[str, ParamKey] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)

    @property
    def saved(self) -> dict[str, str]:
        """Live name → saved name."""
        return {live: param.name for live, param in self.params.items()}


@dataclass(frozen=True, slots=True)
class Live:
    """What the live engine holds, all ranks together.

    Attributes:
        owned: parameters that the optimizer owns.
        extras: parameters without optimizer, and buffers; None leaves them out of the comparison.
        aliases: tied names → the name that holds the data.
        ordinals: for parameters that several pipeline stages hold, (this stage's place among them, how many).
        renamed: live name → the name that the checkpoint has for it, where they differ.
    """

    owned: Shapes
    extras: Shapes | None
    aliases: Mapping[str, str] = field(default_factory=dict)
    ordinals: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


def match_parameters(index: AtomicIndex, live: Live, *, strict: bool, with_states: bool) -> Match:
    """Match live tensors with saved ones by name (ties resolved on both sides).

    Args:
        strict: refuse missing and extra names (as ``load_module_strict``).
        with_states: optimizer states are loaded as well, so that trained and frozen may not be swapped.

    Raises:
        MismatchError: listing every parameter that is missing or extra; or of another shape, where no tensor is cut.
    """
    others: dict[str, list[str]] = {}
    for alias, name in live.aliases.items():
        others.setdefault(name, []).append(alias)
    match, faults = Match(), []
    for name, shapes, wants_master in _chain(live.owned, live.extras or {}):
        names = [live.renamed.get(each, each) for each in (name, *others.get(name, ()))]
        found = _find(index, names, wants_master, with_states)
        if found is None and not wants_master and _is_dropped(index, names):
            match.kept.append(name)
            continue
        if found is None:
            match.skipped.append(f"{name} {shapes[0]}: not in the checkpoint{_explain(index, names[0], wants_master)}")
            continue
        match.params[name] = pick_instance(index, found.name, *live.ordinals.get(name, FIRST))
        if len(shapes) == len(found.shards) == 1:
            faults += _compare_shapes(match, name, found.shape, shapes[0])
    compared = (MASTER,) if live.extras is None else (MASTER, MODULE)
    matched = match.saved
    saved = {key.name for key in index.atoms if key.state in compared}
    # Layer files hold a tie inside a pipeline stage twice, and nothing there tells that it is one.
    saved -= {alias for alias, name in live.aliases.items() if name in matched and not index.find(alias, MASTER)}
    for name in sorted(saved - set(matched.values())):
        match.skipped.append(f"{name}: in the checkpoint, not in the model")
    if strict:
        faults += match.skipped
    if faults:
        faults += match.resized.values()
        hint = (
            "" if not strict or not match.skipped else " load_module_strict=False passes missing and extra ones over."
        )
        raise MismatchError(f"The model and the checkpoint differ: {shorten(faults, 20)}.{hint}".replace("..", "."))
    return match


def _compare_shapes(match: Match, name: str, saved: Shape, live: Shape) -> list[str]:
    """What is wrong with a whole tensor's shape; whether another number of rows is, patterns have to tell."""
    told = f"{name}: shape {saved} in the checkpoint, {live} in the model"
    if len(saved) == len(live) > 0 and saved[1:] == live[1:]:
        match.resized.update({name: told} if saved != live else {})
        return []
    return [told] if saved != live else []


def _is_dropped(index: AtomicIndex, names: Sequence[str]) -> bool:
    """Whether a buffer or frozen parameter is one that the source's converter left out."""
    return bool(index.dropped) and not any(index.find(index.resolve(name), MASTER) for name in names)


def pick_instance(index: AtomicIndex, name: str, ordinal: int, total: int) -> ParamKey:
    """Which stage's copy a live stage takes: its own counterpart; the first stage takes the first, later ones the last.

    Args:
        name: of the parameter in the checkpoint.
        ordinal, total: the live stage's place among the stages that hold the parameter, and how many do.
    """
    copies = index.instances.get(name, 1)
    is_last = ordinal == total - 1 and ordinal > 0
    return ParamKey(name, copies - 1 if is_last else min(ordinal, copies - 1))


def _chain(owned: Shapes, extras: Shapes) -> Iterable[tuple[str, tuple[Shape, ...], bool]]:
    yield from ((name, shapes, True) for name, shapes in owned.items())
    yield from ((name, shapes, False) for name, shapes in extras.items())


def _find(index: AtomicIndex, names: Sequence[str], wants_master: bool, with_states: bool) -> Atom | None:
    for name in names:
        atom = pick_weight(index, ParamKey(index.resolve(name)), wants_master, with_states)
        if atom is not None:
            return atom
    return None


def pick_weight(index: AtomicIndex, param: ParamKey, wants_master: bool, with_states: bool) -> Atom | None:
    """The atom that holds a parameter's weight: the master for trained ones, the module's tensor for others.

    Without optimizer states a trained parameter may start from a frozen one's weight and the other way round.
    """
    order = (MASTER, MODULE, COPY) if wants_master else (MODULE, MASTER, COPY)
    for state in order[:1] if with_states else order:
        if atom := index.find(param.name, state, param.instance):
            return atom
    return None


def _explain(index: AtomicIndex, name: str, wants_master: bool) -> str:
    other = MODULE if wants_master else MASTER
    if not index.find(index.resolve(name), other):
        return ""
    return " as a trained parameter, there it is frozen" if wants_master else " as a frozen one, there it is trained"


def match_groups(index: AtomicIndex, members: Mapping[int, tuple[str, ...]], match: Match) -> None:
    """Find for each of this rank's param groups the saved one with its parameters; fills ``match.groups``.

    Raises:
        MismatchError: the groups are cut differently; both are listed.
    """
    if not index.groups:  # not kept by the source's converter: the live hyper-parameters stay
        return
    owner = {param: number for number, group in enumerate(index.groups) for param in group.members}
    taken: dict[int, int] = {}
    for number, names in members.items():
        saved = [match.params[name] for name in names if name in match.params]
        found = {owner.get(param, -1) for param in saved}
        if not saved:
            continue
        if len(found) != 1 or -1 in found or taken.setdefault(min(found), number) != number:
            raise MismatchError(
                "The optimizer's param groups differ from the checkpoint's. Checkpoint: "
                f"{_list_groups([group.names for group in index.groups])}. This run: {_list_groups(members.values())}. "
                "Make the groups of the saved run (hyper-parameters may differ), or load with "
                "load_optimizer_states=False."
            )
        match.groups[number] = min(found)


def _list_groups(groups: Iterable[Sequence[str]]) -> str:
    return " | ".join(f"[{shorten(group, 6)}]" for group in groups if group)
