"""Stage 0 → atoms: FP16_Optimizer (fp16 and bf16), FP16_UnfusedOptimizer, and the raw torch optimizer in fp32.

These files name no parameters in the optimizer's part: states are positional, as in torch's own
``Optimizer.load_state_dict``. The live engine's param groups give the names; shapes have to agree.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..atoms import MASTER, GroupInfo, count, strip_compiled
from ..errors import ConfigError, MismatchError, shorten
from ..flat import Cut, FlatBuffer, join_parameters
from .builder import Builder, Seat
from .family import Save
from .headers import Holder, OptimHeader, Piece
from .module import add_modules, drop_ties, read_module
from .naming import GroupNames, NamedGroups, NamedOptimizer, check_group_order, check_state_shapes, fit_groups
from .pipeline import TIED, Known, add_layers, look_at_ranks
from .placement import place_layers
from .stages import Stages, name_stages
from .zero import Built

logger = logging.getLogger("deepspeed_ucp")

MODULE_GROUP = "module"
"""The optimizer was given ``model.parameters()``, in one group."""

Stage0 = tuple[Stages, list[Built], dict[str, str], dict[str, int]]


def build_stage0(
    builder: Builder,
    save: Save,
    live: GroupNames | None,
    live_hyper: Sequence[Mapping[str, Any]] = (),
    *,
    optimizer: bool = True,
) -> Stage0:
    """Add masters and states of stage 0, named by the live param groups (whose hyper-parameters are ``live_hyper``).

    Without ``optimizer``, or where the files have none, the module's tensors alone are added.

    Raises:
        MismatchError: the live param groups do not fit the saved ones.
    """
    wrapper = save.model(0).optim
    if wrapper is None or wrapper.kind == "bf16" or not optimizer:  # BF16_Optimizer's state lies in files of its own
        return _build_weights(builder, save, live)
    parts = _name_parts(save, live)
    for part in parts:
        if part.optim.names is None:
            check_group_order(part.optim.groups, live_hyper, save.path(part.header))
            check_state_shapes(part, save.path(part.header))
    trained = [_find_trained(part, live) for part in parts]
    owned = [_drop_lost(part, names) for part, names in zip(parts, trained, strict=True)]
    _tell_lost(save, parts)
    stages = name_stages(save, [list(names) for names in owned])
    built = [
        _add_part(builder, seat, part, names, everything if save.pp > 1 else {})
        for seat, part, names, everything in zip(stages.seats, parts, owned, trained, strict=True)
    ]
    optimized = {name for names in owned for name in names}
    if not save.is_pipeline:
        return stages, built, add_modules(builder, save, optimized, sharded=False), {}
    shapes: list[dict[str, dict[int, tuple[int, ...]]]] = [{} for _ in range(save.pp)]
    for seat in stages.seats:
        for name, shape in seat.shapes.items():
            shapes[seat.pp].setdefault(name, {})[seat.tp] = shape
    known = Known(shapes, look_at_ranks(save).others)
    return stages, built, *add_layers(builder, save, known, stages)


def _build_weights(builder: Builder, save: Save, live: GroupNames | None) -> Stage0:
    """The module's tensors without an optimizer; ZeRO's files tell which of them it had trained."""
    models = [save.model(mp) for mp in range(len(save.models))]
    shapes = [{strip_compiled(n): tuple(s) for g in model.param_shapes or () for n, s in g} for model in models]
    stages = name_stages(save, [list(held) for held in shapes])
    for seat, held in zip(stages.seats, shapes, strict=True):
        seat.shapes.update(held)
    built: list[Built] = [((), ()) for _ in stages.seats]
    if save.is_pipeline:
        tied = {strip_compiled(name) for group in live or () for name, _ in group if name.startswith(TIED)}
        return stages, built, *add_layers(builder, save, look_at_ranks(save, tied), stages)
    optimized = {name for held in shapes for name in held}
    return stages, built, add_modules(builder, save, optimized, sharded=False), {}


def _name_parts(save: Save, live: GroupNames | None) -> list[NamedOptimizer]:
    """What every model-parallel rank's optimizer holds, by name.

    Raises:
        MismatchError: there is no live engine to name it, or its groups do not fit.
    """
    optim = save.model(0).optim
    if live is None and (optim is None or optim.names is None or save.is_pipeline):
        raise MismatchError(
            f"{save.path(save.main)}: stage 0 saves no parameter names, and there is no live engine to name them. Say "
            "what the optimizer was given: --groups module if that was model.parameters() in one group, or --groups "
            "with a YAML or JSON file that lists the names of each group in order."
        )
    if save.is_pipeline:
        return place_layers(save, live or ())
    known = {strip_compiled(name) for group in live or () for name, _ in group}
    parts = []
    for mp in range(save.tp):
        header, held = save.models[mp][0], save.model(mp).optim
        module = {strip_compiled(k): v for k, v in read_module(save, header, known).items()}
        tensors = {name: (header, piece) for name, piece in module.items()}
        if held is None:
            raise MismatchError(f"{save.path(header)}: holds no optimizer state.")
        groups = fit_groups(held, save.model(mp), module, live, save.path(header))
        parts.append(
            NamedOptimizer(header, held, groups, {name: piece.shape for name, piece in module.items()}, tensors)
        )
    return parts


def name_groups(save: Save, groups: NamedGroups) -> list[list[tuple[str, bool]]]:
    """Param groups as the user says that they were made, in the form of a live optimizer's.

    Raises:
        ConfigError: neither ``"module"`` nor a list of lists of names.
        MismatchError: ``"module"`` for a pipeline, whose files do not tell the names of tied layers.
    """
    if not isinstance(groups, str):
        if not groups or any(isinstance(names, str) or not all(isinstance(n, str) for n in names) for names in groups):
            raise ConfigError(f"groups: a list of lists of parameter names is needed, found {groups!r:.200}")
        return [[(strip_compiled(name), True) for name in names] for names in groups]
    if groups != MODULE_GROUP:
        raise ConfigError(f'groups: "{MODULE_GROUP}" or a list of lists of parameter names is needed, found {groups!r}')
    if save.is_pipeline:
        raise MismatchError(
            f"{save.path(save.main)}: a pipeline's files do not tell which of its layers are tied, so that the order "
            "of its parameters is not known. Give the names of each group as a list of lists."
        )
    module = read_module(save, save.main, ())
    tied = {strip_compiled(name) for name in save.model(0).shared}
    buffers = {strip_compiled(name) for name in save.model(0).buffers}
    names = [name for name, _ in drop_ties(module, {}) if name not in buffers | tied]
    return [[(name, True) for name in names]]


def _find_trained(part: NamedOptimizer, live: GroupNames | None) -> dict[str, tuple[int, ...]]:
    """The parameters that the optimizer trained, with their shapes.

    Frozen here, and without states there: older releases hold them in the groups as well.
    """
    frozen = {strip_compiled(name) for group in live or () for name, owned in group if not owned}
    names = part.names
    if len(names) == len(part.optim.holders):
        frozen -= {name for name, holder in zip(names, part.optim.holders, strict=True) if holder.states}
    return {n: part.shapes[n] for n in names if count(part.shapes[n]) and n not in frozen}


def _drop_lost(part: NamedOptimizer, trained: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Those whose master is in the files."""
    lost = set(part.find_lost())
    return {name: shape for name, shape in trained.items() if name not in lost}


