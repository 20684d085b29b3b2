"""Stage 0 → atoms: FP16_Optimizer (fp16 and bf16), FP16_UnfusedOptimizer, and the raw torch optimizer in fp32.

These files name no parameters in the optimizer's part: states are positional, as in torch's own
``Optimizer.load_state_dict``. The live engine's param groups give the names; shapes have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..atoms import MASTER, GroupInfo, count, strip_compiled
from ..errors import MismatchError, shorten
from ..plan.geometry import Cut, accumulate_offsets
from ..topology import FlatGroup
from .builder import Builder
from .headers import FileHeader, Holder, ModelHeader, OptimHeader, Piece

GroupNames = Sequence[Sequence[tuple[str, bool]]]
"""Per param group of the live optimizer: (parameter name, does the optimizer own it), in the user's order."""

_CHANGING = ("lr", "initial_lr", "step", "params", "param_names")
"""Fields of a param group that differ between a saved and a fresh optimizer."""


def build_stage0(
    builder: Builder, header: FileHeader, live: GroupNames | None, live_hyper: Sequence[Mapping[str, Any]] = ()
) -> tuple[FlatGroup, ...]:
    """Add masters and states of stage 0, named by the live param groups (whose hyper-parameters are ``live_hyper``).

    Raises:
        MismatchError: the live param groups do not fit the saved ones.
    """
    if header.model is None or header.model.optim is None or header.model.module is None:
        return ()
    optim, module = header.model.optim, {strip_compiled(k): v for k, v in header.model.module.items()}
    file = builder.file(builder.folder + "/" + header.name, header.size)
    groups = _name_groups(header.model, module, live, builder.files[file].path)
    if optim.names is None:
        _check_group_order(optim.groups, live_hyper, builder.files[file].path)
        _check_state_shapes(optim, groups, module, builder.files[file].path)
    frozen = _find_frozen(optim, groups, live)
    for names, hyper in zip(groups, optim.groups, strict=True):
        owned = tuple(name for name in names if count(module[name].shape) and name not in frozen)
        builder.groups.append(GroupInfo(owned, hyper))
        builder.shapes.update({name: module[name].shape for name in owned})
    if optim.kind == "torch":
        return _add_torch(builder, optim, groups, module, file)
    if optim.kind == "fp16_unfused":
        return _add_unfused(builder, optim, groups, module, file)
    return _add_fused(builder, optim, groups, module, file)


def _find_frozen(optim: OptimHeader, groups: list[tuple[str, ...]], live: GroupNames | None) -> set[str]:
    """Parameters of the groups that the optimizer did not train: frozen here, and without states there."""
    frozen = {strip_compiled(name) for group in live or () for name, owned in group if not owned}
    names = [name for group in groups for name in group]
    if len(names) == len(optim.holders):
        frozen -= {name for name, holder in zip(names, optim.holders, strict=True) if holder.states}
    return frozen


def _name_groups(
    model: ModelHeader, module: dict[str, Piece], live: GroupNames | None, path: str
) -> list[tuple[str, ...]]:
    """Names of the parameters of each saved group, in saved order."""
    optim = model.optim
    if optim is None or (live is None and optim.names is None):
        raise MismatchError(f"{path}: stage 0 saves no parameter names; a live engine is needed to name them.")
    if optim.names is not None:
        return [tuple(strip_compiled(name) for name in group) for group in optim.names]
    sizes = _group_sizes(optim)
    for only_owned in (False, True):
        named = [
            tuple(strip_compiled(name) for name, owned in group if owned or not only_owned) for group in live or ()
        ]
        if _fits(named, sizes, optim, module):
            return named
    raise MismatchError(f"{path}: {_tell_misfit(model, module, live or (), sizes)}")


def _tell_misfit(model: ModelHeader, module: dict[str, Piece], live: GroupNames, sizes: list[int]) -> str:
    known = {strip_compiled(name) for name in model.buffers}
    names = [strip_compiled(name) for group in live for name, _ in group]
    missing, extra = [n for n in names if n not in module], [n for n in module if n not in {*names, *known}]
    if missing:
        also = f"; in the checkpoint, not in this run's optimizer: {shorten(extra)}" if extra else ""
        return f"the model and the checkpoint differ: not in the checkpoint: {shorten(missing)}{also}."
    fused = model.optim is not None and model.optim.kind == "fp16_fused"
    groups = " | ".join(f"[{shorten([name for name, _ in group], 6)}]" for group in live)
    others = f" Parameters that are in no group here: {shorten(extra)}." if extra else ""
    return (
        f"the param groups differ. Checkpoint: groups of {sizes} {'elements' if fused else 'parameters'}; this run: "
        f"{groups}, or their shapes differ.{others} Stage 0 saves no parameter names, so the groups "
        "must be made as in the saved run; or load with load_optimizer_states=False."
    )


