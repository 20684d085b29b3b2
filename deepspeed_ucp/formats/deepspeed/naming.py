"""Name the positional optimizer states of stage 0 by matching live param groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ...errors import ConfigError, MismatchError, shorten
from ...model.flat import Shape
from ...model.storage import count, find_owner, strip_compiled
from .headers import FileHeader, ModelHeader, OptimHeader, Piece
from .module import find_all_ties, match_names, read_module
from .save import Save

GroupNames = Sequence[Sequence[tuple[str, bool]]]
"""(parameter name, owned by the optimizer) of each live param group, in the user's order."""

NamedGroups = str | Sequence[Sequence[str]]

FindRenames = Callable[[Set[str], Set[str]], Mapping[str, str]]
"""Called with saved and live names; returns live name → saved name for parameters that rules rename."""

MODULE_GROUP = "module"
"""The optimizer was given ``model.parameters()``, in one group."""

UNUSED = (
    "--groups is not used: only the optimizer states of stage 0 are saved without parameter names. Remove --groups."
)
"""Warning about groups for a checkpoint that needs none."""

CHANGING = ("lr", "initial_lr", "step", "params", "param_names")
"""Fields of a param group that differ between a saved and a fresh optimizer."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The live names for a stage-0 source, whose files name no parameters.

    Attributes:
        live: param groups of the live optimizer over all its ranks, in the order of a pipeline's layers.
        hyper: their hyper-parameters, which show whether they have the saved order.
        order: every name of the live module's parameters, in module order → first name of the same parameter.
        groups: the source's param groups if there is no live engine: ``"module"`` for ``model.parameters()`` in one
            group, or the names of each group's parameters in order.
        weights_only: the load does not take the optimizer's states.
        optimizer: False omits the optimizer's states; names then only identify a pipeline's tied modules.
        dual_pipe: the live pipeline has two stages on every rank (DualPipeV).
        keys: key in the live module's state dict → parameter or buffer, if they differ.
        list_recorded: returns the names in the live module's state dict, in its order.
        ep: degree ep of the live run (:class:`~deepspeed_ucp.model.topology.Topology`); ``live`` has the first rank's
            names in front. 0 if unknown.
    """

    live: GroupNames | None = None
    hyper: Sequence[Mapping[str, Any]] = ()
    order: Mapping[str, str] = field(default_factory=dict)
    groups: NamedGroups | None = None
    weights_only: bool = False
    optimizer: bool = True
    dual_pipe: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    rename: FindRenames = lambda saved, live: {}
    list_recorded: Callable[[], Iterable[str]] | None = None
    ep: int = 0

    def use_saved_names(self, save: Save) -> Naming:
        """Return the naming with the save's names: rename rules and ties are applied."""
        live = {strip_compiled(name) for group in self.live or () for name, _ in group}
        old = self.rename(_list_saved_names(save), live) if live else {}
        old = {name: old.get(name, name) for name in {*live, *self.order}}
        ties = find_all_ties(save, old.values()) if live and not save.is_pipeline else {}
        old = {name: new for name, saved in old.items() if (new := ties.get(saved, saved)) != name}
        if not old or self.live is None:
            return self
        named = [[(old.get(strip_compiled(name), name), owned) for name, owned in group] for group in self.live]
        order = {old.get(name, name): old.get(first, first) for name, first in self.order.items()}
        list_recorded = self.list_recorded
        renamed = list_recorded and (lambda: (old.get(name, name) for name in list_recorded()))
        return replace(self, live=named, order=order, list_recorded=renamed)


