"""What a live engine would tell of itself, foreseen from the checkpoint: names, local shapes, patterns, stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..atoms import COPY, AtomicIndex
from ..patterns import Layout, RuleSet
from ..plan.settling import Shapes, list_weights, settle_index
from .degrees import Degrees
from .split import Stages, place_stages
from .virtual import VirtualTarget, list_extras, list_groups, make_virtual

Layouts = Mapping[str, tuple[Layout, Layout]]

EQUAL = "Tensor-parallel ranks hold equal parts; the live model's own shapes count in the load."
ORDER = "Parameters lie in the flat buffers in the order in which they were saved."


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A virtual target and how it came about.

    Attributes:
        target: it.
        assumed: what only the live model tells, and what was assumed instead.
        origin: what settled the patterns → how many parameters.
    """

    target: VirtualTarget
    assumed: tuple[str, ...]
    origin: dict[str, int]


def foresee_target(
    index: AtomicIndex,
    degrees: Degrees,
    rules: Sequence[RuleSet] = (),
    *,
    shapes: Shapes | None = None,
    stages: Stages | None = None,
) -> Foreseen:
    """The target of a checkpoint at some degrees.

    Args:
        rules: the user's.
        shapes: of a live model, where they are known.
        stages: which pipeline stages hold which names, where that is known.

    Raises:
        MismatchError: parameters whose pattern nothing settles, or that cannot be cut; too few layers.
    """
    names = [name for group in list_groups(index) for name in group] + list_extras(index)
    found, layouts, origin = _settle(index, degrees, names, rules, shapes)
    assumed = []
    if stages is None:
        stages, how = place_stages(index, names, _weigh(index, names), degrees.pp)
        if how:
            assumed.append(f"Pipeline stages are unknown without the model; taken are {how}.")
    if index.topology.tp != degrees.tp and shapes is None:
        assumed.append(EQUAL)
    return Foreseen(make_virtual(index, degrees, found, layouts, stages), (*assumed, ORDER), origin)


def _weigh(index: AtomicIndex, names: Iterable[str]) -> dict[str, int]:
    """Bytes of each parameter and its states."""
    weights = dict.fromkeys(names, 0)
    for key, atom in index.atoms.items():
        if key.state != COPY and key.instance == 0 and key.name in weights:
            weights[key.name] += atom.nbytes
    return weights


def _settle(
    index: AtomicIndex, degrees: Degrees, names: Sequence[str], rules: Sequence[RuleSet], shapes: Shapes | None
) -> tuple[Shapes, Layouts, dict[str, int]]:
    """Local shapes of the target, how both sides cut each parameter, and what settled that."""
    if index.topology.tp == degrees.tp == 1:
        weights = list_weights(index)
        return shapes or {name: (weights[name].shape,) for name in names}, {}, {}
    degree = degrees.tp if shapes is None else None
    settled = settle_index(index, rules, shapes, names=names, degree=degree).require()
    local = {name: want.local_shapes for name, (_, want) in settled.pairs.items()}
    return local, settled.pairs, dict(Counter(settled.origin.values()))
