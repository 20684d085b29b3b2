"""Stage 0 → atoms: FP16_Optimizer (fp16 and bf16), FP16_UnfusedOptimizer, and the raw torch optimizer in fp32.

These files name no parameters in the optimizer's part: states are positional, as in torch's own
``Optimizer.load_state_dict``. The live engine's param groups give the names; shapes have to agree.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat

from ..atoms import MASTER, TIED, GroupInfo, count, strip_compiled
from ..errors import CheckpointError, MismatchError, shorten
from ..experts import deal_experts, drop_fixed, find_layer, is_expert
from ..flat import FlatBuffer
from .builder import Builder
from .headers import FileHeader, ModelHeader, OptimHeader, Piece, Shape, TensorStates
from .module import add_tensors, read_module
from .naming import GroupNames, NamedOptimizer, Naming, check_group_order, check_state_shapes, fit_groups, name_groups
from .order import ModuleOrder, compare_modules
from .placement import place_layers
from .ranks import SavedRank, list_ranks
from .save import Save, list_holders

logger = logging.getLogger("deepspeed_ucp")


def build_stage0(builder: Builder, naming: Naming) -> None:
    """Add masters and states, named by ``naming``, and the module's tensors; these alone without an optimizer.

    Raises:
        MismatchError: the live param groups do not fit the saved ones.
        ConfigError: the groups are of another form.
    """
    save, naming = builder.save, naming.translate(builder.save)
    live = naming.live
    wrapper = save.model(0).optim
    if wrapper is None or wrapper.traits.is_cut or not naming.optimizer:  # BF16_Optimizer's states lie elsewhere
        owned = [model.owned for model in save.first_models]  # ZeRO's files tell which it had trained
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
    if lost:  # of a layer with a forward_fn there is no file, and masters would be the stage's own
        logger.warning(
            "%s: %s: a pipeline stage's own values are in no file; those of the stage that saved them are taken",
            *(save.listing.folder, shorten(lost)),
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
        {n: shape for n, shape in held.items() if n not in lost} for held, lost in zip(trained, losses, strict=True)
    ]
    if save.expert_optims:
        _add_experts(builder, save, parts, owned)
        return
    builder.ranks, builder.instances = list_ranks(save, [list(names) for names in owned])
    for rank, part, shapes, everything in zip(builder.ranks, parts, owned, trained, strict=True):
        _add_part(builder, rank, part, shapes, everything)


def _add_experts(
    builder: Builder, save: Save, parts: Sequence[NamedOptimizer], owned: Sequence[Mapping[str, Shape]]
) -> None:
    """What the optimizers of all expert-parallel ranks hold; all but experts is alike on one tensor-parallel rank.

    Experts over tensor-parallel ranks are added to all of these in their pipeline stage.

    Raises:
        CheckpointError: the expert-parallel ranks do not divide those that hold the model.
    """
    degree, over_tp = _count_expert_ranks(save), save.experts_over_tp
    holders = [list_holders(save, mp, degree, over_tp=over_tp) for mp in range(len(save.models))]
    sharing = [save.list_expert_ranks(mp) for mp in range(len(save.models))]
    mine = [[(p, held) for p, held in zip(parts, owned, strict=True) if p.mp in held_by] for held_by in sharing]
    names = [
        dict.fromkeys(n for part, held in each for n in held if part.mp == mp or is_expert(n))
        for mp, each in enumerate(mine)
    ]
    builder.ranks, builder.instances = list_ranks(save, [list(each) for each in names])
    for whole in builder.ranks if save.experts_over_tp else ():
        whole.experts_over_tp.update(filter(is_expert, chain(*names)))
    known: dict[int, set[str]] = defaultdict(set)
    for part, shapes in sorted(zip(parts, owned, strict=True), key=lambda pair: pair[0].ep):
        rank = replace(builder.ranks[part.mp], shapes={}, flats=(), groups=())
        new = {name: shape for name, shape in shapes.items() if name not in known[part.mp]}
        _add_part(builder, rank, part, new, shapes)
        for mp in sharing[part.mp]:
            known[mp].update(name for name in shapes if mp == part.mp or is_expert(name))
            named = save.experts_over_tp or len(holders[mp]) > 1
            _join_rank(builder.ranks[mp], rank, holders[mp][part.ep] if named else None)


def _count_expert_ranks(save: Save) -> int:
    """Expert-parallel ranks, which have files of their own."""
    degree = 1 + max(rank for _, rank in save.expert_optims)
    ranks = save.dp * save.tp if save.experts_over_tp else save.dp
    if ranks % degree:
        raise CheckpointError(
            f"was saved by {ranks} ranks that held the experts, and {degree} expert-parallel "
            "ones have files of optimizer states. The folder lacks files or mixes two saves.",
            path=save.path(save.main),
        )
    return degree


def _join_rank(whole: SavedRank, part: SavedRank, holders: range | None) -> None:
    """Add what one expert-parallel rank holds to a model-parallel rank; to another one experts alone."""
    own = whole.tp == part.tp
    whole.shapes.update({name: shape for name, shape in part.shapes.items() if own or is_expert(name)})
    flats, at = list(whole.flats), 0
    places = {flat.names: place for place, flat in enumerate(flats)}
    for flat in part.flats:  # experts between what all ranks have stay there
        spread = any(map(is_expert, flat.names))
        if flat.names in places:
            at = max(at, places[flat.names] + len(flats) - len(places) + 1)
        elif own or spread:
            flats.insert(at, replace(flat, ranks=holders if spread else None))
            at += 1
    whole.flats = tuple(flats)
    known = [group.members for group in whole.groups] or [()] * len(part.groups)
    whole.groups = tuple(
        GroupInfo(
            members + tuple(member for member in group.members if own or is_expert(member.name)),
            drop_fixed(group.hyper),
        )
        for members, group in zip(known, part.groups, strict=True)
    )


def _name_parts(save: Save, live: GroupNames | None, naming: Naming) -> list[NamedOptimizer]:
    """What every model-parallel rank's optimizer holds, by name.

    Raises:
        MismatchError: there is no live engine to name it, or its groups do not fit.
    """
    if live is None and (save.optim(0).names is None or save.is_pipeline):
        raise MismatchError(
            "stage 0 saves no parameter names, and there is no live engine to name them. Say "
            "what the optimizer was given: --groups module if that was model.parameters() in one group, or --groups "
            "with a YAML or JSON file that lists the names of each group in order.",
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
        files = {rank: file for (held, rank), file in save.expert_optims.items() if held == mp}
        files = files or {0: save.models[mp][0]}
        parts += [_name_part(save, mp, ep, file, dealt[ep] if dealt else live) for ep, file in files.items()]
    return parts


def _join_groups(save: Save, live: GroupNames, order: Mapping[str, str]) -> GroupNames:
    """The live groups; ZeRO has experts in their own, also where the saved one had all parameters, in module order."""
    files = [file.optim for file in save.expert_optims.values() if file.optim]
    if len(live) < 2 or not files or any(len(optim.groups) > 1 for optim in files):
        return live
    owned = {strip_compiled(name): is_owned for group in live for name, is_owned in group}
    return [[(name, owned[name]) for name in dict.fromkeys(order.values()) if name in owned]]


def _name_part(save: Save, mp: int, ep: int, file: FileHeader, live: GroupNames | None) -> NamedOptimizer:
    """What one file's optimizer holds, by name.

    Raises:
        MismatchError: the live groups do not fit.
    """
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
    """The parameters in which an expert-parallel rank's experts of AutoEP lie, and what lies in each."""
    placements = {strip_compiled(layer): experts[ep : ep + 1] for layer, experts in model.placements.items()}
    fused: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        own = name.rpartition(".")[0]
        layer = find_layer(own, placements) if is_expert(name) and own not in fused else None
        if layer is not None and (numbers := list(chain(*placements[layer]))):
            fused[own] = {f"{own}.{number}": shape for number in numbers}
    return fused


