"""Names for the positional optimizer states of stage 0: the live param groups, held against sizes and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..atoms import count, strip_compiled
from ..errors import MismatchError, shorten
from .headers import FileHeader, ModelHeader, OptimHeader, Piece

GroupNames = Sequence[Sequence[tuple[str, bool]]]
"""Per param group of the live optimizer: (parameter name, does the optimizer own it), in the user's order."""

NamedGroups = str | Sequence[Sequence[str]]
"""The same without a live engine: ``"module"`` for ``model.parameters()`` in one group, or names per group."""

CHANGING = ("lr", "initial_lr", "step", "params", "param_names")
"""Fields of a param group that differ between a saved and a fresh optimizer."""


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """What one model-parallel rank's optimizer holds.

    Attributes:
        header, optim: the rank's model states, and the optimizer's in it.
        groups: names of the parameters of each saved group, in saved order.
        shapes: their local shapes.
        tensors: the model's own tensors with the files that hold them.
    """

    header: FileHeader
    optim: OptimHeader
    groups: list[tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, tuple[FileHeader, Piece]]

    @property
    def names(self) -> list[str]:
        """Names of all groups, in saved order."""
        return [name for group in self.groups for name in group]

    def find_lost(self) -> list[str]:
        """Parameters whose master would be the model's own tensor, which no file holds."""
        return [name for name in self.names if name not in self.tensors] if self.optim.kind == "torch" else []


def fit_groups(
    optim: OptimHeader, model: ModelHeader, module: Mapping[str, Piece], live: GroupNames | None, path: str
) -> list[tuple[str, ...]]:
    """Names of the parameters of each saved group, in saved order.

    Raises:
        MismatchError: the live groups do not fit.
    """
    if optim.names is not None:
        return [tuple(strip_compiled(name) for name in group) for group in optim.names]
    shapes = {name: piece.shape for name, piece in module.items()}
    for only_owned in (False, True):
        named = pick_names(live or (), only_owned)
        # Wrappers leave out what has no element on this tensor-parallel rank (fewer rows than ranks).
        held = [tuple(name for name in group if count(shapes.get(name, (1,)))) for group in named]
        for names in (named, held):
            if fits(names, optim, shapes):
                return names
    raise MismatchError(f"{path}: {tell_misfit(optim, model.buffers, shapes, live or ())}")


def pick_names(live: GroupNames, only_owned: bool) -> list[tuple[str, ...]]:
    """The live groups by atom names; releases differ in whether frozen parameters are in the saved ones."""
    return [tuple(strip_compiled(name) for name, owned in group if owned or not only_owned) for group in live]


def tell_misfit(
    optim: OptimHeader, buffers: Sequence[str], shapes: Mapping[str, tuple[int, ...]], live: GroupNames
) -> str:
    """Why live groups do not name a saved optimizer's states."""
    known = {strip_compiled(name) for name in buffers}
    names = [strip_compiled(name) for group in live for name, _ in group]
    missing, extra = [n for n in names if n not in shapes], [n for n in shapes if n not in {*names, *known}]
    if missing:
        also = f"; in the checkpoint, not in this run's optimizer: {shorten(extra)}" if extra else ""
        return f"the model and the checkpoint differ: not in the checkpoint: {shorten(missing)}{also}."
    groups = " | ".join(f"[{shorten([name for name, _ in group], 6)}]" for group in live)
    others = f" Parameters that are in no group here: {shorten(extra)}." if extra else ""
    return (
        f"the param groups differ. Checkpoint: groups of {group_sizes(optim)} "
        f"{'elements' if optim.kind == 'fp16_fused' else 'parameters'}; this run: "
        f"{groups}, or their shapes differ.{others} Stage 0 saves no parameter names, so the groups "
        "must be made as in the saved run; or load with load_optimizer_states=False."
    )


def check_group_order(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse groups that look like the saved ones in another order: nothing else would tell equal shapes apart.

    Raises:
        MismatchError: the same hyper-parameters, permuted.
    """
    if len(saved) != len(live):
        return
    keys = {key for group in (*saved, *live) for key in group} - set(CHANGING)
    shared = sorted(key for key in keys if all(key in group for group in (*saved, *live)))
    before, now = ([tuple(repr(group[key]) for key in shared) for group in groups] for groups in (saved, live))
    if before != now and sorted(before) == sorted(now):
        raise MismatchError(
            f"{path}: this run's param groups have the saved groups' hyper-parameters in another order "
            f"({', '.join(shared)}). Stage 0 saves no parameter names, so make the groups in the saved order."
        )


def check_state_shapes(part: NamedOptimizer, path: str) -> None:
    """Refuse states that have the shapes of the parameters in another order.

    Raises:
        MismatchError: naming the first parameter whose states are of another one's shape.
    """
    optim, names = part.optim, part.names
    if optim.kind == "fp16_fused" or len(names) != len(optim.holders):
        return
    for state in sorted({state for holder in optim.holders for state in holder.states}):
        pairs = [(n, h.states[state].shape) for n, h in zip(names, optim.holders, strict=True) if state in h.states]
        expected = [part.shapes[name] for name, _ in pairs]
        found = [shape for _, shape in pairs]
        if found != expected and sorted(found) == sorted(expected):
            name, shape = next(pair for pair in pairs if pair[1] != part.shapes[pair[0]])
            raise MismatchError(
                f"{path}: {name} has shape {part.shapes[name]}, the {state} saved at its place has {shape}. Stage 0 "
                "saves no parameter names: this run gives its parameters to the optimizer in another order than the "
                "saved run did. Use the saved run's order."
            )


def group_sizes(optim: OptimHeader) -> list[int]:
    """Per saved group its number of elements (FP16_Optimizer) or parameters."""
    if optim.kind == "fp16_fused":
        return [master.numel for master in optim.masters]
    return [len(group) for group in optim.params]


def fits(named: Sequence[Sequence[str]], optim: OptimHeader, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether groups of names have the sizes of the saved groups, and the shapes where they are saved."""
    sizes = group_sizes(optim)
    if len(named) != len(sizes) or any(name not in shapes for group in named for name in group):
        return False
    if optim.kind == "fp16_fused":
        return sizes == [sum(count(shapes[name]) for name in group) for group in named]
    if sizes != [len(group) for group in named]:
        return False
    if optim.kind == "fp16_unfused":
        flat = [name for group in named for name in group]
        return all(m.shape == shapes[name] for m, name in zip(optim.masters, flat, strict=True))
    return True
