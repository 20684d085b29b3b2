"""Builds atoms from stage 0: FP16_Optimizer (fp16 and bf16), FP16_UnfusedOptimizer, or a torch optimizer in fp32.

The optimizer's states are positional, as in torch's ``Optimizer.load_state_dict``: the live engine's param groups name
the parameters, and their shapes must agree.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat

from ...errors import CheckpointError, MismatchError, shorten
from ...model import MASTER, TIED, GroupInfo, count, strip_compiled
from ...model.experts import deal_experts, drop_fixed, find_layer, is_expert
from ...model.flat import FlatBuffer, Shape
from .builder import Builder, SavedRank, list_ranks
from .headers import FileHeader, ModelHeader, OptimHeader, Piece, TensorStates
from .module import add_tensors, read_module
from .naming import (
    GroupNames,
    ModuleOrder,
    NamedOptimizer,
    Naming,
    check_group_order,
    check_state_shapes,
    compare_modules,
    fit_groups,
    name_groups,
)
from .placement import place_layers
from .save import Save, list_holders

logger = logging.getLogger("deepspeed_ucp")


def build_stage0(builder: Builder, naming: Naming) -> None:
    """Add the module's tensors, and the optimizer's masters and states under the names that ``naming`` gives.

    Raises:
        MismatchError: the live param groups do not fit the saved ones.
        ConfigError: the groups are of another form.
    """
    save, naming = builder.save, naming.translate(builder.save)
    live = naming.live
    wrapper = save.model(0).optim
    if wrapper is None or wrapper.traits.is_cut or not naming.optimizer:  # BF16_Optimizer has separate files
        owned = [model.owned for model in save.first_models]  # ZeRO records the trained parameters
        builder.ranks, builder.instances = list_ranks(save, [list(shapes) for shapes in owned])
        for rank, shapes in zip(builder.ranks, owned, strict=True):
            rank.shapes.update(shapes)
        tied = {strip_compiled(name) for group in live or () for name, _ in group if name.startswith(TIED)}
        add_tensors(builder, tied)
        _warn_lost(save, builder.close_gaps())
    else:
        if live is None and naming.groups is not None:
            live = name_groups(save, naming.groups)
        _add_optimizers(builder, live, naming)
        add_tensors(builder)


def _warn_lost(save: Save, lost: Collection[str]) -> None:
    if lost:  # a layer with a forward_fn has no file, and without masters the stages have different values
        logger.warning(
            "%s: %s: no file has the values of some pipeline stages; the values of the stage that saved them are used",
            *(save.folder, shorten(lost)),
        )


def _add_optimizers(builder: Builder, live: GroupNames | None, naming: Naming) -> None:
    save = builder.save
    parts = _name_parts(save, live, naming)
    for part in parts:
        if part.optim.names is None:
            check_group_order(part.optim.groups, naming.hyper, save.path(part.header))
            check_state_shapes(part, save.path(part.header))
    trained = [_find_trained(part, live) for part in parts]
    losses = [part.find_lost() for part in parts]
    _warn_lost(save, dict.fromkeys(chain(*losses)))
    owned = [
        {n: shape for n, shape in shapes.items() if n not in lost} for shapes, lost in zip(trained, losses, strict=True)
    ]
    if save.expert_optims:
        _add_experts(builder, save, parts, owned)
        return
    builder.ranks, builder.instances = list_ranks(save, [list(names) for names in owned])
    for rank, part, shapes, ordered in zip(builder.ranks, parts, owned, trained, strict=True):
        _add_part(builder, rank, part, shapes, ordered)


def _add_experts(
    builder: Builder, save: Save, parts: Sequence[NamedOptimizer], owned: Sequence[Mapping[str, Shape]]
) -> None:
    """Add the states of all expert-parallel ranks' optimizers; dense parameters are equal on one tensor-parallel rank.

    Experts over tensor-parallel ranks are added to all of these in their pipeline stage.
    """
    degree, over_tp = _count_expert_ranks(save), save.experts_over_tp
    holders = [list_holders(save, mp, degree, over_tp=over_tp) for mp in range(len(save.models))]
    sharing = [save.list_expert_ranks(mp) for mp in range(len(save.models))]
    pairs = list(zip(parts, owned, strict=True))
    names = [
        dict.fromkeys(n for part, shapes in pairs if part.mp in ranks for n in shapes if part.mp == mp or is_expert(n))
        for mp, ranks in enumerate(sharing)
    ]
    builder.ranks, builder.instances = list_ranks(save, [list(rank_names) for rank_names in names])
    for whole in builder.ranks if save.experts_over_tp else ():
        whole.experts_over_tp.update(filter(is_expert, chain(*names)))
    known: dict[int, set[str]] = defaultdict(set)
    for part, shapes in sorted(pairs, key=lambda pair: pair[0].ep):
        rank = replace(builder.ranks[part.mp], shapes={}, flats=(), groups=())
        new = {name: shape for name, shape in shapes.items() if name not in known[part.mp]}
        _add_part(builder, rank, part, new, shapes)
        for mp in sharing[part.mp]:
            known[mp].update(name for name in shapes if mp == part.mp or is_expert(name))
            named = save.experts_over_tp or len(holders[mp]) > 1
            _join_rank(builder.ranks[mp], rank, holders[mp][part.ep] if named else None)


def _count_expert_ranks(save: Save) -> int:
    """Count the expert-parallel ranks by their files."""
    degree: int = 1 + max(rank for _, rank in save.expert_optims)
    ranks = save.dp * save.tp if save.experts_over_tp else save.dp
    if ranks % degree:
        raise CheckpointError(
            f"was saved by {ranks} ranks that held the experts, and {degree} expert-parallel "
            "ones have files of optimizer states. The folder lacks files or mixes two saves.",
            path=save.path(save.main),
        )
    return degree


def _join_rank(whole: SavedRank, part: SavedRank, holders: range | None) -> None:
    """Add an expert-parallel rank's parameters to its model-parallel rank, or only its experts to another one."""
    same_lane = whole.tp == part.tp
    whole.shapes.update({name: shape for name, shape in part.shapes.items() if same_lane or is_expert(name)})
    flats, at = list(whole.flats), 0
    places = {flat.names: place for place, flat in enumerate(flats)}
    for flat in part.flats:  # experts keep their places between dense parameters
        spread = any(map(is_expert, flat.names))
        if flat.names in places:
            at = max(at, places[flat.names] + len(flats) - len(places) + 1)
        elif same_lane or spread:
            flats.insert(at, replace(flat, ranks=holders if spread else None))
            at += 1
    whole.flats = tuple(flats)
    known = [group.members for group in whole.groups] or [()] * len(part.groups)
    whole.groups = tuple(
        GroupInfo(
            members + tuple(member for member in group.members if same_lane or is_expert(member.name)),
            drop_fixed(group.hyper),
        )
        for members, group in zip(known, part.groups, strict=True)
    )


