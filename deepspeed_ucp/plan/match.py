"""Match live parameters and param groups with the saved ones that they continue."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import MismatchError, fold_names, shorten, suggest
from ..extensions.registry import find_for_names
from ..model.flat import Shape
from ..model.index import AtomicIndex
from ..model.storage import COPY, ITEMSIZE, MASTER, MODULE, Atom, ParamKey
from ..model.view import EngineView
from ..tensor_parallel.adapters import is_added
from ..tensor_parallel.kinds import advise_vocabulary
from ..tensor_parallel.resize import advise_resize
from ..tensor_parallel.rules import RuleSet, advise_family, find_resize

EXTRA, MISSING, SHAPE, COUNT = "extra", "missing", "shape", "count"
"""Kinds of faults: a name that the model lacks or the checkpoint lacks, another shape, another number of parameters."""

_EXAMPLES = 3


class Fault(NamedTuple):
    """A difference between model and checkpoint, which a lenient load may ignore.

    Attributes:
        name: the parameter's, or the common prefix of several.
        text: follows the name in the message.
        kind: EXTRA, MISSING, SHAPE or COUNT.
    """

    name: str
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name}{self.text}"


@dataclass(slots=True)
class Match:
    """Live parameters and groups with their saved counterparts, and the differences.

    Attributes:
        params: live name → the saved parameter; if several pipeline stages hold it, the copy for this stage.
        groups: live param group → the saved groups that it continues: one, or several (split groups of experts, or
            ``"param_groups": "live"``). Groups that continue none are left out.
        skipped: differences that a lenient load ignores.
        missing: live names that the checkpoint lacks, and whether they are trained.
        untouched: frozen parameters and buffers that the checkpoint lacks: a lenient load leaves them as they are.
        left_initial: tensors that keep their initial value because the source's converter dropped them.
        hyper: live param group → the hyper-parameters that it takes.
        notes: warnings about state that is restored differently.
        resized: live name → its difference, if only the number of rows differs: patterns decide if it is padding.
        resized_by_rule: live names of another shape than saved, for which the user has a ``resize`` rule.
        fault: an error message if the parameters cannot be matched, else empty.
    """

    params: dict[str, ParamKey] = field(default_factory=dict)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    skipped: list[Fault] = field(default_factory=list)
    missing: dict[str, bool] = field(default_factory=dict)
    untouched: list[str] = field(default_factory=list)
    left_initial: list[str] = field(default_factory=list)
    hyper: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resized: dict[str, Fault] = field(default_factory=dict)
    resized_by_rule: list[str] = field(default_factory=list)
    fault: str = ""

    @property
    def saved(self) -> dict[str, str]:
        """Live name → saved name."""
        return {live: param.name for live, param in self.params.items()}

    def require(self) -> Match:
        """Return this match; MismatchError if it has a fault."""
        if self.fault:
            raise MismatchError(self.fault)
        return self


@dataclass(slots=True)
class Adaptation:
    """A checkpoint and an engine that extensions adapt to each other before the match.

    Attributes:
        index: the checkpoint, with the engine's names and forms; parameters that ``rename`` rules match keep their
            saved names.
        module: the live module; None in a pipeline, whose ranks have different modules.
        log: whether this rank logs.
        saved: the checkpoint as it was saved.
        renamed: saved names to which ``rename`` rules give a live name.
        notes: warnings for all ranks.
    """

    index: AtomicIndex
    view: EngineView
    rules: Sequence[RuleSet]
    module: Any
    log: bool
    saved: AtomicIndex
    renamed: Set[str]
    notes: list[str] = field(default_factory=list)


def match_parameters(
    index: AtomicIndex, live: EngineView, *, strict: bool, with_states: bool, rules: Sequence[RuleSet] = ()
) -> Match:
    """Match live tensors with saved ones by name (ties resolved on both sides).

    Args:
        strict: refuse missing and extra names (as ``load_module_strict``).
        rules: the user's, for their ``resize`` rules.

    Returns:
        The match. Its ``fault`` lists other shapes (of tensors that are whole on both sides) and, if ``strict``,
        missing and extra names.
    """
    match = Match()
    shapes, thawed = _match_names(index, live, match, with_states=with_states, rules=rules)
    saved, extra = _note_extra(index, live, match)
    match.notes += [_describe_thawed(names, is_thawed) for is_thawed, names in thawed.items() if names]
    match.notes += _describe_untied(live, match)
    faults = [*_note_shapes(match, shapes), *_find_conflicts(live, match)]
    if saved and not match.params:
        match.fault = _describe_no_match(list(match.missing), extra)
        return match
    if not (faults or match.resized or match.skipped):
        return match
    skipped, remedies = match.skipped, ""
    for extension in find_for_names([*saved, *live.shapes]):
        skipped, remedy = extension.fold_faults(saved, live.shapes, skipped)
        remedies += remedy
    if strict:
        faults += skipped
    else:
        match.untouched = [name for name, is_trained in match.missing.items() if not is_trained]
        match.skipped = [fault for fault in match.skipped if fault.name not in match.untouched]
    if faults:
        match.fault = _describe_faults(match, faults, shapes)
        if strict and match.skipped:
            match.fault += _advise_rename(list(match.missing), extra) + _advise_missing(index, match)
        match.fault += remedies
    return match


def _match_names(
    index: AtomicIndex, live: EngineView, match: Match, *, with_states: bool, rules: Sequence[RuleSet]
) -> tuple[dict[str, tuple[Shape, Shape]], dict[bool, list[str]]]:
    """Find the saved tensor for each live one, and record it in ``match.params``.

    Returns:
        Live name → saved and live shape, if they differ without a rule for it. The names that are trained only here
        (True) or only in the saved run (False).
    """
    aliases: dict[str, list[str]] = defaultdict(list)
    for alias, name in live.aliases.items():
        aliases[name].append(alias)
    differing: dict[str, tuple[Shape, Shape]] = {}
    thawed: dict[bool, list[str]] = {True: [], False: []}
    owned = [(name, shapes, True) for name, shapes in live.owned.items()]
    unowned = [(name, shapes, False) for name, shapes in (live.unowned or {}).items()]
    orders = {is_trained: _order_states(is_trained, with_states) for is_trained in (True, False)}
    for name, shapes, is_trained in (*owned, *unowned):
        if name in live.declared_new:
            continue
        names = [live.renamed.get(other, other) for other in (name, *aliases.get(name, ()))]
        counterpart = _find(index, names, orders[is_trained])
        param = pick_instance(index, counterpart[0] if counterpart else name, *live.ordinals.get(name, (0, 1)))
        if param.instance and pick_weight(index, param, is_trained, with_states) is None:
            counterpart = None
        if counterpart is None:
            _note_missing(index, match, names, name, shapes[0], is_trained)
            continue
        saved, state, saved_shapes = counterpart
        if with_states and is_trained == (state == MODULE):
            thawed[is_trained].append(name)
        match.params[name] = param
        if len(shapes) == len(saved_shapes) == 1 and shapes != saved_shapes:
            if find_resize(rules, saved):
                match.resized_by_rule.append(name)
            else:
                differing[name] = saved_shapes[0], shapes[0]
    return differing, thawed


def _note_missing(
    index: AtomicIndex, match: Match, names: Sequence[str], name: str, shape: Shape, is_trained: bool
) -> None:
    """Add a tensor that the checkpoint lacks to one of the match's lists."""
    is_dropped = index.dropped and not any(index.find(index.resolve(other), MASTER) for other in names)
    if is_dropped and not is_trained:
        match.left_initial.append(name)
    elif names[0] in index.buffers:
        match.notes.append(f"{name}: a buffer that the saved state dict leaves out keeps the new model's value")
    else:
        match.skipped.append(Fault(name, f" {shape}: not in the checkpoint", MISSING))
        match.missing[name] = is_trained