def _check_group_order(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse groups that look like the saved ones in another order: nothing else would tell equal shapes apart.

    Raises:
        MismatchError: the same hyper-parameters, permuted.
    """
    if len(saved) != len(live):
        return
    keys = {key for group in (*saved, *live) for key in group} - set(_CHANGING)
    shared = sorted(key for key in keys if all(key in group for group in (*saved, *live)))
    before, now = ([tuple(repr(group[key]) for key in shared) for group in groups] for groups in (saved, live))
    if before != now and sorted(before) == sorted(now):
        raise MismatchError(
            f"{path}: this run's param groups have the saved groups' hyper-parameters in another order "
            f"({', '.join(shared)}). Stage 0 saves no parameter names, so make the groups in the saved order."
        )


def _check_state_shapes(optim: OptimHeader, groups: list[tuple[str, ...]], module: dict[str, Piece], path: str) -> None:
    """Refuse states that have the shapes of the parameters in another order.

    Raises:
        MismatchError: naming the first parameter whose states are of another one's shape.
    """
    names = [name for group in groups for name in group]
    if optim.kind == "fp16_fused" or len(names) != len(optim.holders):
        return
    for state in sorted({state for holder in optim.holders for state in holder.states}):
        pairs = [(n, h.states[state].shape) for n, h in zip(names, optim.holders, strict=True) if state in h.states]
        expected = [module[name].shape for name, _ in pairs]
        found = [shape for _, shape in pairs]
        if found != expected and sorted(found) == sorted(expected):
            name, shape = next(pair for pair in pairs if pair[1] != module[pair[0]].shape)
            raise MismatchError(
                f"{path}: {name} has shape {module[name].shape}, the {state} saved at its place has {shape}. Stage 0 "
                "saves no parameter names: this run gives its parameters to the optimizer in another order than the "
                "saved run did. Use the saved run's order."
            )


def _group_sizes(optim: OptimHeader) -> list[int]:
    if optim.kind == "fp16_fused":
        return [master.numel for master in optim.masters]
    return [len(group) for group in optim.params]


def _fits(named: list[tuple[str, ...]], sizes: list[int], optim: OptimHeader, module: dict[str, Piece]) -> bool:
    if len(named) != len(sizes) or any(name not in module for group in named for name in group):
        return False
    if optim.kind == "fp16_fused":
        return sizes == [sum(module[name].numel for name in group) for group in named]
    if sizes != [len(group) for group in named]:
        return False
    if optim.kind == "fp16_unfused":
        flat = [name for group in named for name in group]
        return all(m.shape == module[name].shape for m, name in zip(optim.masters, flat, strict=True))
    return True


def _add_torch(
    builder: Builder, optim: OptimHeader, groups: list[tuple[str, ...]], module: dict[str, Piece], file: int
) -> tuple[FlatGroup, ...]:
    """fp32: the model's own parameters are the masters."""
    names = [name for group in groups for name in group]
    for name, holder in zip(names, optim.holders, strict=True):
        _add_whole(builder, name, module[name], holder, file)
    return ()


def _add_whole(builder: Builder, name: str, master: Piece, holder: Holder, file: int) -> None:
    """A parameter with a master and states of its own; frozen ones, which older releases hold as well, are left."""
    if name in builder.shapes:
        builder.add(name, MASTER, master.shape, file, master)
        states = holder if master.shape else holder.of_zero_dim()
        builder.add_holder([Cut(name, 0, master.numel, 0)], states, master.numel, file)


def _add_unfused(
    builder: Builder, optim: OptimHeader, groups: list[tuple[str, ...]], module: dict[str, Piece], file: int
) -> tuple[FlatGroup, ...]:
    names = [name for group in groups for name in group]
    for name, master, holder in zip(names, optim.masters, optim.holders, strict=True):
        _add_whole(builder, name, master, holder, file)
    return tuple(
        FlatGroup(index, (name,), (module[name].numel,), module[name].numel)
        for index, group in enumerate(builder.groups)
        for name in group.names
    )


def _add_fused(
    builder: Builder, optim: OptimHeader, groups: list[tuple[str, ...]], module: dict[str, Piece], file: int
) -> tuple[FlatGroup, ...]:
    flats = []
    for index, group in enumerate(builder.groups):
        numels = [module[name].numel for name in groups[index]]
        placed = zip(groups[index], numels, accumulate_offsets(numels), strict=True)
        cuts = [Cut(name, 0, numel, offset) for name, numel, offset in placed if name in builder.shapes]
        for cut in cuts:
            part = optim.masters[index].narrow(cut.offset, cut.numel)
            builder.add(cut.name, MASTER, builder.shapes[cut.name], file, part)
        builder.add_holder(cuts, optim.holders[index], sum(numels), file)
        owned = tuple(module[name].numel for name in group.names)
        flats.append(FlatGroup(index, group.names, owned, sum(numels)))
    return tuple(flats)