def _name_parts(save: Save, live: GroupNames | None, naming: Naming) -> list[NamedOptimizer]:
    """Name the parameters of every model-parallel rank's optimizer.

    Raises:
        MismatchError: no live engine names them, or its groups do not fit.
    """
    if live is None and (save.optim(0).names is None or save.is_pipeline):
        raise MismatchError(
            "stage 0 saves no parameter names, and there is no live engine to name them. Describe the optimizer's "
            "param groups: --groups module for model.parameters() in one group, or --groups with a YAML or JSON file "
            "that lists the names of each group in order.",
            path=save.path(save.main),
        )
    if save.is_pipeline:
        return place_layers(save, naming, live or ())
    order = compare_modules(save, naming) if naming.order else None
    if live is not None and order is not None:
        live = order.follow(_join_groups(save, live, naming.order), naming.hyper)
    dealt = _deal_experts(save, live, naming.ep, order) if live is not None and save.expert_optims else []
    parts = []
    for mp in range(len(save.models)):
        files = {rank: file for (place, rank), file in save.expert_optims.items() if place == mp}
        files = files or {0: save.models[mp][0]}
        parts += [_name_part(save, mp, ep, file, dealt[ep] if dealt else live) for ep, file in files.items()]
    return parts


def _join_groups(save: Save, live: GroupNames, order: Mapping[str, str]) -> GroupNames:
    """Join the live groups in module order if only ZeRO separates experts, and the saved run had a single group."""
    files = [file.optim for file in save.expert_optims.values() if file.optim]
    if len(live) < 2 or not files or any(len(optim.groups) > 1 for optim in files):
        return live
    owned = {strip_compiled(name): is_owned for group in live for name, is_owned in group}
    return [[(name, owned[name]) for name in dict.fromkeys(order.values()) if name in owned]]


