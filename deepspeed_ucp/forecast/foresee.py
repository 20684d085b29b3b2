"""What a live engine would tell of itself, foreseen from the checkpoint: names, local shapes, patterns, stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..atoms import COPY, MASTER, MODULE, AtomicIndex
from ..patterns import Layout, Replicate, RuleSet, from_universal_info, settle
from ..patterns.recorded import from_recorded
from ..plan.match import Shape
from .degrees import Degrees
from .split import Stages, place_stages
from .virtual import VirtualTarget, list_extras, list_groups, make_virtual

Shapes = Mapping[str, tuple[Shape, ...]]
"""Per name the local shape on each tensor-parallel rank."""
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
    source = {name: _local_shapes(index, name) for name in names}
    if index.topology.tp == degrees.tp == 1:
        return shapes or source, {}, {}
    equal = {name for name in names if name in index.buffers and _is_equal(index, name, degrees.tp)}
    asked = sorted(name for name in names if name not in equal)
    degree = degrees.tp if shapes is None else None
    settled = settle(asked, source, shapes, _list_rules(index, rules), index.hints, degree=degree)
    layouts = {name: (have, want) for name, (have, want) in settled.layouts.items() if want is not None}
    for name in equal:
        have = source[name]
        layouts[name] = (Replicate().join(have), Replicate().cut(have[0], have[:1] * degrees.tp))
    local = {name: want.local_shapes for name, (_, want) in layouts.items()}
    return local, layouts, dict(Counter(settled.origin.values()))


def _list_rules(index: AtomicIndex, rules: Sequence[RuleSet]) -> list[RuleSet]:
    """The user's rules, then the checkpoint's own."""
    found = [*rules, from_recorded(index.recorded)] if index.recorded else list(rules)
    if info := index.hints.get("universal_checkpoint_info"):
        found.append(from_universal_info(info, index.topology.tp))
    return found


def _local_shapes(index: AtomicIndex, name: str) -> tuple[Shape, ...]:
    atom = index.find(name, MASTER) or index.find(name, MODULE)
    return tuple(shard.shape for shard in atom.shards) if atom else ()


def _is_equal(index: AtomicIndex, name: str, tp: int) -> bool:
    """A buffer with the same bytes on all ranks is held whole by every rank of another degree."""
    atom = index.find(name, MODULE)
    shards = atom.shards if atom else ()
    records = [index.records[fragment.record] for shard in shards for fragment in shard.fragments]
    sums = {(record.nbytes, record.crc) for record in records}
    alike = len({shard.shape for shard in shards}) == 1 and len(records) == len(shards)
    return len(shards) != tp and alike and len(sums) == 1 and None not in next(iter(sums))