def _note_extra(index: AtomicIndex, live: EngineView, match: Match) -> tuple[set[str], list[str]]:
    """Record the saved tensors that the model lacks in ``match.skipped``.

    Returns:
        The saved names without equal ties, and the extra ones.
    """
    # Without the optimizer's files, trained parameters only have copies.
    saved = index.atoms.list_names((MASTER, COPY) if live.unowned is None else (MASTER, COPY, MODULE))
    matched = match.saved
    # FSDP, and layer files of a pipeline stage, hold a tie twice without recording it.
    ties = {live.renamed.get(alias, alias): name for alias, name in live.aliases.items() if name in matched}
    ties = {alias: matched[name] for alias, name in ties.items() if not index.find(alias, MASTER)}
    same: dict[str, bool | None] = {}
    for alias in sorted(saved & ties.keys() - {*matched.values()}):
        other = pick_weight(index, ParamKey(alias), False, True)
        comparisons = {are_same(index, index.find(ties[alias], state), other) for state in (MASTER, MODULE, COPY)}
        same[alias] = next((is_same for is_same in (True, False) if is_same in comparisons), None)
    if unknown := [alias for alias, is_same in same.items() if is_same is None]:
        match.notes.append(f"{shorten(unknown)}: tied in the model to another name, whose saved values are used")
    saved -= {alias for alias, is_same in same.items() if is_same is not False}
    extra = sorted(saved - set(matched.values()))
    for name in extra:
        text = ": in the checkpoint, not in the model"
        if name in same:
            text = f": tied to {ties[name]} in the model, but saved with other values"
        match.skipped.append(Fault(name, text, EXTRA))
    return saved, extra


