"""Which saved parameter a live one takes its state from, and which saved param group a live group continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex
from ..errors import MismatchError, shorten


@dataclass(slots=True)
class Match:
    """Live parameter → saved parameter, live group → saved group, and what a lenient load passes over."""

    names: dict[str, str] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def match_parameters(
    index: AtomicIndex,
    owned: Mapping[str, tuple[int, ...]],
    extras: Mapping[str, tuple[int, ...]] | None,
    aliases: Mapping[str, str],
    *,
    strict: bool,
    with_states: bool,
) -> Match:
    """Match live tensors with saved ones by name (ties resolved on both sides) and compare shapes.

    Args:
        owned: shapes of live parameters that the optimizer owns.
        extras: shapes of live parameters without optimizer, and buffers; None leaves them out of the comparison.
        aliases: live tied names → the name that holds the data.
        strict: refuse missing and extra names (as ``load_module_strict``).
        with_states: optimizer states are loaded as well, so that trained and frozen may not be swapped.

    Raises:
        MismatchError: listing every parameter that is missing, extra or of another shape.
    """
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    match, faults, taken = Match(), [], set()
    for name, shape, wants_master in _chain(owned, extras or {}):
        found = _find(index, (name, *others.get(name, ())), wants_master, with_states)
        if found is None:
            match.skipped.append(f"{name} {shape}: not in the checkpoint{_explain(index, name, wants_master)}")
            continue
        taken.add(found.name)
        match.names[name] = found.name
        if found.shape != shape:
            faults.append(f"{name}: shape {found.shape} in the checkpoint, {shape} in the model")
    compared = (MASTER,) if extras is None else (MASTER, MODULE)
    saved = {name for name, state in index.atoms if state in compared}
    for name in sorted(saved - taken):
        match.skipped.append(f"{name}: in the checkpoint, not in the model")
    if strict:
        faults += match.skipped
    if faults:
        hint = (
            "" if not strict or not match.skipped else " load_module_strict=False passes missing and extra ones over."
        )
        raise MismatchError(f"The model and the checkpoint differ: {shorten(faults, 20)}.{hint}".replace("..", "."))
    return match


def _chain(
    owned: Mapping[str, tuple[int, ...]], extras: Mapping[str, tuple[int, ...]]
) -> Iterable[tuple[str, tuple[int, ...], bool]]:
    yield from ((name, shape, True) for name, shape in owned.items())
    yield from ((name, shape, False) for name, shape in extras.items())


def _find(index: AtomicIndex, names: Sequence[str], wants_master: bool, with_states: bool) -> Atom | None:
    for name in names:
        atom = pick_weight(index, index.resolve(name), wants_master, with_states)
        if atom is not None:
            return atom
    return None


def pick_weight(index: AtomicIndex, name: str, wants_master: bool, with_states: bool) -> Atom | None:
    """The atom that holds a parameter's weight: the master for trained ones, the module's tensor for others.

    Without optimizer states a trained parameter may start from a frozen one's weight and the other way round.
    """
    order = (MASTER, MODULE, COPY) if wants_master else (MODULE, MASTER, COPY)
    for state in order[:1] if with_states else order:
        if (name, state) in index.atoms:
            return index.atoms[name, state]
    return None


def _explain(index: AtomicIndex, name: str, wants_master: bool) -> str:
    other = MODULE if wants_master else MASTER
    if (index.resolve(name), other) not in index.atoms:
        return ""
    return " as a trained parameter, there it is frozen" if wants_master else " as a frozen one, there it is trained"


def match_groups(index: AtomicIndex, members: Mapping[int, tuple[str, ...]], match: Match) -> None:
    """Find for each live param group the saved one with the same parameters; fills ``match.groups``.

    Raises:
        MismatchError: the groups are cut differently; both are listed.
    """
    owner = {name: number for number, group in enumerate(index.groups) for name in group.names}
    for number, names in members.items():
        saved = [match.names[name] for name in names if name in match.names]
        found = {owner.get(name, -1) for name in saved}
        if not saved:
            continue
        if len(found) != 1 or -1 in found or not _same_set(saved, index.groups[min(found)].names, match):
            raise MismatchError(
                "The optimizer's param groups differ from the checkpoint's. Checkpoint: "
                f"{_list_groups([group.names for group in index.groups])}. This run: {_list_groups(members.values())}. "
                "Make the groups of the saved run (hyper-parameters may differ), or load with "
                "load_optimizer_states=False."
            )
        match.groups[number] = min(found)


def _same_set(live: Sequence[str], saved: Sequence[str], match: Match) -> bool:
    known = set(match.names.values())
    return set(live) == {name for name in saved if name in known}


def _list_groups(groups: Iterable[Sequence[str]]) -> str:
    return " | ".join(f"[{shorten(group, 6)}]" for group in groups if group)