def _name_part(save: Save, mp: int, ep: int, file: FileHeader, live: GroupNames | None) -> NamedOptimizer:
    """Name the parameters of one file's optimizer."""
    header, optim = save.models[mp][0], file.optim or save.optim(mp)
    known = {strip_compiled(name) for group in live or () for name, _ in group}
    tensors = {name: (header, piece) for name, piece in read_module(save, header, known).items()}
    sharing = save.list_expert_ranks(mp)
    for (_, _, place), expert in save.experts.items():
        if place in sharing:
            tensors |= {name: (expert, piece) for name, piece in (expert.layer or {}).items()}
    shapes = {name: piece.shape for name, (_, piece) in tensors.items()}
    fused = _find_fused(save.model(mp), ep, shapes)
    shapes |= {name: (len(parts), *next(iter(parts.values()))) for name, parts in fused.items()}
    if save.expert_optims and live is not None:
        live = _pick_live(save, live, fused, shapes, len(optim.groups))
    groups = fit_groups(optim, save.model(mp), shapes, live, save.path(file))
    return NamedOptimizer(file, optim, groups, shapes, tensors, mp, ep, fused)


def _find_fused(model: ModelHeader, ep: int, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Return AutoEP's fused parameters of an expert-parallel rank → the experts in each, with shapes."""
    placements = {strip_compiled(layer): experts[ep : ep + 1] for layer, experts in model.placements.items()}
    fused: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        parent = name.rpartition(".")[0]
        layer = find_layer(parent, placements) if is_expert(name) and parent not in fused else None
        if layer is not None and (numbers := list(chain(*placements[layer]))):
            fused[parent] = {f"{parent}.{number}": shape for number in numbers}
    return fused


def _pick_live(
    save: Save, live: GroupNames, fused: Collection[str], shapes: Mapping[str, Shape], saved: int
) -> GroupNames:
    """Return the live groups as one rank of the saved run had them: the parameters of its stage, experts fused."""
    picked: list[list[tuple[str, bool]]] = []
    for group in live:
        names: dict[str, bool] = {}
        for name, owned in group:
            local = strip_compiled(name)
            local = parent if (parent := local.rpartition(".")[0]) in fused else local
            if save.pp == 1 or local in shapes:
                names[local] = names.get(local, False) or owned
        picked.append(list(names.items()))
    return picked if len(picked) == saved else [group for group in picked if group]


def _deal_experts(save: Save, live: GroupNames, ep: int, order: ModuleOrder | None) -> list[GroupNames]:
    """Divide the live groups of ``ep`` expert-parallel ranks among the saved run's expert-parallel ranks.

    Raises:
        MismatchError: the files do not record which rank had which experts.
    """
    files = list(save.expert_optims.values())
    for file in files:
        groups = file.optim.groups if file.optim else ()
        if len({str(group.get("name")) for group in groups if group.get("moe")}) > 1:
            raise MismatchError(
                "stage 0 does not save the expert-parallel degree of each layer, and this save has several such "
                "degrees. Load with load_optimizer_states=False; or, if every layer has its saved degree and every "
                'param group its saved place, set "checkpoint": {"universal": false} for DeepSpeed\'s own load, which '
                "goes by their order.",
                path=save.path(file),
            )
    dealt: list[list[list[tuple[str, bool]]]] = [[] for _ in range(_count_expert_ranks(save))]
    for group in live:
        owned = dict(group)
        try:
            kept = order is None or order.is_kept(group)
            parts = deal_experts(list(owned), len(dealt), ep, ordered=kept)
        except ValueError as error:
            raise MismatchError(
                f"{error}. Stage 0 saves no parameter names: give the optimizer "
                "the experts in the module's order, or load with load_optimizer_states=False.",
                path=save.path(files[0]),
            ) from error
        for rank_groups, names in zip(dealt, parts, strict=True):
            rank_groups.append([(name, owned[name]) for name in names])
    return [*dealt]


def _find_trained(part: NamedOptimizer, live: GroupNames | None) -> dict[str, Shape]:
    """Return the shapes of the parameters that the optimizer trained.

    Parameters that are frozen now and had no states were frozen then: older releases list them in the groups.
    """
    frozen = {strip_compiled(name) for group in live or () for name, owned in group if not owned}
    names = part.names
    if len(names) == len(part.optim.tensors):
        pairs = zip(names, part.optim.tensors, strict=True)
        frozen.difference_update(*(part.list_parts(name) for name, states in pairs if states.states))
    parts = {part_name: shape for name in names for part_name, shape in part.list_parts(name).items()}
    return {name: shape for name, shape in parts.items() if count(shape) and name not in frozen}


def _add_part(
    builder: Builder,
    rank: SavedRank,
    part: NamedOptimizer,
    owned: Mapping[str, Shape],
    ordered: Mapping[str, Shape],
) -> None:
    """Add the masters and states of a rank's optimizer.

    Args:
        owned: shapes of its parameters with masters in the files.
        ordered: the parameters of its flat buffers.
    """
    rank.shapes.update(owned)
    optim, flats = part.optim, list[FlatBuffer]()
    group_names = [[n for name in names for n in part.list_parts(name) if n in owned] for names in part.groups]
    pairs = zip(group_names, optim.groups, strict=True)
    rank.groups = tuple(GroupInfo(tuple(map(rank.param, names)), hyper) for names, hyper in pairs)
    for index, names in enumerate(part.groups):
        flats += optim.traits.lay_out(index, names, [part.shapes[name] for name in names])
    masters: Sequence[Piece | None] = optim.masters if optim.traits.has_copies else [None] * len(flats)
    states = chain(share_steps(optim), repeat(TensorStates()))
    flats = [_add_buffer(builder, rank, part, *contents) for contents in zip(flats, masters, states, strict=False)]
    flats = [buffer.keep(name for name in buffer.names if name in ordered) for buffer in flats]
    rank.flats = tuple(buffer for buffer in flats if buffer.names or optim.traits.is_flat)


def share_steps(optim: OptimHeader) -> list[TensorStates]:
    """Return the states of all parameters, with the right step for DeepSpeed's FusedAdam.

    FusedAdam counts the steps of a param group only at its last parameter; the others keep the initial 0
    (``ops/adam/fused_adam.py``). Its groups have a ``step`` of 0 and a ``bias_correction``.
    """
    tensors = list(optim.tensors)
    for number, group in enumerate(() if optim.traits.has_copies else optim.groups):
        if not ("bias_correction" in group and group.get("step") == 0):
            continue
        members = [place for place, owner in enumerate(optim.owners) if owner == number and tensors[place].states]
        steps = [tensors[place].scalars.get("step") for place in members]
        dtypes = {piece.dtype for place in members for piece in tensors[place].states.values()}
        if any(step != 0 for step in steps[:-1]) or len(dtypes) > 1:
            continue  # some parameters had no gradients at times, or there are several dtypes: separate counts
        for place in members:
            tensors[place] = replace(tensors[place], scalars={**tensors[place].scalars, "step": steps[-1]})
    return tensors


def _add_buffer(
    builder: Builder,
    rank: SavedRank,
    part: NamedOptimizer,
    local: FlatBuffer,
    master: Piece | None,
    states: TensorStates,
) -> FlatBuffer:
    """Add the master and states of a buffer, and return the buffer with fused experts separated.

    Without a master the model's tensors serve as masters. Older releases may have frozen parameters in the buffer.
    """
    buffer = local.split({name: part.list_parts(name) for name in local.names})
    cuts = [cut for cut in buffer.cuts(0) if cut.name in rank.shapes]
    if master is not None:
        builder.add_cuts(rank, MASTER, cuts, part.header, master)
    for cut in cuts if master is None else ():
        builder.add(rank, cut.name, MASTER, *part.tensors[cut.name])
    if not part.optim.traits.is_flat and not part.shapes[local.names[0]]:
        states = states.of_zero_dim()
    params = [rank.param(cut.name) for cut in cuts]
    for state, piece in builder.sort_states(params, states, buffer.partition, part.header).items():
        builder.add_cuts(rank, state, cuts, part.header, piece)
    return buffer