def _note_shapes(match: Match, shapes: Mapping[str, tuple[Shape, Shape]]) -> list[Fault]:
    """Return faults of differing shapes; record those of rows in ``match.resized``."""
    faults = []
    for name, (saved, live) in shapes.items():
        fault = Fault(name, f": shape {saved} in the checkpoint, {live} in the model", SHAPE)
        is_fused_experts = len(live) == 3  # [experts, …]: no vocabulary
        if len(saved) != len(live) or not live or saved[1:] != live[1:] or is_fused_experts:
            faults.append(fault)
        else:
            match.resized[name] = fault
    return faults


def _find_conflicts(live: EngineView, match: Match) -> Iterator[Fault]:
    """Yield faults of live tensors that take one saved tensor in different shapes."""
    shapes, first = live.shapes, dict[str, str]()
    for name, saved in match.saved.items():
        other = first.setdefault(saved, name)
        if shapes[name] != shapes[other]:
            yield Fault(name, f": shape {shapes[name][0]}, but {shapes[other][0]} of {other}; both take {saved}", SHAPE)


def _describe_faults(match: Match, faults: Sequence[Fault], shapes: Mapping[str, tuple[Shape, Shape]]) -> str:
    """Describe all faults and the remedy for shapes; empties ``match.resized``."""
    padded, listed = advise_vocabulary(match.resized), [*faults, *match.resized.values()]
    match.resized.clear()  # listed as faults: they need no pattern
    text = f"The model and the checkpoint differ: {list_faults(listed).removesuffix('.')}."
    if any(fault.kind == SHAPE for fault in listed):
        reshaped = {match.params[name].name: pair for name, pair in shapes.items()}
        text += f" Build the model with the sizes of the saved one.{advise_resize(reshaped)}{padded}"
    return text


def _advise_missing(index: AtomicIndex, match: Match) -> str:
    is_adapter = lacks_frozen(index) and match.missing and not any(match.missing.values())
    if not is_adapter or len(match.skipped) > len(match.missing):
        return " load_module_strict=False ignores missing and extra tensors: a missing one keeps the new model's value."
    return (
        " All missing ones are frozen here or buffers: the checkpoint was saved without them "
        "(exclude_frozen_parameters). If the model has them already, as from its pretrained weights, pass "
        "load_module_strict=False (Accelerate: load_state(folder, load_module_strict=False); Lightning: "
        "strict_loading = False in the module)."
    )


def list_faults(faults: Iterable[Fault]) -> str:
    """List faults by kind: all of up to three, else three examples and the total."""
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        kinds[fault.kind if fault.kind in (EXTRA, MISSING) else ""].append(fault)
    return "; ".join(map(_list_some, kinds.values()))


def _list_some(faults: Sequence[Fault]) -> str:
    if len(faults) <= _EXAMPLES:
        return ", ".join(map(str, faults))
    folded = [f"{name}{texts[0]}" for name, texts in fold_names([fault[:2] for fault in faults], str)]
    return f"{', '.join(folded[:_EXAMPLES])}, … ({len(faults)} in all)"


def _describe_no_match(missing: Sequence[str], saved: Sequence[str]) -> str:
    """Describe a checkpoint that has none of the model's names; every load refuses it."""
    advice = (
        (any(map(is_added, saved)) and _ADAPT)
        or _advise_rename(missing, saved)
        or advise_family(saved, set(missing))
        or (' Build the saved model, or map its names with "rename" rules in "patterns".')
    )
    return (
        f"No parameter of the model has a name that is in the checkpoint. Model: {shorten(missing, 3)}. "
        f"Checkpoint: {shorten(saved, 3)}.{advice}"
    )


