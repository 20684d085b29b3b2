"""Which saved parameter a live one takes its state from, and which saved param group a live group continues."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, ParamKey
from ..errors import MismatchError, shorten, suggest
from ..experts import is_expert
from ..flat import Shape
from ..patterns import RuleSet, advise_family, advise_resize, advise_vocabulary, find_resize
from ..patterns.adapters import is_added
from .counts import EXTRA, MISSING, SHAPE, ExpertCounts, Fault, list_faults
from .settling import Shapes
from .ties import are_same

FIRST = (0, 1)


@dataclass(slots=True)
class Match:
    """Live parameter → saved parameter, live group → saved group, and what a lenient load passes over.

    Attributes:
        params: live name → the saved parameter, of several pipeline stages' the one that this stage takes.
        groups: live param group → the saved ones with its parameters: one, of experts cut by size several, or
            as many as a group that keeps its own hyper-parameters joins; those without any are left out.
        skipped: what a lenient load passes over.
        untouched: frozen parameters and buffers that the checkpoint lacks: a lenient load leaves them as they are.
        kept: tensors that keep their fresh value, as the source's converter did not keep them.
        hyper: live param group → the hyper-parameters that it takes over.
        notes: what is restored otherwise than it was saved, in words.
        resized: live names with another number of rows than the saved: a vocabulary's padding, or a fault.
        ruled: live names of another shape than the saved, of which the user's ``resize`` rules tell.
        fault: what keeps the parameters from being matched, in words; empty where nothing does.
    """

    params: dict[str, ParamKey] = field(default_factory=dict)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    skipped: list[Fault] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    hyper: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resized: dict[str, Fault] = field(default_factory=dict)
    ruled: list[str] = field(default_factory=list)
    fault: str = ""

    @property
    def saved(self) -> dict[str, str]:
        """Live name → saved name."""
        return {live: param.name for live, param in self.params.items()}

    def require(self) -> Match:
        """Itself.

        Raises:
            MismatchError: its fault.
        """
        if self.fault:
            raise MismatchError(self.fault)
        return self


@dataclass(frozen=True, slots=True)
class TargetInventory:
    """What the live engine holds, all ranks together.

    Attributes:
        owned: parameters that the optimizer owns.
        extras: parameters without optimizer, and buffers; None leaves them out of the comparison.
        aliases: tied names → the name that holds the data.
        ordinals: for parameters that several pipeline stages hold, (this stage's place among them, how many).
        renamed: live name → the name that the checkpoint has for it, where they differ.
        counts: how many pipeline stages hold a parameter, of those that several do; of any stage.
        attributes: Megatron's attributes of the parameters.
        unfed: tensors that nothing feeds, by the user's word.
        info: the model's own ``universal_checkpoint_info``.
        tp: tensor-parallel degree.
        experts_over_tp: experts that are spread over the tensor-parallel ranks too, whole: they have one shard.
    """

    owned: Shapes = field(default_factory=dict)
    extras: Shapes | None = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ordinals: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unfed: frozenset[str] = frozenset()
    info: Mapping[str, Any] | None = None
    tp: int = 1
    experts_over_tp: Set[str] = frozenset()

    @property
    def shapes(self) -> Shapes:
        """Local shapes of all of it."""
        return {**(self.extras or {}), **self.owned}


def match_parameters(
    index: AtomicIndex, live: TargetInventory, *, strict: bool, with_states: bool, rules: Sequence[RuleSet] = ()
) -> Match:
    """Match live tensors with saved ones by name (ties resolved on both sides).

    Args:
        strict: refuse missing and extra names (as ``load_module_strict``).
        with_states: optimizer states are loaded as well.
        rules: the user's, of which those count that tell of other shapes.

    Returns:
        What is matched; its ``fault`` lists every parameter that is missing or extra, or of another shape where no
        tensor is cut.
    """
    matcher = _Matcher(index, live, strict, with_states, rules)
    for is_trained, shapes in ((True, live.owned), (False, live.extras or {})):
        for name in (name for name in shapes if name not in live.unfed):
            matcher.add(name, shapes[name], is_trained)
    matcher.finish()
    return matcher.match


@dataclass
class _Matcher:
    """Live tensors held against a checkpoint, one by one.

    Attributes:
        faults: shapes that differ.
        shapes: by saved name its shape and the live one's, where these differ without a rule that tells of it.
        missing: live names that the checkpoint lacks, and whether they are trained.
        swapped: names that are trained here (True) or were in the saved run (False), and not in the other one.
    """

    index: AtomicIndex
    live: TargetInventory
    strict: bool
    with_states: bool
    rules: Sequence[RuleSet] = ()
    match: Match = field(default_factory=Match)
    faults: list[Fault] = field(default_factory=list)
    shapes: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    missing: dict[str, bool] = field(default_factory=dict)
    swapped: dict[bool, list[str]] = field(default_factory=lambda: defaultdict(list))

    @cached_property
    def aliases(self) -> dict[str, list[str]]:
        """By name the others of the same tensor."""
        others: dict[str, list[str]] = defaultdict(list)
        for alias, name in self.live.aliases.items():
            others[name].append(alias)
        return others

    def add(self, name: str, shapes: tuple[Shape, ...], is_trained: bool) -> None:
        """Find what a live tensor takes its state from."""
        names = [self.live.renamed.get(each, each) for each in (name, *self.aliases.get(name, ()))]
        weight = _find(self.index, names, is_trained, self.with_states)
        if weight is None:
            self._pass_over(name, names, is_trained, shapes[0])
            return
        if self.with_states and is_trained == (weight.state == MODULE):
            self.swapped[is_trained].append(name)
        self.match.params[name] = pick_instance(self.index, weight.name, *self.live.ordinals.get(name, FIRST))
        if len(shapes) == len(weight.shapes) == 1 and shapes[0] != weight.shapes[0]:
            if find_resize(self.rules, weight.name):
                self.match.ruled.append(name)
            else:
                self.shapes[weight.name] = weight.shapes[0], shapes[0]
                self._note_shapes(name, weight.shapes[0], shapes[0])

    def _pass_over(self, name: str, names: Sequence[str], is_trained: bool, shape: Shape) -> None:
        """Note a tensor that the checkpoint does not hold: a fault, unless the save is known to have left it out."""
        index, match = self.index, self.match
        is_dropped = index.limits.dropped and not any(index.find(index.resolve(each), MASTER) for each in names)
        if is_dropped and not is_trained:
            match.kept.append(name)
        elif names[0] in index.model.buffers:
            match.notes.append(f"{name}: a buffer that the saved state dict leaves out keeps the new model's value")
        else:
            match.skipped.append(Fault(name, f" {shape}: not in the checkpoint", MISSING))
            self.missing[name] = is_trained

    def _note_shapes(self, name: str, saved: Shape, live: Shape) -> None:
        """A whole tensor of another shape; whether another number of rows is a fault, patterns have to tell."""
        fault = Fault(name, f": shape {saved} in the checkpoint, {live} in the model", SHAPE)
        if len(saved) != len(live) or not live or saved[1:] != live[1:] or len(live) == 3:
            self.faults.append(fault)
        else:
            self.match.resized[name] = fault

    def finish(self) -> None:
        """Compare all names, and tell what is at fault, or what a lenient load leaves as it is."""
        index, live, match = self.index, self.live, self.match
        # Where the optimizer's files are not there, trained parameters have copies alone.
        saved = index.stored.atoms.list_names((MASTER, COPY) if live.extras is None else (MASTER, COPY, MODULE))
        matched = match.saved
        # FSDP, and layer files of a pipeline stage, hold a tie twice, and nothing there tells that it is one.
        ties = {live.renamed.get(alias, alias): name for alias, name in live.aliases.items() if name in matched}
        ties = {alias: matched[name] for alias, name in ties.items() if not index.find(alias, MASTER)}
        same = {
            alias: self._are_same(alias, ties[alias]) for alias in sorted(saved & ties.keys() - {*matched.values()})
        }
        if index.is_weights_alone and (untold := [alias for alias, told in same.items() if told is None]):
            match.notes.append(f"{shorten(untold)}: tied here to another name, whose saved values count")
        saved -= {alias for alias, told in same.items() if told is not False}
        extra = sorted(saved - set(matched.values()))
        for name in extra:
            text = ": in the checkpoint, not in the model"
            if name in same:
                text = f": tied to {ties[name]} in the model, and of other values in the checkpoint"
            match.skipped.append(Fault(name, text, EXTRA))
        match.notes += [_describe_swap(names, thawed) for thawed, names in self.swapped.items()]
        if saved and not match.params:
            match.fault = _describe_foreign(list(self.missing), extra)
        elif self.faults or match.resized or match.skipped:
            self._judge(ExpertCounts.of(saved, live.shapes), extra)

    def _are_same(self, alias: str, name: str) -> bool | None:
        """Whether two saved tensors that are one here have the same values; None where nothing tells."""
        one, other = (pick_weight(self.index, ParamKey(each), True, True) for each in (name, alias))
        return are_same(self.index, one, other)

    def _judge(self, experts: ExpertCounts, extra: Sequence[str]) -> None:
        match, faults = self.match, self.faults
        if self.strict:
            faults += experts.fold(match.skipped)
        else:
            match.untouched = [name for name, is_trained in self.missing.items() if not is_trained]
            match.skipped = [each for each in match.skipped if each.name not in match.untouched]
        if not faults:
            return
        padded = advise_vocabulary(match.resized)
        faults += match.resized.values()
        match.resized.clear()  # listed: no pattern need be asked for
        hint = ""
        if any(each.kind == SHAPE for each in faults):
            hint += f" Build the model with the sizes of the saved one.{advise_resize(self.shapes)}{padded}"
        if self.strict and match.skipped:
            hint += _advise_rename(list(self.missing), extra) + self._advise_missing()
        if experts.differing:
            hint += " Resume with the number of experts that was saved."
        match.fault = f"The model and the checkpoint differ: {list_faults(faults).removesuffix('.')}.{hint}"

    def _advise_missing(self) -> str:
        """What to do where one side lacks names."""
        is_adapter = lacks_frozen(self.index) and self.missing and not any(self.missing.values())
        if not is_adapter or len(self.match.skipped) > len(self.missing):
            return (
                " load_module_strict=False passes missing and extra ones over: a missing one keeps the new model's "
                "value."
            )
        return (
            " All that are missing are frozen here or buffers: the checkpoint was saved without them "
            "(exclude_frozen_parameters). Where the model has them already, as from its pretrained weights, pass "
            "load_module_strict=False (Accelerate: load_state(folder, load_module_strict=False); Lightning: "
            "strict_loading = False in the module)."
        )


def _describe_foreign(missing: Sequence[str], saved: Sequence[str]) -> str:
    """Refused where it is not strict as well: the run would begin from scratch."""
    advice = (
        (any(map(is_added, saved)) and _ADAPT)
        or _advise_rename(missing, saved)
        or advise_family(saved, set(missing))
        or (' Build the saved model, or tell what has become of its names by "patterns" with "rename" rules.')
    )
    return (
        f"Nothing of the model is in the checkpoint by name. Model: {shorten(missing, 3)}. "
        f"Checkpoint: {shorten(saved, 3)}.{advice}"
    )


_ADAPT = (
    " The checkpoint has an adapter of PEFT's, the model has none: give it one (get_peft_model), or write the adapter "
    "with `ds_ucp export --adapter`, merge it with PEFT's merge_and_unload and load the merged model."
)


def _describe_swap(names: Sequence[str], thawed: bool) -> str:
    """Parameters that were thawed, or frozen, between the runs."""
    listed, one = shorten(names, 3), len(names) == 1
    is_, was, rest = ("is", "was", "its weight is restored, its") if one else ("are", "were", "weights are restored,")
    if thawed:
        return f"{listed} {is_} trained here and {was} not in the saved run: {rest} states begin anew"
    return f"{listed} {was} trained in the saved run and {is_} not here: {rest} states are left out"


def _advise_rename(missing: Sequence[str], extra: Sequence[str]) -> str:
    """Which rename rule would bring together what each side lacks; empty where none is seen."""
    for name in missing[:1]:
        old = next((old for old in extra if name.endswith(f".{old}") or old.endswith(f".{name}")), "")
        cut, put = old[: max(len(old) - len(name), 0)], name[: max(len(name) - len(old), 0)]
        if old and all(put + each.removeprefix(cut) in missing for each in extra):
            rule = {"from": rf"{re.escape(cut)}(?P<rest>.*)", "to": f"{put}{{rest}}"}
            return f' They have the same names but for "{cut or put}": "patterns": {{"rename": [{json.dumps(rule)}]}}.'
        near = suggest(name, extra)
        return f" {name}: {near} Rename rules bring other names together (docs/patterns.md)." if near else ""
    return ""


def lacks_frozen(index: AtomicIndex) -> bool:
    """Whether a checkpoint holds no frozen parameters at all, as saves of adapters."""
    return not any(key.state == MODULE and key.name not in index.model.buffers for key in index.stored.atoms)


def pick_instance(index: AtomicIndex, name: str, ordinal: int, total: int) -> ParamKey:
    """Which stage's copy a live stage takes: its own counterpart; the first stage takes the first, later ones the last.

    Args:
        name: of the parameter in the checkpoint.
        ordinal, total: the live stage's place among the stages that hold the parameter, and how many do.
    """
    copies = index.model.instances.get(name, 1)
    is_last = ordinal == total - 1 and ordinal > 0
    return ParamKey(name, copies - 1 if is_last else min(ordinal, copies - 1))


class _Found(NamedTuple):
    """A weight in the checkpoint: its atom's name and state, and local shapes; no atom is made of it."""

    name: str
    state: str
    shapes: tuple[Shape, ...]


def _find(index: AtomicIndex, names: Sequence[str], wants_master: bool, with_states: bool) -> _Found | None:
    order = _order_states(wants_master, with_states)
    for name in map(index.resolve, names):
        held = index.stored.atoms.held.get(ParamKey(name), ())
        for state in order:
            if shapes := tuple([each.shape for each in held if state in each.states]):
                return _Found(name, state, shapes)
    return None


def pick_weight(index: AtomicIndex, param: ParamKey, wants_master: bool, with_states: bool) -> Atom | None:
    """The atom that holds a parameter's weight: the master where optimizer states go on from it, else the module's.

    DeepSpeed's own load of the weights alone takes the module's as well: they may have been edited before the save.
    A trained parameter may start from a frozen one's weight and the other way round.
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
    """Find for each of this rank's param groups the saved one with its parameters; fills ``groups`` and ``hyper``.

    Parameters that were frozen in the saved run are in no group there.

    Args:
        keep_live: the live groups keep their hyper-parameters, however the saved run had grouped its parameters.

    Raises:
        MismatchError: the groups are cut differently; both are listed.
    """
    if not index.run.groups:  # not kept by the source's converter: the live hyper-parameters stay
        return
    owner = {param: number for number, group in enumerate(index.run.groups) for param in group.members}
    taken: dict[int, int] = {}
    for number, names in members.items():
        saved = [match.params[name] for name in names if name in match.params]
        trained = [param for param in saved if param in owner or index.find(param.name, MASTER, param.instance)]
        sources = {owner.get(param, -1) for param in trained}
        if not sources:
            continue
        if keep_live:
            match.hyper[number] = _join_steps(index, sources)
            match.groups.update({number: found} if (found := tuple(sorted(sources - {-1}))) else {})
            continue
        # Groups of experts are cut by size (``max_group_size``), so that their number changes with the topology.
        experts = all(map(is_expert, names)) and -1 not in sources
        same = experts and all(index.run.groups[each].hyper == index.run.groups[min(sources)].hyper for each in sources)
        if not same and (len(sources) != 1 or -1 in sources or taken.setdefault(min(sources), number) != number):
            raise MismatchError(
                "The optimizer's param groups differ from the checkpoint's. Checkpoint: "
                f"{_list_groups(_name_live(index, match))}. This run: "
                f"{_list_groups(members.values())}. "
                'Make the groups of the saved run (hyper-parameters may differ), or set "checkpoint": {"universal": '
                '{"param_groups": "live"}} to keep the groups of this run with their hyper-parameters, or load with '
                "load_optimizer_states=False."
            )
        match.groups[number] = tuple(sorted(sources))
        match.hyper[number] = index.run.groups[min(sources)].hyper


def _join_steps(index: AtomicIndex, groups: Iterable[int]) -> dict[str, Any]:
    """The step that some optimizers count in their param groups (DeepSpeed's FusedAdam).

    Raises:
        MismatchError: the groups do not agree about it.
    """
    saved = [index.run.groups[number].hyper for number in groups if number >= 0]
    steps = [hyper["step"] for hyper in saved if "step" in hyper]
    if any(step != steps[0] for step in steps):
        raise MismatchError(
            f"A param group of this run joins saved ones that were stepped {shorten(map(str, steps))} times: one step "
            "count cannot go on from them. Make the groups of the saved run, or load with load_optimizer_states=False."
        )
    return {"step": steps[0]} if steps else {}


def _name_live(index: AtomicIndex, match: Match) -> list[list[str]]:
    """The saved param groups, by this run's names where it has their parameters."""
    live = {param: name for name, param in match.params.items()}
    return [[live.get(param, param.name) for param in group.members] for group in index.run.groups]


def _list_groups(groups: Iterable[Sequence[str]]) -> str:
    return " | ".join(f"[{shorten(group, 6)}]" for group in groups if group)
