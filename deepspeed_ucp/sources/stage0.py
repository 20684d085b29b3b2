"""Stage 0 → atoms: FP16_Optimizer (fp16 and bf16), FP16_UnfusedOptimizer, and the raw torch optimizer in fp32.

These files name no parameters in the optimizer's part: states are positional, as in torch's own
``Optimizer.load_state_dict``. The live engine's param groups give the names; shapes have to agree.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ..atoms import MASTER, GroupInfo, count, strip_compiled
from ..errors import CheckpointError, MismatchError, shorten
from ..experts import DATA_FIRST, deal_experts, drop_fixed, find_expert, list_holders
from ..flat import Cut, FlatBuffer, join_parameters
from .builder import Builder
from .headers import FileHeader, OptimHeader, Piece, Shape, TensorStates
from .module import add_tensors, read_module
from .naming import GroupNames, NamedOptimizer, Naming, check_group_order, check_state_shapes, fit_groups, name_groups
from .placement import place_layers
from .ranks import TIED, SavedRank, list_ranks
from .save import Save

logger = logging.getLogger("deepspeed_ucp")


def build_stage0(builder: Builder, naming: Naming) -> None:
    """Add masters and states, named by ``naming``, and the module's tensors; these alone without an optimizer.

    Raises:
        MismatchError: the live param groups do not fit the saved ones.
        ConfigError: the groups are of another form.
    """
    save, live = builder.save, naming.live
    wrapper = save.model(0).optim
    tied: set[str] = set()
    if wrapper is None or wrapper.kind == "bf16" or not naming.optimizer:  # BF16_Optimizer's states lie elsewhere
        owned = [model.owned for model in save.first_models]  # ZeRO's files tell which it had trained
        builder.ranks, builder.instances = list_ranks(save, [list(shapes) for shapes in owned])
        for rank, shapes in zip(builder.ranks, owned, strict=True):
            rank.shapes.update(shapes)
        tied = {strip_compiled(name) for group in live or () for name, _ in group if name.startswith(TIED)}
    else:
        if live is None and naming.groups is not None:
            live = name_groups(save, naming.groups)
        _add_optimizers(builder, live, naming)
    add_tensors(builder, tied)


def _add_optimizers(builder: Builder, live: GroupNames | None, naming: Naming) -> None:
    save = builder.save
    parts = _name_parts(save, live)
    for part in parts:
        if part.optim.names is None:
            check_group_order(part.optim.groups, naming.hyper, save.path(part.header))
            check_state_shapes(part, save.path(part.header))
    trained = [_find_trained(part, live) for part in parts]
    losses = [part.find_lost() for part in parts]
    if lost := dict.fromkeys(
        chain(*losses)
    ):  # without ZeRO an fp32 pipeline's masters lie in the layer files, and a layer with a forward_fn has none
        logger.warning(
            "%s: %s: a pipeline stage's own values are in no file; those of the stage that saved them are taken",
            *(save.listing.folder, shorten(lost)),
        )
    owned = [
        {n: shape for n, shape in held.items() if n not in lost} for held, lost in zip(trained, losses, strict=True)
    ]
    if save.expert_optims:
        _add_experts(builder, save, parts, owned)
        return
    builder.ranks, builder.instances = list_ranks(save, [list(names) for names in owned])
    for rank, part, shapes, everything in zip(builder.ranks, parts, owned, trained, strict=True):
        _add_part(builder, rank, part, shapes, everything if save.pp > 1 else {})


def _add_experts(
    builder: Builder, save: Save, parts: Sequence[NamedOptimizer], owned: Sequence[Mapping[str, Shape]]
) -> None:
    """What the optimizers of all expert-parallel ranks hold; what is not an expert's they hold alike.

    Raises:
        CheckpointError: they are no divisor of the data-parallel ranks.
    """
    if save.dp % len(parts):
        raise CheckpointError(
            f"{save.path(save.main)}: was saved by {save.dp} data-parallel ranks, and {len(parts)} expert-parallel "
            "ones have files of optimizer states. The folder lacks files or mixes two saves."
        )
    builder.ranks, builder.instances = list_ranks(save, [list(dict.fromkeys(chain(*owned)))])
    whole = builder.ranks[0]
    holders = list_holders(save.dp, save.dp // len(parts), data_first=bool(save.main.config.get(DATA_FIRST)))
    for ranks, part, shapes in zip(holders, parts, owned, strict=True):
        rank, is_first = SavedRank(), not whole.shapes
        _add_part(builder, rank, part, {n: shape for n, shape in shapes.items() if n not in whole.shapes}, shapes)
        whole.shapes.update(rank.shapes)
        for flat in rank.flats:
            if any(map(find_expert, flat.names)):
                whole.flats += (replace(flat, ranks=ranks if len(parts) > 1 else None),)
            elif is_first:
                whole.flats += (flat,)
        known = [group.members for group in whole.groups] or [()] * len(rank.groups)
        whole.groups = tuple(
            GroupInfo(members + group.members, drop_fixed(group.hyper))
            for members, group in zip(known, rank.groups, strict=True)
        )


def _name_parts(save: Save, live: GroupNames | None) -> list[NamedOptimizer]:
    """What every model-parallel rank's optimizer holds, by name.

    Raises:
        MismatchError: there is no live engine to name it, or its groups do not fit.
    """
    if live is None and (save.optim(0).names is None or save.is_pipeline):
        raise MismatchError(
            f"{save.path(save.main)}: stage 0 saves no parameter names, and there is no live engine to name them. Say "
            "what the optimizer was given: --groups module if that was model.parameters() in one group, or --groups "
            "with a YAML or JSON file that lists the names of each group in order."
        )
    if save.is_pipeline:
        return place_layers(save, live or ())
    known = {strip_compiled(name) for group in live or () for name, _ in group}
    groups_of = _deal_experts(save, live) if save.expert_optims else [live]
    parts = []
    for mp in range(save.tp):
        header = save.models[mp][0]
        tensors = {name: (header, piece) for name, piece in read_module(save, header, known).items()}
        tensors |= {name: (expert, piece) for expert in save.experts for name, piece in (expert.layer or {}).items()}
        shapes = {name: piece.shape for name, (_, piece) in tensors.items()}
        for file, named in zip(save.expert_optims or [header], groups_of, strict=True):
            optim = file.optim or save.optim(mp)
            groups = fit_groups(optim, save.model(mp), shapes, named, save.path(file))
            parts.append(NamedOptimizer(file, optim, groups, shapes, tensors))
    return parts


def _deal_experts(save: Save, live: GroupNames | None) -> list[GroupNames]:
    """Of the live groups what each expert-parallel rank of the saved run had in them.

    Raises:
        MismatchError: the files do not tell which rank had which experts.
    """
    for file in save.expert_optims:
        groups = file.optim.groups if file.optim else ()
        if len({str(group.get("name")) for group in groups if group.get("moe")}) > 1:
            raise MismatchError(
                f"{save.path(file)}: stage 0 does not save which layer's experts were spread over how many ranks, and "
                "here were several such degrees. Resume in the topology that saved it, or load with "
                "load_optimizer_states=False."
            )
    dealt: list[list[list[tuple[str, bool]]]] = [[] for _ in save.expert_optims]
    for group in live or ():
        owned = dict(group)
        try:
            parts = deal_experts(list(owned), len(dealt))
        except ValueError as error:
            raise MismatchError(
                f"{save.path(save.expert_optims[0])}: {error}. Stage 0 saves no parameter names: give the optimizer "
                "the experts in the module's order, or load with load_optimizer_states=False."
            ) from error
        for held, names in zip(dealt, parts, strict=True):
            held.append([(name, owned[name]) for name in names])
    return [*dealt]


def _find_trained(part: NamedOptimizer, live: GroupNames | None) -> dict[str, Shape]:
    """The parameters that the optimizer trained, with their shapes.

    Frozen here, and without states there: older releases hold them in the groups as well.
    """
    frozen = {strip_compiled(name) for group in live or () for name, owned in group if not owned}
    names = part.names
    if len(names) == len(part.optim.tensors):
        frozen -= {name for name, held in zip(names, part.optim.tensors, strict=True) if held.states}
    return {n: part.shapes[n] for n in names if count(part.shapes[n]) and n not in frozen}


def _add_part(
    builder: Builder,
    rank: SavedRank,
    part: NamedOptimizer,
    owned: Mapping[str, Shape],
    ordered: Mapping[str, Shape],
) -> None:
    """Add what a rank's optimizer holds.

    Args:
        owned: its parameters, with shapes, as far as their masters are in the files.
        ordered: those of a raw optimizer that make up its flats, which tell where stages end.
    """
    rank.shapes.update(owned)
    held = [tuple(name for name in names if name in owned) for names in part.groups]
    rank.groups = tuple(
        GroupInfo(tuple(map(rank.param, names)), hyper) for names, hyper in zip(held, part.optim.groups, strict=True)
    )
    if part.optim.kind == "fp16_fused":
        rank.flats = tuple(_add_fused(builder, rank, part, index, names) for index, names in enumerate(held))
        return
    masters: list[tuple[FileHeader, Piece] | None] = [(part.header, master) for master in part.optim.masters]
    if part.optim.kind == "torch":  # fp32: the model's own parameters are the masters
        masters = [part.tensors.get(name) for name in part.names]
    for name, master, states in zip(part.names, masters, share_steps(part.optim), strict=True):
        if master is not None and name in owned:
            _add_whole(builder, rank, part.header, name, master, states)
    laid = ordered if part.optim.kind == "torch" else owned  # a raw optimizer's order is the live one
    rank.flats = tuple(
        join_parameters(index, (name,), (laid[name],))
        for index, names in enumerate(part.groups)
        for name in names
        if name in laid
    )


def share_steps(optim: OptimHeader) -> list[TensorStates]:
    """The states of all parameters; those that DeepSpeed's FusedAdam stepped together have one step.

    It steps a param group with the count of its last parameter alone, which is the only one that it raises: the others
    keep the 0 that they began with (``ops/adam/fused_adam.py``). Its groups have a ``step`` of 0 and a
    ``bias_correction``.
    """
    found = list(optim.tensors)
    for number, group in enumerate(optim.groups if optim.kind == "torch" else ()):
        if not ("bias_correction" in group and group.get("step") == 0):
            continue
        members = [place for place, owner in enumerate(optim.owners) if owner == number and found[place].states]
        steps = [found[place].scalars.get("step") for place in members]
        if any(step != 0 for step in steps[:-1]) or len(_list_dtypes(found[place] for place in members)) > 1:
            continue  # a parameter without gradients now and then, or several dtypes: counts of their own
        for place in members:
            found[place] = replace(found[place], scalars={**found[place].scalars, "step": steps[-1]})
    return found


def _list_dtypes(states: Iterable[TensorStates]) -> set[str]:
    return {piece.dtype for each in states for piece in each.states.values()}


def _add_whole(
    builder: Builder,
    rank: SavedRank,
    header: FileHeader,
    name: str,
    master: tuple[FileHeader, Piece],
    states: TensorStates,
) -> None:
    """A parameter with a master and states of its own."""
    file, piece = master
    builder.add(rank, name, MASTER, file, piece)
    held = states if piece.shape else states.of_zero_dim()
    builder.add_states(rank, [Cut(name, 0, piece.numel, 0)], held, piece.numel, header)


def _add_fused(builder: Builder, rank: SavedRank, part: NamedOptimizer, index: int, held: Sequence[str]) -> FlatBuffer:
    """FP16_Optimizer: one flat buffer per param group, frozen parameters of older releases included."""
    names = part.groups[index]
    buffer = join_parameters(index, names, [part.shapes[name] for name in names])
    cuts = [cut for cut in buffer.cuts(0) if cut.name in rank.shapes]
    builder.add_cuts(rank, MASTER, cuts, part.header, part.optim.masters[index])
    if index < len(part.optim.tensors):
        builder.add_states(rank, cuts, part.optim.tensors[index], buffer.partition, part.header)
    return buffer.keep(held)