_ADAPT = (
    " The checkpoint has an adapter of PEFT's, the model has none: give it one (get_peft_model), or write the adapter "
    "with `ds_ucp export --adapter`, merge it with PEFT's merge_and_unload and load the merged model."
)


def _describe_thawed(names: Sequence[str], thawed: bool) -> str:
    """Describe parameters that only this run (``thawed``) or the saved one trains."""
    listed, one = shorten(names, 3), len(names) == 1
    is_, was, rest = ("is", "was", "its weight is restored, its") if one else ("are", "were", "weights are restored,")
    if thawed:
        return f"{listed} {is_} trained here and {was} not trained in the saved run: {rest} states start from zero"
    return f"{listed} {was} trained in the saved run and {is_} not trained here: {rest} states are left out"


def _describe_untied(live: EngineView, match: Match) -> list[str]:
    """Describe trained parameters that were tied in the saved run and are not here."""
    taking: dict[ParamKey, list[str]] = defaultdict(list)
    for name, param in match.params.items():
        if name in live.owned:
            taking[param].append(name)
    untied = [" and ".join(names) for names in taking.values() if len(names) > 1]
    return [f"{shorten(untied)}: tied in the saved run and separate here; all take the saved values"] if untied else []


def _advise_rename(missing: Sequence[str], extra: Sequence[str]) -> str:
    """Suggest a rename rule for a common prefix, or a similar name, or nothing."""
    for name in missing[:1]:
        old = next((old for old in extra if name.endswith(f".{old}") or old.endswith(f".{name}")), "")
        cut, put = old[: max(len(old) - len(name), 0)], name[: max(len(name) - len(old), 0)]
        if old and all(put + other.removeprefix(cut) in missing for other in extra):
            rule = {"from": rf"{re.escape(cut)}(?P<rest>.*)", "to": f"{put}{{rest}}"}
            return f' Only a prefix differs, "{cut or put}": "patterns": {{"rename": [{json.dumps(rule)}]}}.'
        near = suggest(name, extra)
        return f" {name}: {near} A rename rule maps names (docs/patterns.md)." if near else ""
    return ""


def lacks_frozen(index: AtomicIndex) -> bool:
    """Return True if a checkpoint has no frozen tensors, as saves of adapters."""
    return not any(key.state == MODULE and key.name not in index.buffers for key in index.atoms)


def pick_instance(index: AtomicIndex, name: str, ordinal: int, total: int) -> ParamKey:
    """Pick the saved instance for a live stage by its number; the last takes the last.

    The first stage always takes the first; if there are fewer instances, further stages take the last.

    Args:
        ordinal, total: the live stage's place among the stages that hold the parameter, and their number.
    """
    copies = index.instances.get(name, 1)
    is_last = ordinal == total - 1 and ordinal > 0
    return ParamKey(name, copies - 1 if is_last else min(ordinal, copies - 1))


def _find(index: AtomicIndex, names: Sequence[str], order: Sequence[str]) -> tuple[str, str, tuple[Shape, ...]] | None:
    """Return a weight (saved name, first state in ``order``, local shapes), or None."""
    for name in map(index.resolve, names):
        shards = index.atoms.storages.get(ParamKey(name), ())
        for state in order:
            if shapes := tuple([shard.shape for shard in shards if state in shard.states]):
                return name, state, shapes
    return None


def pick_weight(index: AtomicIndex, param: ParamKey, wants_master: bool, with_states: bool) -> Atom | None:
    """Return a parameter's weight: the master with states, else the model's copy.

    DeepSpeed's load of the weights alone takes the model's as well: they may have been edited before the save. A
    trained parameter may start from a frozen one's weight and the other way round.
    """
    for state in _order_states(wants_master, with_states):
        if atom := index.find(param.name, state, param.instance):
            return atom
    return None


def _order_states(wants_master: bool, with_states: bool) -> tuple[str, ...]:
    if not wants_master:
        return (MODULE, COPY, MASTER)
    return (MASTER, MODULE) if with_states else (COPY, MASTER, MODULE)


