"""Names the positional optimizer states of stage 0 by live param groups that match sizes and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import ConfigError, MismatchError, shorten
from ...model import count, strip_compiled
from .headers import FileHeader, ModelHeader, OptimHeader, Piece, Shape
from .module import find_all_ties, read_module
from .save import Save

GroupNames = Sequence[Sequence[tuple[str, bool]]]
"""(parameter name, owned by the optimizer) of each live param group, in the user's order."""

NamedGroups = str | Sequence[Sequence[str]]

Rename = Callable[[Set[str], Set[str]], Mapping[str, str]]
"""Called with saved and live names; returns live name → saved name for parameters that rules rename."""

MODULE_GROUP = "module"
"""The optimizer was given ``model.parameters()``, in one group."""

CHANGING = ("lr", "initial_lr", "step", "params", "param_names")
"""Fields of a param group that differ between a saved and a fresh optimizer."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The live names for a stage-0 source, whose files name no parameters.

    Attributes:
        live: param groups of the live optimizer over all its ranks, in the order of a pipeline's layers.
        hyper: their hyper-parameters, which show whether they have the saved order.
        groups: the source's param groups if there is no live engine: ``"module"`` for ``model.parameters()`` in one
            group, or the names of each group's parameters in order.
        weights_only: the load does not take the optimizer's states.
        optimizer: False omits the optimizer's states; names then only identify a pipeline's tied modules.
        dual: the live pipeline has two stages on every rank (DualPipeV).
        keys: key in the live module's state dict → parameter or buffer, if they differ.
        rename: see :data:`Rename`.
        order: every name of the live module's parameters, in module order → first name of the same parameter.
        record: returns the names in the live module's state dict, in its order.
        ep: expert-parallel ranks of the live run; ``live`` has the first rank's names in front. 0 if unknown.
    """

    live: GroupNames | None = None
    hyper: Sequence[Mapping[str, Any]] = ()
    groups: NamedGroups | None = None
    weights_only: bool = False
    optimizer: bool = True
    dual: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    rename: Rename = lambda saved, live: {}
    order: Mapping[str, str] = field(default_factory=dict)
    record: Callable[[], Iterable[str]] | None = None
    ep: int = 0

    def translate(self, save: Save) -> Naming:
        """Return the naming with the files' names; a tied parameter gets the name that its optimizer had."""
        live = {strip_compiled(name) for group in self.live or () for name, _ in group}
        old = self.rename(_list_names(save), live) if live else {}
        old = {name: old.get(name, name) for name in {*live, *self.order}}
        ties = find_all_ties(save, old.values()) if live and not save.is_pipeline else {}
        old = {name: new for name, saved in old.items() if (new := ties.get(saved, saved)) != name}
        if not old or self.live is None:
            return self
        named = [[(old.get(strip_compiled(name), name), owned) for name, owned in group] for group in self.live]
        order = {old.get(name, name): old.get(first, first) for name, first in self.order.items()}
        record = self.record
        renamed = record and (lambda: (old.get(name, name) for name in record()))
        return replace(self, live=named, order=order, record=renamed)


def _list_names(save: Save) -> set[str]:
    """List the names of all tensors in the files, except those of a pipeline's tied modules, which have none."""
    named: list[Mapping[str, object]] = [{} if model.nested else model.module or {} for model in save.first_models]
    named += [header.layer or {} for header in save.experts.values()]
    layers = (f"{layer}.{key}" for held in save.layers for layer, header in held.items() for key in header.layer or {})
    return {name for tensors in named for name in tensors}.union(layers)


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """The optimizer of one rank, with the names of its parameters.

    Attributes:
        header, optim: its file, and the optimizer's header in it.
        groups: names of the parameters of each saved group, in saved order.
        shapes: their local shapes.
        tensors: the model's tensors with their files.
        mp, ep: model-parallel and expert-parallel rank.
        fused: fused parameter → the experts in it, with shapes.
    """

    header: FileHeader
    optim: OptimHeader
    groups: list[tuple[str, ...]]
    shapes: Mapping[str, Shape]
    tensors: Mapping[str, tuple[FileHeader, Piece]]
    mp: int = 0
    ep: int = 0
    fused: Mapping[str, Mapping[str, Shape]] = field(default_factory=dict)

    def list_parts(self, name: str) -> Mapping[str, Shape]:
        """Return the whole model's parameters in one of the rank's: itself, or the experts in it."""
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
    """Convert the param groups that the user describes to the form of a live optimizer's.

    Raises:
        ConfigError: neither ``"module"`` nor a list of lists of names.
        MismatchError: ``"module"`` for a pipeline, whose files do not record the names of tied layers.
    """
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
    # DeepSpeed, or its ``split_params_into_different_moe_groups_for_optimizer``, takes experts out of the group.
    experts = dict.fromkeys(name for _, header in sorted(save.experts.items()) for name in header.layer or {})
    return [[(name, True) for name in names] for names in (dense, list(experts)) if names]