def _tell_lost(save: Save, parts: Sequence[NamedOptimizer]) -> None:
    """Without ZeRO an fp32 pipeline's masters lie in the layer files, and a layer with a forward_fn has none."""
    lost = dict.fromkeys(name for part in parts for name in part.find_lost())
    if lost:
        logger.warning(
            "%s: %s: a pipeline stage's own values are in no file; those of the stage that saved them are taken",
            *(save.listing.folder, shorten(lost)),
        )


def _add_part(
    builder: Builder,
    seat: Seat,
    part: NamedOptimizer,
    owned: Mapping[str, tuple[int, ...]],
    ordered: Mapping[str, tuple[int, ...]],
) -> Built:
    """Add what a rank's optimizer holds.

    Args:
        owned: its parameters, with shapes, as far as their masters are in the files.
        ordered: those of a raw optimizer that make up its flats, which tell where stages end.
    """
    seat.shapes.update(owned)
    held = [tuple(name for name in names if name in owned) for names in part.groups]
    groups = tuple(
        GroupInfo(tuple(map(seat.param, names)), hyper) for names, hyper in zip(held, part.optim.groups, strict=True)
    )
    if part.optim.kind == "fp16_fused":
        return _add_fused(builder, seat, part, held), groups
    masters: list[tuple[Any, Piece] | None] = [(part.header, master) for master in part.optim.masters]
    if part.optim.kind == "torch":  # fp32: the model's own parameters are the masters
        masters = [part.tensors.get(name) for name in part.names]
    for name, master, holder in zip(part.names, masters, part.optim.holders, strict=True):
        if master is not None and name in owned:
            _add_whole(builder, seat, part, name, master, holder)
    told = ordered if part.optim.kind == "torch" else owned  # a raw optimizer's order is the live one
    flats = tuple(
        join_parameters(index, (name,), (told[name],))
        for index, names in enumerate(part.groups)
        for name in names
        if name in told
    )
    return flats, groups


def _add_whole(
    builder: Builder, seat: Seat, part: NamedOptimizer, name: str, master: tuple[Any, Piece], holder: Holder
) -> None:
    """A parameter with a master and states of its own."""
    header, piece = master
    builder.add(seat, name, MASTER, piece.shape, builder.file(header), piece)
    states = holder if piece.shape else holder.of_zero_dim()
    builder.add_holder(seat, [Cut(name, 0, piece.numel, 0)], states, piece.numel, builder.file(part.header))


def _add_fused(
    builder: Builder, seat: Seat, part: NamedOptimizer, held: Sequence[tuple[str, ...]]
) -> tuple[FlatBuffer, ...]:
    """FP16_Optimizer: one flat buffer per param group, frozen parameters of older releases included."""
    file = builder.file(part.header)
    flats = []
    for index, names in enumerate(part.groups):
        buffer = join_parameters(index, names, [part.shapes[name] for name in names])
        cuts = [cut for cut in buffer.cuts(0) if cut.name in seat.shapes]
        builder.add_cuts(seat, MASTER, cuts, file, part.optim.masters[index], seat.shapes)
        if index < len(part.optim.holders):
            builder.add_holder(seat, cuts, part.optim.holders[index], buffer.partition, file)
        flats.append(buffer.keep(held[index]))
    return tuple(flats)


__all__ = ["GroupNames", "OptimHeader", "build_stage0"]