def _list_saved_names(save: Save) -> set[str]:
    named: list[Mapping[str, object]] = [{} if model.nested else model.module or {} for model in save.first_models]
    named += [header.layer or {} for files in save.further.values() for header in files.values()]
    pairs = [pair for files in save.layers for pair in files.items()]
    layers = (f"{layer}.{key}" for layer, header in pairs for key in header.layer or {})
    return {name for tensors in named for name in tensors}.union(layers)


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """The optimizer of one rank, with the names of its parameters.

    Attributes:
        header, optim: its file, and the optimizer's header in it.
        groups: names of the parameters of each saved group, in saved order.
        shapes: their local shapes.
        tensors: the model's tensors with their files.
        share: index among the ranks whose files hold different parameters of the model-parallel rank.
        fused: parameter → the whole model's parameters in it, with shapes, if it has several.
    """

    header: FileHeader
    optim: OptimHeader
    groups: list[tuple[str, ...]]
    shapes: Mapping[str, Shape]
    tensors: Mapping[str, tuple[FileHeader, Piece]]
    mp: int = 0
    share: int = 0
    fused: Mapping[str, Mapping[str, Shape]] = field(default_factory=dict)

    def list_parts(self, name: str) -> Mapping[str, Shape]:
        """Return the whole model's parameters in one of the rank's: itself, or several."""
        return self.fused.get(name) or {name: self.shapes[name]}

    @property
    def names(self) -> list[str]:
        """Names of all parameters, in saved order."""
        return [name for group in self.groups for name in group]

    def find_lost(self) -> set[str]:
        """Return the parameters without master whose model tensor is in no file."""
        if self.optim.traits.has_copies:
            return set()
        return {part for name in self.names for part in self.list_parts(name) if part not in self.tensors}


def name_groups(save: Save, groups: NamedGroups) -> list[list[tuple[str, bool]]]:
    """Convert the user's description of param groups to a live optimizer's form."""
    lists = [] if isinstance(groups, str) else groups
    if groups != MODULE_GROUP and (
        not lists or any(isinstance(names, str) or not all(isinstance(n, str) for n in names) for names in lists)
    ):
        expected = f'"{MODULE_GROUP}" or a list of lists of parameter names is needed'
        raise ConfigError(f"groups: {expected}, found {groups!r:.200}")
    if groups != MODULE_GROUP:
        return [[(strip_compiled(name), True) for name in names] for names in lists]
    if save.is_pipeline:
        raise MismatchError(
            "a pipeline's files do not say which of its layers are tied, so the order of its parameters is unknown. "
            "Give the names of each group as a list of lists.",
            path=save.path(save.main),
        )
    others = {*save.model(0).buffers, *save.model(0).shared, *find_all_ties(save, ())}
    dense = [name for name in read_module(save, save.main, ()) if name not in others]
    # DeepSpeed, or its ``split_params_into_different_moe_groups_for_optimizer``, takes these out of the group.
    further = [name for files in save.further.values() for header in files.values() for name in header.layer or {}]
    return [[(name, True) for name in names] for names in (dense, [*dict.fromkeys(further)]) if names]


def fit_groups(
    optim: OptimHeader, model: ModelHeader, shapes: Mapping[str, Shape], live: GroupNames | None, path: str
) -> list[tuple[str, ...]]:
    """Return the names of the parameters of each saved group, in saved order."""
    if optim.names is not None:
        if fits(optim.names, optim, shapes):
            return list(optim.names)
        if live is None:
            unknown = [name for name in chain.from_iterable(optim.names) if name not in shapes]
            text = (
                f"its param groups name other parameters than the model states: {shorten(unknown) or 'other numbers'}."
            )
            raise MismatchError(f"{text} Describe the groups with --groups.", path=path)
    for only_owned in (False, True):  # only some releases save frozen parameters in the groups
        named = pick_names(live or (), only_owned)
        # Wrappers omit parameters without elements on this tensor-parallel rank (fewer rows than ranks).
        nonempty = [tuple(name for name in group if count(shapes.get(name, (1,)))) for group in named]
        for names in (named, nonempty):
            if fits(names, optim, shapes):
                return names
    raise MismatchError(describe_misfit(optim, model, shapes, live or ()), path=path)


