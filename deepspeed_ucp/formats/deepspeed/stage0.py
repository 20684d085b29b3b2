"""Build atoms of stage 0 (FP16_Optimizer, FP16_UnfusedOptimizer, torch in fp32).

The optimizer's states are positional, as in torch's ``Optimizer.load_state_dict``: the live engine's param groups name
the parameters, and their shapes must agree.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat

from ...errors import MismatchError, shorten
from ...model.flat import FlatBuffer, Shape
from ...model.index import GroupInfo
from ...model.storage import MASTER, TIED, count, strip_compiled
from .builder import Builder, SavedRank, create_ranks
from .headers import OptimHeader, Piece, TensorStates
from .module import add_tensors, read_module
from .naming import GroupNames, NamedOptimizer, Naming, check_order, compare_modules, fit_groups, name_groups
from .placement import place_layers
from .save import Save

logger = logging.getLogger("deepspeed_ucp")


def build_stage0(builder: Builder, naming: Naming) -> None:
    """Add the module's tensors, and the optimizer's masters and states by ``naming``."""
    save, naming = builder.save, naming.use_saved_names(builder.save)
    live = naming.live
    wrapper = save.model(0).optim
    if wrapper is None or wrapper.traits.is_cut or not naming.optimizer:  # BF16_Optimizer has separate files
        owned = [model.owned for model in save.first_models]  # ZeRO records the trained parameters
        builder.ranks, builder.instances = create_ranks(save, [list(shapes) for shapes in owned])
        for rank, shapes in zip(builder.ranks, owned, strict=True):
            rank.shapes.update(shapes)
        tied = {strip_compiled(name) for group in live or () for name, _ in group if name.startswith(TIED)}
        add_tensors(builder, tied)
        _warn_lost(save, builder.renumber_instances())
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
    parts = _name_optimizers(save, live, naming)
    for part in parts:
        check_order(part, naming.hyper, save.path(part.header))
    trained = [_find_trained_shapes(part, live) for part in parts]
    losses = [part.find_lost() for part in parts]
    _warn_lost(save, dict.fromkeys(chain(*losses)))
    owned = [
        {n: shape for n, shape in shapes.items() if n not in lost} for shapes, lost in zip(trained, losses, strict=True)
    ]
    if any(extension.add_optimizers(builder, parts, owned) for extension in save.extensions):
        return
    builder.ranks, builder.instances = create_ranks(save, [list(names) for names in owned])
    for rank, part, shapes, ordered in zip(builder.ranks, parts, owned, trained, strict=True):
        add_optimizer(builder, rank, part, shapes, ordered)


def _name_optimizers(save: Save, live: GroupNames | None, naming: Naming) -> list[NamedOptimizer]:
    if live is None and (save.optim(0).names is None or save.is_pipeline):
        raise MismatchError(
            "stage 0 saves no parameter names, and there is no live engine to name them. Describe the optimizer's "
            "param groups: --groups module for model.parameters() in one group, or --groups with a YAML or JSON file "
            "that lists the names of each group in order.",
            path=save.path(save.main),
        )
    if save.is_pipeline:
        return place_layers(save, naming, live or ())
    for extension in save.extensions:
        if parts := extension.name_optimizers(save, naming, live):
            return parts
    if live is not None and naming.order:
        live = compare_modules(save, naming).follow(live, naming.hyper)
    return [name_optimizer(save, mp, live) for mp in range(len(save.models))]


def name_optimizer(save: Save, mp: int, live: GroupNames | None) -> NamedOptimizer:
    """Name the parameters of the optimizer in a model-parallel rank's model states."""
    header, optim = save.models[mp][0], save.optim(mp)
    known = {strip_compiled(name) for group in live or () for name, _ in group}
    tensors = {name: (header, piece) for name, piece in read_module(save, header, known).items()}
    shapes = {name: piece.shape for name, (_, piece) in tensors.items()}
    groups = fit_groups(optim, save.model(mp), shapes, live, save.path(header))
    return NamedOptimizer(header, optim, groups, shapes, tensors, mp)


def _find_trained_shapes(part: NamedOptimizer, live: GroupNames | None) -> dict[str, Shape]:
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


def add_optimizer(
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
    """Return all parameters' states, with the right step for DeepSpeed's FusedAdam.

    FusedAdam counts the steps of a param group only at its last parameter; the others keep the initial 0
    (``ops/adam/fused_adam.py``). Its groups have a ``step`` of 0 and a ``bias_correction``.
    """
    tensors = list(optim.tensors)
    for number, group in enumerate(() if optim.traits.has_copies else optim.groups):
        if not ("bias_correction" in group and group.get("step") == 0):
            continue
        members = [index for index, owner in enumerate(optim.owners) if owner == number and tensors[index].states]
        steps = [tensors[index].scalars.get("step") for index in members]
        dtypes = {piece.dtype for index in members for piece in tensors[index].states.values()}
        if any(step != 0 for step in steps[:-1]) or len(dtypes) > 1:
            continue  # some parameters had no gradients at times, or there are several dtypes: separate counts
        for index in members:
            tensors[index] = replace(tensors[index], scalars={**tensors[index].scalars, "step": steps[-1]})
    return tensors


def _add_buffer(
    builder: Builder,
    rank: SavedRank,
    part: NamedOptimizer,
    local: FlatBuffer,
    master: Piece | None,
    states: TensorStates,
) -> FlatBuffer:
    """Add a buffer's master and states; return it with fused parameters separated.

    Without a master the model's tensors serve as masters. Older releases may have frozen parameters in the buffer.
    """
    buffer = local.split({name: part.list_parts(name) for name in local.names})
    cuts = [cut for cut in buffer.cuts(0) if cut.name in rank.shapes]
    if master is not None:
        builder.add_cuts(rank, MASTER, cuts, part.header, master)
    for cut in cuts if master is None else ():
        builder.add(rank, cut.name, MASTER, *part.tensors[cut.name])
    if not part.optim.traits.is_flat and not part.shapes[local.names[0]]:
        states = states.as_zero_dim()
    params = [rank.param(cut.name) for cut in cuts]
    for state, piece in builder.classify_states(params, states, buffer.partition, part.header).items():
        builder.add_cuts(rank, state, cuts, part.header, piece)
    return buffer