def _pick_live(
    save: Save, live: GroupNames, fused: Collection[str], shapes: Mapping[str, Shape], saved: int
) -> GroupNames:
    """The live groups as one rank of the saved run had them: of its stage, by what it called its own parameters."""
    picked: list[list[tuple[str, bool]]] = []
    for group in live:
        names: dict[str, bool] = {}
        for name, owned in group:
            own = strip_compiled(name)
            own = own.rpartition(".")[0] if own.rpartition(".")[0] in fused else own
            if save.pp == 1 or own in shapes:
                names[own] = names.get(own, False) or owned
        picked.append(list(names.items()))
    return picked if len(picked) == saved else [group for group in picked if group]


def _deal_experts(save: Save, live: GroupNames, ep: int, order: ModuleOrder | None) -> list[GroupNames]:
    """What each expert-parallel rank of the saved run had in the groups of a live one of so many of them.

    Raises:
        MismatchError: the files do not tell which rank had which experts.
    """
    files = list(save.expert_optims.values())
    for file in files:
        groups = file.optim.groups if file.optim else ()
        if len({str(group.get("name")) for group in groups if group.get("moe")}) > 1:
            raise MismatchError(
                "stage 0 does not save which layer's experts were spread over how many ranks, and "
                "here were several such degrees. Load with load_optimizer_states=False; or, where every layer has the "
                'degree and every param group the place that it had, set "checkpoint": {"universal": false} for '
                "DeepSpeed's own load, which takes them by their order.",
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
        pairs = zip(names, part.optim.tensors, strict=True)
        frozen.difference_update(*(part.list_parts(name) for name, held in pairs if held.states))
    parts = {part_name: shape for name in names for part_name, shape in part.list_parts(name).items()}
    return {name: shape for name, shape in parts.items() if count(shape) and name not in frozen}


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
        ordered: those that make up its flats.
    """
    rank.shapes.update(owned)
    held = [tuple(n for name in names for n in part.list_parts(name) if n in owned) for names in part.groups]
    rank.groups = tuple(
        GroupInfo(tuple(map(rank.param, names)), hyper) for names, hyper in zip(held, part.optim.groups, strict=True)
    )
    optim, flats = part.optim, list[FlatBuffer]()
    for index, names in enumerate(part.groups):
        flats += optim.traits.lay_out(index, names, [part.shapes[name] for name in names])
    masters: Sequence[Piece | None] = optim.masters if optim.traits.has_copies else [None] * len(flats)
    states = chain(share_steps(optim), repeat(TensorStates()))
    flats = [_add_buffer(builder, rank, part, *each) for each in zip(flats, masters, states, strict=False)]
    flats = [buffer.keep(name for name in buffer.names if name in ordered) for buffer in flats]
    rank.flats = tuple(buffer for buffer in flats if buffer.names or optim.traits.is_flat)


def share_steps(optim: OptimHeader) -> list[TensorStates]:
    """The states of all parameters; those that DeepSpeed's FusedAdam stepped together have one step.

    It steps a param group with the count of its last parameter alone, which is the only one that it raises: the others
    keep the 0 that they began with (``ops/adam/fused_adam.py``). Its groups have a ``step`` of 0 and a
    ``bias_correction``.
    """
    found = list(optim.tensors)
    for number, group in enumerate(() if optim.traits.has_copies else optim.groups):
        if not ("bias_correction" in group and group.get("step") == 0):
            continue
        members = [place for place, owner in enumerate(optim.owners) if owner == number and found[place].states]
        steps = [found[place].scalars.get("step") for place in members]
        dtypes = {piece.dtype for place in members for piece in found[place].states.values()}
        if any(step != 0 for step in steps[:-1]) or len(dtypes) > 1:
            continue  # a parameter without gradients now and then, or several dtypes: counts of their own
        for place in members:
            found[place] = replace(found[place], scalars={**found[place].scalars, "step": steps[-1]})
    return found


def _add_buffer(
    builder: Builder, rank: SavedRank, part: NamedOptimizer, own: FlatBuffer, master: Piece | None, states: TensorStates
) -> FlatBuffer:
    """What the optimizer keeps for the parameters in a buffer; without a master the model's own tensors are that.

    Frozen parameters of older releases may be among them. Returns the buffer, experts in it one behind the other.
    """
    buffer = own.split({name: part.list_parts(name) for name in own.names})
    cuts = [cut for cut in buffer.cuts(0) if cut.name in rank.shapes]
    if master is not None:
        builder.add_cuts(rank, MASTER, cuts, part.header, master)
    for cut in cuts if master is None else ():
        builder.add(rank, cut.name, MASTER, *part.tensors[cut.name])
    if not part.optim.traits.is_flat and not part.shapes[own.names[0]]:
        states = states.of_zero_dim()
    builder.add_states(rank, cuts, states, buffer.partition, part.header)
    return buffer