def pick_names(live: GroupNames, only_owned: bool) -> list[tuple[str, ...]]:
    """Return the live groups by atom names, with or without frozen parameters."""
    return [tuple(strip_compiled(name) for name, owned in group if owned or not only_owned) for group in live]


def describe_misfit(optim: OptimHeader, model: ModelHeader, shapes: Mapping[str, Shape], live: GroupNames) -> str:
    """Explain why live groups do not fit a saved optimizer's states."""
    names = [strip_compiled(name) for group in live for name, _ in group]
    missing = [name for name in names if name not in shapes]
    extra = [name for name in shapes if name not in {*names, *model.buffers}]
    if missing:
        also = f"; in the checkpoint, but in no group here: {shorten(extra)}" if extra else ""
        return f"the param groups and the checkpoint differ: not in the checkpoint: {shorten(missing)}{also}."
    groups = " | ".join(f"[{shorten([name for name, _ in group], 6)}]" for group in live)
    others = f" Parameters that are in no group here: {shorten(extra)}." if extra else ""
    return (
        f"the param groups differ. Checkpoint: groups of {group_sizes(optim)} "
        f"{'elements' if optim.traits.is_flat else 'parameters'}; here: "
        f"{groups}, or their shapes differ.{others} Stage 0 saves no parameter names, so the groups "
        "must be made as in the saved run; or load with load_optimizer_states=False."
    )