def match_groups(
    index: AtomicIndex, members: Mapping[int, tuple[str, ...]], match: Match, *, keep_live: bool = False
) -> None:
    """Set ``groups`` and ``hyper``: the saved groups that this rank's groups continue.

    Parameters that were frozen in the saved run have no group there.

    Args:
        keep_live: live groups keep their hyper-parameters, however the saved run grouped its parameters.

    Raises:
        MismatchError: the groups are cut differently; both are listed.
    """
    if not index.groups:  # dropped by the source's converter: the live hyper-parameters stay
        return
    owner = {param: number for number, group in enumerate(index.groups) for param in group.members}
    taken: dict[int, int] = {}
    for number, names in members.items():
        saved = [match.params[name] for name in names if name in match.params]
        trained = [param for param in saved if param in owner or index.find(param.name, MASTER, param.instance)]
        sources = {owner.get(param, -1) for param in trained}
        if not sources:
            continue
        if keep_live:
            match.hyper[number] = _join_steps(index, sources)
            match.groups.update({number: groups} if (groups := tuple(sorted(sources - {-1}))) else {})
            continue
        hypers = [index.groups[source].hyper for source in sources if source >= 0]
        same = -1 not in sources and all(hyper == hypers[0] for hyper in hypers)
        same = same and any(extension.cuts_groups(names) for extension in find_for_names(names))
        if not same and (len(sources) != 1 or -1 in sources or taken.setdefault(min(sources), number) != number):
            live = {param: name for name, param in match.params.items()}
            named = [[live.get(param, param.name) for param in group.members] for group in index.groups]
            raise MismatchError(
                f"The optimizer's param groups differ from the checkpoint's. Checkpoint: {_list_groups(named)}. This "
                f"run: {_list_groups(members.values())}. "
                "Build the optimizer with the saved run's param groups (hyper-parameters may differ), or set "
                '"checkpoint": {"universal": {"param_groups": "live"}} to keep the groups of this run with their '
                "hyper-parameters, or load with load_optimizer_states=False."
            )
        match.groups[number] = tuple(sorted(sources))
        match.hyper[number] = index.groups[min(sources)].hyper


def _join_steps(index: AtomicIndex, groups: Iterable[int]) -> dict[str, Any]:
    """Return the groups' step (FusedAdam counts it); MismatchError if it differs."""
    saved = [index.groups[number].hyper for number in groups if number >= 0]
    steps = [hyper["step"] for hyper in saved if "step" in hyper]
    if any(step != steps[0] for step in steps):
        raise MismatchError(
            f"A param group of this run joins saved ones with different step counts ({shorten(map(str, steps))}), "
            "and can only continue from one. Use the param groups of the saved run, or load with "
            "load_optimizer_states=False."
        )
    return {"step": steps[0]} if steps else {}


def _list_groups(groups: Iterable[Sequence[str]]) -> str:
    return " | ".join(f"[{shorten(group, 6)}]" for group in groups if group)


Sums = list[tuple[int, ...]]
"""Fragments of an atom: shard, first element, elements, byte of the record, and the record's CRC32."""


def are_same(index: AtomicIndex, one: Atom | None, other: Atom | None) -> bool | None:
    """Compare the elements of two atoms by their CRC32s; None if that is not possible.

    It is possible if both are cut into the same fragments, in records without other bytes.
    """
    if one is None or other is None or one.dtype != other.dtype:
        return None
    if [shard.shape for shard in one.shards] != [shard.shape for shard in other.shards]:
        return None
    sums, others = _list_sums(index, one), _list_sums(index, other)
    if sums is None or others is None or [row[:-1] for row in sums] != [row[:-1] for row in others]:
        return None
    return sums == others


def _list_sums(index: AtomicIndex, atom: Atom) -> Sums | None:
    """Return an atom's fragments; None if a record has no CRC32 or other bytes too."""
    records, sums = index.records, Sums()
    covered = Counter[int]()
    for number, shard in enumerate(atom.shards):
        for part in shard.list_fragments(atom.state):
            crc = records[part.record].crc
            if crc is None:
                return None
            covered[part.record] += part.numel * ITEMSIZE[atom.dtype]
            sums.append((number, part.start, part.numel, part.offset, crc))
    return sums if all(records[number].nbytes == nbytes for number, nbytes in covered.items()) else None
