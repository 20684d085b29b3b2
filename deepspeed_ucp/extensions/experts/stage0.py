"""Experts in a stage-0 save: one optimizer per expert-parallel rank, by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ...errors import CheckpointError, MismatchError
from ...formats.deepspeed.builder import Builder, SavedRank, create_ranks
from ...formats.deepspeed.headers import FileHeader
from ...formats.deepspeed.module import read_module
from ...formats.deepspeed.naming import GroupNames, ModuleOrder, NamedOptimizer, Naming, compare_modules, fit_groups
from ...formats.deepspeed.save import Save
from ...formats.deepspeed.stage0 import add_optimizer
from ...model.flat import Shape
from ...model.index import GroupInfo
from ...model.storage import strip_compiled
from ...model.topology import drop_labels, find_label
from .autoep import Placement
from .files import ExpertFiles, list_holders
from .names import assign_experts, find_layer, is_expert, name_first_expert


def name_optimizers(experts: ExpertFiles, save: Save, naming: Naming, live: GroupNames | None) -> list[NamedOptimizer]:
    """Name the parameters of each optimizer; MismatchError if live groups do not fit."""
    order = _compare_modules(experts, save, naming) if naming.order else None
    if live is not None and order is not None:
        live = order.follow(_join_groups(experts, live, naming.order), naming.hyper)
    assigned = _assign(experts, save, live, naming.ep, order) if live is not None and experts.optims else []
    parts = []
    for mp in range(len(save.models)):
        files = {ep: file for (mp_rank, ep), file in experts.optims.items() if mp_rank == mp} or {0: save.models[mp][0]}
        parts += [
            _name_part(experts, save, mp, ep, file, assigned[ep] if assigned else live) for ep, file in files.items()
        ]
    return parts


def _compare_modules(experts: ExpertFiles, save: Save, naming: Naming) -> ModuleOrder:
    """Compare the modules, with one expert of each layer.

    Experts are a unit, since their files give only the order of experts.
    """
    layers = {layer: file.layer or {} for (layer, *_), file in experts.files.items()}
    further = dict(
        chain.from_iterable(tensors.items() for _, tensors in sorted(layers.items(), key=lambda pair: pair[0]))
    )
    apart = "the places of experts among them are not known"
    return compare_modules(save, naming, further, form=name_first_expert, unit=is_expert, apart=apart)


def add_optimizers(
    experts: ExpertFiles, builder: Builder, parts: Sequence[NamedOptimizer], owned: Sequence[Mapping[str, Shape]]
) -> bool:
    """Add the states of expert-parallel ranks' optimizers; False if there is only one.

    Dense parameters are equal on one tensor-parallel rank. Experts over tensor-parallel ranks are added to all of these
    in their pipeline stage.
    """
    if not experts.optims:
        return False
    save, over_tp = builder.save, experts.is_over_tp(builder.save)
    degree = _count_expert_ranks(experts, save)
    holders = [list_holders(save, mp, degree, over_tp=over_tp) for mp in range(len(save.models))]
    sharing = [experts.list_sharing(save, mp) for mp in range(len(save.models))]
    pairs = list(zip(parts, owned, strict=True))
    names = [
        dict.fromkeys(n for part, shapes in pairs if part.mp in ranks for n in shapes if part.mp == mp or is_expert(n))
        for mp, ranks in enumerate(sharing)
    ]
    builder.ranks, builder.instances = create_ranks(save, [list(rank_names) for rank_names in names])
    for saved_rank in builder.ranks if over_tp else ():
        saved_rank.unsharded.update(filter(is_expert, chain(*names)))
    added: dict[int, set[str]] = defaultdict(set)
    for part, shapes in sorted(pairs, key=lambda pair: pair[0].share):
        rank = replace(builder.ranks[part.mp], shapes={}, flats=(), groups=())
        new = {name: shape for name, shape in shapes.items() if name not in added[part.mp]}
        add_optimizer(builder, rank, part, new, shapes)
        for mp in sharing[part.mp]:
            added[mp].update(name for name in shapes if mp == part.mp or is_expert(name))
            named = over_tp or len(holders[mp]) > 1
            _join_rank(builder.ranks[mp], rank, holders[mp][part.share] if named else None)
    return True


def _count_expert_ranks(experts: ExpertFiles, save: Save) -> int:
    degree: int = 1 + max(rank for _, rank in experts.optims)
    ranks = save.dp * save.tp if experts.is_over_tp(save) else save.dp
    if ranks % degree:
        raise CheckpointError(
            f"was saved by {ranks} ranks that held the experts, and {degree} expert-parallel "
            "ones have files of optimizer states. The folder lacks files or mixes two saves.",
            path=save.path(save.main),
        )
    return degree


def _join_rank(target: SavedRank, source: SavedRank, holders: range | None) -> None:
    """Add one optimizer's parameters to a rank, only experts if its TP rank differs."""
    is_same_tp_rank = target.tp_rank == source.tp_rank
    target.shapes.update({name: shape for name, shape in source.shapes.items() if is_same_tp_rank or is_expert(name)})
    flats, position = list(target.flats), 0
    indices = {flat.names: index for index, flat in enumerate(flats)}
    for flat in source.flats:  # experts keep their places between dense parameters
        spread = any(map(is_expert, flat.names))
        if flat.names in indices:
            position = max(position, indices[flat.names] + len(flats) - len(indices) + 1)
        elif is_same_tp_rank or spread:
            flats.insert(position, replace(flat, ranks=holders if spread else None))
            position += 1
    target.flats = tuple(flats)
    members_by_group = [group.members for group in target.groups] or [()] * len(source.groups)
    target.groups = tuple(
        GroupInfo(
            members + tuple(member for member in group.members if is_same_tp_rank or is_expert(member.name)),
            drop_labels(group.hyper),
        )
        for members, group in zip(members_by_group, source.groups, strict=True)
    )