def check_order(part: NamedOptimizer, live: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse live groups or parameters in another order, unless the file names them."""
    if part.optim.names is not None and part.groups == [*part.optim.names]:
        return
    if len(part.optim.groups) == len(live):
        _check_group_order(part.optim.groups, live, path)
    if not part.optim.traits.is_flat and len(part.names) == len(part.optim.tensors):
        _check_state_shapes(part, path)


def _check_group_order(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse groups in another than the saved order, which equal shapes would hide."""
    keys = {key for group in (*saved, *live) for key in group} - set(CHANGING)
    shared = sorted(key for key in keys if all(key in group for group in (*saved, *live)))
    before, now = ([tuple(repr(group[key]) for key in shared) for group in groups] for groups in (saved, live))
    if before != now and sorted(before) == sorted(now):
        raise MismatchError(
            "this run's param groups have the saved groups' hyper-parameters in another order "
            f"({', '.join(shared)}). Stage 0 saves no parameter names, so make the groups in the saved order.",
            path=path,
        )


def _check_state_shapes(part: NamedOptimizer, path: str) -> None:
    """Refuse states whose shapes are those of the parameters in another order."""
    optim, names = part.optim, part.names
    known = {part.shapes[name] for name in names}
    for state in sorted({state for tensor in optim.tensors for state in tensor.states}):
        pairs = [(n, h.states[state].shape) for n, h in zip(names, optim.tensors, strict=True) if state in h.states]
        expected = [part.shapes[name] for name, _ in pairs]
        actual = [shape for _, shape in pairs]
        differing = [(name, shape) for name, shape in pairs if shape != part.shapes[name]]
        alike = [pair for pair in differing if count(pair[1]) == count(part.shapes[pair[0]]) > 1 and pair[1] in known]
        if differing and (alike or sorted(actual) == sorted(expected)):
            name, shape = (alike or differing)[0]
            raise MismatchError(
                f"{name} has shape {part.shapes[name]}, the {state} saved at its place has {shape}. Stage 0 "
                "saves no parameter names: the optimizer's parameters have another order here than in the saved run. "
                "Use the saved run's order.",
                path=path,
            )


def group_sizes(optim: OptimHeader) -> list[int]:
    """Return the number of elements (FP16_Optimizer) or parameters of each group."""
    if optim.traits.is_flat:
        return [master.numel for master in optim.masters]
    return [optim.owners.count(group) for group in range(len(optim.groups))]


def fits(named: Sequence[Sequence[str]], optim: OptimHeader, shapes: Mapping[str, Shape]) -> bool:
    """Return True if groups of names have the saved groups' sizes and masters' shapes."""
    sizes = group_sizes(optim)
    if len(named) != len(sizes) or any(name not in shapes for group in named for name in group):
        return False
    if optim.traits.is_flat:
        return sizes == [sum(count(shapes[name]) for name in group) for group in named]
    if sizes != [len(group) for group in named]:
        return False
    if optim.traits.has_copies:
        flat = [name for group in named for name in group]
        return all(m.shape == shapes[name] for m, name in zip(optim.masters, flat, strict=True))
    return True


# -- order of the modules ----------------------------------------------------------------------------------------------
#
# An optimizer usually has the module's order: model.parameters(), or groups filled in a loop over them. The order of
# the saved module's state dict therefore shows the order of a stage-0 optimizer's parameters.

Position = tuple[int, int]
"""(number of a parameter's unit, its place in the unit); the order among units is not compared."""

Positions = Mapping[str, Position]
"""Parameter → place."""

_LAST = (1 << 62, 0)


def number_names(names: Iterable[str], unit: Callable[[str], int] = lambda _: 0) -> dict[str, Position]:
    """Number names in their order.

    ``unit`` returns the number of a name's unit; default: all are in unit 0.
    """
    positions: dict[str, Position] = {}
    for index, name in enumerate(names):
        positions.setdefault(name, (unit(name), index))
    return positions


@dataclass(frozen=True, slots=True)
class ModuleOrder:
    """The orders of the parameters in the live and in the saved module.

    Attributes:
        path: of the file with the saved order.
        now: places in the live module.
        before: places in the saved module.
        shapes: parameter → shape in the saved module.
        pipeline: each layer's file orders only the layer's parameters.
        number_recorded: returns the places in the live module's state dict, whose order may differ.
        form: returns the name that has a parameter's place.
        apart: doubt about parameters in another unit than 0.
    """

    path: str
    now: Positions
    before: Positions
    shapes: Mapping[str, Shape]
    pipeline: bool = False
    number_recorded: Callable[[], Positions] | None = None
    form: Callable[[str], str] = str
    apart: str = ""

    def follow(self, groups: GroupNames, hyper: Sequence[Mapping[str, Any]]) -> GroupNames:
        """Return the live groups in the saved order; MismatchError if it is uncertain."""
        known = [self._list_known(group) for group in groups]
        moved = [names for names in known if self._is_moved(names, self.now)]
        swapped = [names for names in self._list_alike(known, hyper) if self._is_moved(names, self.now)]
        recorded = self.number_recorded() if self.number_recorded and (moved or swapped) else self.now
        if not any(self._is_moved(names, recorded) for names in (*moved, *swapped)):
            return groups
        if doubt := self._find_doubt(moved, swapped, recorded):
            names = (moved or swapped)[0]
            pair = zip(_sort_names(names, self.now), _sort_names(names, self.before), strict=True)
            one, other = next(both for both in pair if both[0] != both[1])
            raise MismatchError(
                f"this run's module defines its parameters in another order ({one} before {other}; in the "
                f"checkpoint behind it), and {doubt}. Stage 0 saves optimizer states by position, without names: "
                "define the modules in the saved order, or load with load_optimizer_states=False.",
                path=self.path,
            )
        pairs = zip(known, groups, strict=True)
        return [self._move(group, names) if names in moved else group for names, group in pairs]

    def keeps_module_order(self, group: Iterable[tuple[str, bool]]) -> bool:
        """Return True if a group of the live optimizer has the module's order."""
        units: dict[int, list[str]] = defaultdict(list)
        for name in self._list_known(group):
            units[self.now[name][0]].append(name)
        return all(map(self._has_live_order, units.values()))

    def _has_live_order(self, names: list[str]) -> bool:
        return names == _sort_names(names, self.now)

    def _find_doubt(self, moved: Sequence[list[str]], swapped: Sequence[list[str]], recorded: Positions) -> str:
        """Explain why the saved optimizer's order is uncertain; empty if it is certain."""
        affected = [name for names in (*moved, *swapped) for name in names]
        if _sort_names(affected, recorded) != _sort_names(affected, self.now):
            return "the model's state_dict has a different order, which hides the saved module's"
        if self.pipeline:
            return "their order in the optimizers of a pipeline's stages is not known"
        if swapped:
            return "param groups of the same sizes may have changed places as well"
        if any(self.now[name][0] for name in affected):
            return self.apart
        if not all(map(self._has_live_order, moved)):
            return "the optimizer has them in a different order"
        return ""

    def _list_known(self, group: Iterable[tuple[str, bool]]) -> list[str]:
        """Return a group's names, by their form, that have a place in both modules."""
        forms = dict.fromkeys(self.form(strip_compiled(name)) for name, _ in group)
        return [form for form in forms if form in self.now and form in self.before]

    def _list_alike(self, known: Sequence[list[str]], hyper: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Group the first parameters of groups with equal hyper-parameters and shapes."""
        alike: dict[tuple[str, str], list[str]] = defaultdict(list)
        for number, names in enumerate(known):
            fields = hyper[number] if number < len(hyper) else {}
            fixed = sorted((key, repr(value)) for key, value in fields.items() if key not in CHANGING)
            sizes = sorted(self.shapes[name] for name in names)
            alike[str(fixed), str(sizes)] += _sort_names(names, self.now)[:1]
        return list(alike.values())

    def _is_moved(self, names: list[str], positions: Positions) -> bool:
        return _sort_names(names, positions) != _sort_names(names, self.before)

    def _move(self, group: Sequence[tuple[str, bool]], names: list[str]) -> list[tuple[str, bool]]:
        """Return a group with the parameters ``names`` in the saved order."""
        items = {strip_compiled(item[0]): item for item in group}
        moved = dict(zip(names, _sort_names(names, self.before), strict=True))
        return [items[moved.get(name, name)] for name in items]


def _sort_names(names: Iterable[str], positions: Positions) -> list[str]:
    return sorted(names, key=lambda name: positions.get(name, _LAST))


def compare_modules(
    save: Save,
    naming: Naming,
    further: Mapping[str, Piece] | None = None,
    *,
    form: Callable[[str], str] = str,
    unit: Callable[[str], int] = lambda _: 0,
    apart: str = "",
) -> ModuleOrder:
    """Return the orders of the parameters in the live and in the saved module.

    ``further``: the saved module's tensors in other files; ``unit``: as in :func:`number_names`.
    """
    tensors = read_module(save, save.main, naming.order) | dict(further or {})
    before, live = number_names(map(form, tensors), unit), naming.order
    for name, first in live.items():  # a tied parameter has the place of the first of its names
        if (other := form(name)) in before:
            before[form(first)] = min(before.get(form(first), _LAST), before[other])
    shapes = {form(name): piece.shape for name, piece in tensors.items()}
    shapes |= {form(first): shapes[name] for name, first in live.items() if name in shapes}

    def number_recorded() -> Positions:
        names = [*naming.list_recorded()] if naming.list_recorded else []
        matched = match_names(names, set(live)) if save.model(0).nested else {}
        return number_names((form(matched.get(name, name)) for name in names), unit)

    now, recorded = number_names(map(form, live.values()), unit), number_recorded if naming.list_recorded else None
    return ModuleOrder(save.path(save.main), now, before, shapes, number_recorded=recorded, form=form, apart=apart)


def compare_layers(save: Save, naming: Naming, shapes: Mapping[str, Shape]) -> ModuleOrder:
    """Return the orders in a pipeline's layers; ``shapes`` are in the files' order."""
    owners: dict[str, int] = {}
    before = number_names(shapes, lambda name: owners.setdefault(find_owner(name), len(owners)))
    now = number_names(naming.order.values(), lambda name: owners.get(find_owner(name), -1))
    return ModuleOrder(save.path(save.main), now, before, shapes, pipeline=True)