def fit_groups(
    optim: OptimHeader, model: ModelHeader, shapes: Mapping[str, Shape], live: GroupNames | None, path: str
) -> list[tuple[str, ...]]:
    """Return the names of the parameters of each saved group, in saved order.

    Raises:
        MismatchError: the live groups do not fit.
    """
    if optim.names is not None:
        return list(optim.names)
    for only_owned in (False, True):
        named = pick_names(live or (), only_owned)
        # Wrappers omit parameters without elements on this tensor-parallel rank (fewer rows than ranks).
        held = [tuple(name for name in group if count(shapes.get(name, (1,)))) for group in named]
        for names in (named, held):
            if fits(names, optim, shapes):
                return names
    raise MismatchError(describe_misfit(optim, model, shapes, live or ()), path=path)


def pick_names(live: GroupNames, only_owned: bool) -> list[tuple[str, ...]]:
    """Return the live groups by atom names; saved groups contain frozen parameters only in some releases."""
    return [tuple(strip_compiled(name) for name, owned in group if owned or not only_owned) for group in live]


def describe_misfit(optim: OptimHeader, model: ModelHeader, shapes: Mapping[str, Shape], live: GroupNames) -> str:
    """Explain why live groups do not fit a saved optimizer's states."""
    names = [strip_compiled(name) for group in live for name, _ in group]
    missing = [name for name in names if name not in shapes]
    extra = [name for name in shapes if name not in {*names, *model.buffers}]
    if missing:
        also = f"; in the checkpoint, not in this run's optimizer: {shorten(extra)}" if extra else ""
        return f"the model and the checkpoint differ: not in the checkpoint: {shorten(missing)}{also}."
    groups = " | ".join(f"[{shorten([name for name, _ in group], 6)}]" for group in live)
    others = f" Parameters that are in no group here: {shorten(extra)}." if extra else ""
    return (
        f"the param groups differ. Checkpoint: groups of {group_sizes(optim)} "
        f"{'elements' if optim.traits.is_flat else 'parameters'}; this run: "
        f"{groups}, or their shapes differ.{others} Stage 0 saves no parameter names, so the groups "
        "must be made as in the saved run; or load with load_optimizer_states=False."
    )


def check_group_order(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse groups in another order than the saved ones, as equal shapes would hide it.

    Raises:
        MismatchError: the groups have the saved hyper-parameters, permuted.
    """
    if len(saved) != len(live):
        return
    keys = {key for group in (*saved, *live) for key in group} - set(CHANGING)
    shared = sorted(key for key in keys if all(key in group for group in (*saved, *live)))
    before, now = ([tuple(repr(group[key]) for key in shared) for group in groups] for groups in (saved, live))
    if before != now and sorted(before) == sorted(now):
        raise MismatchError(
            "this run's param groups have the saved groups' hyper-parameters in another order "
            f"({', '.join(shared)}). Stage 0 saves no parameter names, so make the groups in the saved order.",
            path=path,
        )


def check_state_shapes(part: NamedOptimizer, path: str) -> None:
    """Refuse states whose shapes are those of the parameters in another order.

    Raises:
        MismatchError: names the first parameter whose states have another shape.
    """
    optim, names = part.optim, part.names
    if optim.traits.is_flat or len(names) != len(optim.tensors):
        return
    for state in sorted({state for held in optim.tensors for state in held.states}):
        pairs = [(n, h.states[state].shape) for n, h in zip(names, optim.tensors, strict=True) if state in h.states]
        expected = [part.shapes[name] for name, _ in pairs]
        found = [shape for _, shape in pairs]
        if found != expected and sorted(found) == sorted(expected):
            name, shape = next(pair for pair in pairs if pair[1] != part.shapes[pair[0]])
            raise MismatchError(
                f"{name} has shape {part.shapes[name]}, the {state} saved at its place has {shape}. Stage 0 "
                "saves no parameter names: this run gives its parameters to the optimizer in another order than the "
                "saved run did. Use the saved run's order.",
                path=path,
            )


def group_sizes(optim: OptimHeader) -> list[int]:
    """Return the number of elements (FP16_Optimizer) or parameters of each saved group."""
    if optim.traits.is_flat:
        return [master.numel for master in optim.masters]
    return [optim.owners.count(group) for group in range(len(optim.groups))]


def fits(named: Sequence[Sequence[str]], optim: OptimHeader, shapes: Mapping[str, Shape]) -> bool:
    """Return True if groups of names have the sizes of the saved groups, and the shapes of their masters."""
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