def _join_groups(experts: ExpertFiles, live: GroupNames, order: Mapping[str, str]) -> GroupNames:
    """Join the live groups in module order if the saved run had a single group."""
    files = [file.optim for file in experts.optims.values() if file.optim]
    if len(live) < 2 or not files or any(len(optim.groups) > 1 for optim in files):
        return live
    owned = {strip_compiled(name): is_owned for group in live for name, is_owned in group}
    return [[(name, owned[name]) for name in dict.fromkeys(order.values()) if name in owned]]


def _name_part(
    experts: ExpertFiles, save: Save, mp: int, ep: int, file: FileHeader, live: GroupNames | None
) -> NamedOptimizer:
    """Name the parameters of one file's optimizer."""
    header, optim = save.models[mp][0], file.optim or save.optim(mp)
    live_names = {strip_compiled(name) for group in live or () for name, _ in group}
    tensors = {name: (header, piece) for name, piece in read_module(save, header, live_names).items()}
    sharing = experts.list_sharing(save, mp)
    for (_, _, holder), expert in experts.files.items():
        if holder in sharing:
            tensors |= {name: (expert, piece) for name, piece in (expert.layer or {}).items()}
    shapes = {name: piece.shape for name, (_, piece) in tensors.items()}
    fused = _find_fused(save.model(mp).facts.get("placements", {}), ep, shapes)
    shapes |= {name: (len(parts), *next(iter(parts.values()))) for name, parts in fused.items()}
    if experts.optims and live is not None:
        live = _pick_live(save, live, fused, shapes, len(optim.groups))
    groups = fit_groups(optim, save.model(mp), shapes, live, save.path(file))
    return NamedOptimizer(file, optim, groups, shapes, tensors, mp, ep, fused)


def _find_fused(layers: Mapping[str, Placement], ep: int, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Map AutoEP's fused parameters of an expert-parallel rank to experts with shapes."""
    placements = {strip_compiled(layer): experts[ep : ep + 1] for layer, experts in layers.items()}
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
    """Reduce live groups to one saved rank's parameters, with experts fused."""
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


def _assign(experts: ExpertFiles, save: Save, live: GroupNames, ep: int, order: ModuleOrder | None) -> list[GroupNames]:
    """Divide live groups (of ``ep`` live ranks) among saved expert-parallel ranks.

    Raises:
        MismatchError: the files do not record which rank had which experts.
    """
    files = list(experts.optims.values())
    for file in files:
        groups = file.optim.groups if file.optim else ()
        if len({*map(find_label, groups)} - {""}) > 1:
            raise MismatchError(
                "stage 0 does not save the expert-parallel degree of each layer, and this save has several such "
                "degrees. Load with load_optimizer_states=False; or, if every layer has its saved degree and every "
                'param group its saved place, set "checkpoint": {"universal": false} for DeepSpeed\'s own load, which '
                "goes by their order.",
                path=save.path(file),
            )
    assigned: list[list[list[tuple[str, bool]]]] = [[] for _ in range(_count_expert_ranks(experts, save))]
    for group in live:
        owned = dict(group)
        try:
            is_in_order = order is None or order.keeps_module_order(group)
            parts = assign_experts(list(owned), len(assigned), ep, ordered=is_in_order)
        except ValueError as error:
            raise MismatchError(
                f"{error}. Stage 0 saves no parameter names: give the optimizer "
                "the experts in the module's order, or load with load_optimizer_states=False.",
                path=save.path(files[0]),
            ) from error
        for rank_groups, names in zip(assigned, parts, strict=True):
            rank_groups.append([(name, owned[name]) for name in names])
    return [*assigned]
