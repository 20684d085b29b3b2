"""The target of a checkpoint at given degrees, without an engine: what each rank's buffers would hold.

What only a live model tells is assumed: parameters in the saved order, tensor-parallel parts of equal size, pipeline
stages as saved or of near equal bytes (:mod:`.split`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, TIED, Atom, AtomicIndex, ParamKey, count
from ..experts import read_name
from ..flat import FlatBuffer, Shape, join_parameters, join_reserved
from ..patterns import RuleSet
from ..plan.derive import rename_all
from ..plan.match import Match, pick_instance
from ..plan.predicted import predict_renames
from ..plan.renames import RemappedIndex
from ..plan.settling import Shapes, list_weights, settle_index
from ..plan.wants import HeldBuffer, Layouts, TargetLayout, Wants, join_states, list_wants
from .degrees import Degrees
from .experts import Layers, PlannedGroup, plan_groups, spread_layers
from .split import Stages, find_layer, place_stages

EQUAL = "Tensor-parallel ranks hold equal parts; the live model's own shapes count in the load."
EXPERTS = "Every rank holds all experts (expert-parallel degree 1)."
SPREAD = "Experts follow each other on expert-parallel ranks; their param groups are as DeepSpeed makes them."
ORDER = "Parameters lie in the flat buffers in the order in which they were saved."


@dataclass(frozen=True, slots=True)
class ModelRank:
    """What the data-parallel ranks of one model-parallel rank hold together.

    Attributes:
        match: its parameters, of several pipeline stages' the instance that this one takes.
        layout: as the first of them holds it; the others hold other partitions.
    """

    match: Match
    layout: TargetLayout

    @property
    def buffers(self) -> tuple[HeldBuffer, ...]:
        """All buffers."""
        return (*self.layout.flats, *self.layout.tensors)


@dataclass(frozen=True, slots=True)
class ForecastTarget:
    """A run of any topology; ranks are numbered by pipeline stage, then data-, then tensor-parallel rank.

    Attributes:
        index: the checkpoint.
        degrees: of the run.
        model_ranks: by model-parallel rank ``stage * tp + tp_rank``.
        layouts: how source and target cut each parameter, by name; empty where neither cuts any.
        atoms: what is taken of each parameter, the weight first.
        assumed: what only the live model tells, and what was assumed instead.
        origin: what settled the patterns → how many parameters.
    """

    index: AtomicIndex
    degrees: Degrees
    model_ranks: tuple[ModelRank, ...]
    layouts: Layouts
    atoms: Mapping[ParamKey, tuple[Atom, ...]]
    assumed: tuple[str, ...]
    origin: Mapping[str, int]

    @property
    def ranks(self) -> int:
        """World size."""
        return self.degrees.world

    def place(self, rank: int) -> tuple[int, int, int]:
        """(pipeline stage, rank among those that ZeRO partitions over, tensor-parallel rank)."""
        rest, tp_rank = divmod(rank, self.degrees.tp)
        stage, dp_rank = divmod(rest, self.degrees.shards)
        return stage, dp_rank, tp_rank

    def model_rank(self, rank: int) -> ModelRank:
        """The model-parallel rank of a rank."""
        stage, _, tp_rank = self.place(rank)
        return self.model_ranks[stage * self.degrees.tp + tp_rank]

    def wants(self, rank: int) -> Wants:
        """What a rank wants of the checkpoint."""
        held, (_, dp_rank, _) = self.model_rank(rank), self.place(rank)
        flats, tensors = (
            [replace(each, part=each.buffer.find_part(dp_rank)) for each in buffers if each.buffer.is_on(dp_rank)]
            for buffers in (held.layout.flats, held.layout.tensors)
        )
        return list_wants(self.index, TargetLayout(flats, tensors), held.match, self.layouts, with_states=True)

    def list_params(self) -> list[ParamKey]:
        """The checkpoint's parameters that some rank holds."""
        held = (part.match.params[name] for part in self.model_ranks for b in part.buffers for name in b.buffer.names)
        return list(dict.fromkeys(held))

    def count_needed(self) -> int:
        """Bytes of the checkpoint that all ranks together hold afterwards, replicas included."""
        return sum(
            count(shape) * self._weigh(held.match.params[name]) * each.buffer.count_replicas(self.degrees.shards)
            for held in self.model_ranks
            for each in held.buffers
            for name, shape in zip(each.buffer.names, each.buffer.shapes, strict=True)
        )

    def _weigh(self, param: ParamKey) -> int:
        """Bytes per element of a parameter over its states; every replica whose mean is taken counts."""
        layouts = self.layouts.get(param.name)
        times = len(layouts[0].shards) if layouts is not None and layouts[0].mean else 1
        return sum(ITEMSIZE[atom.dtype] for atom in self.atoms[param]) * times

    def measure_engine(self, rank: int) -> int:
        """Bytes of the engine's own buffers on a rank: masters, optimizer states, the model's copies, other tensors."""
        held, degrees, dp_rank = self.model_rank(rank), self.degrees, self.place(rank)[1]
        total = sum(
            each.buffer.partition * sum(ITEMSIZE[dtype] for dtype in (each.dtype, *each.states.values()))
            for each in held.buffers
            if each.buffer.is_on(dp_rank)
        )
        if degrees.traits.has_copies:
            buffers = [each.buffer for each in held.layout.flats if each.buffer.is_on(dp_rank)]
            copies = sum(each.partition * (1 if each.by_parameter else each.parts) for each in buffers)
            total += copies * ITEMSIZE[degrees.precision]
        return total


def predict_target(
    index: AtomicIndex,
    degrees: Degrees,
    rules: Sequence[RuleSet] = (),
    *,
    shapes: Shapes | None = None,
    stages: Stages | None = None,
) -> ForecastTarget:
    """The target of a checkpoint at some degrees.

    Args:
        rules: the user's.
        shapes: per name the local shape on each tensor-parallel rank, where a live model tells.
        stages: which pipeline stages hold which names, where that is known.

    Raises:
        MismatchError: parameters whose pattern nothing settles, or that cannot be cut; too few layers; experts
            where no engine has them.
    """
    made = predict_renames(index, rules, degrees.experts)
    index = rename_all(made.index, made.renamed)
    groups, others, atoms = list_groups(index), list_others(index), _list_atoms(index)
    names = [name for group in groups for name in group] + others
    layers = spread_layers(index, names, degrees)
    local, layouts, origin = _settle(made, degrees, names, rules, shapes)
    assumed = [EQUAL] if index.run.topology.tp != degrees.tp and shapes is None else []
    assumed += [SPREAD if max(degrees.ep) > 1 else EXPERTS] if layers else []
    if stages is None:
        weights = {name: sum(atom.nbytes for atom in atoms[ParamKey(name)]) for name in names}
        stages, how = place_stages(index, names, weights, degrees.pp)
        assumed[:0] = [f"Pipeline stages are unknown without the model; taken are {how}."] if how else []
    hypers = [group.hyper for group in index.run.groups] or [{}]

    def lay_out(stage: int, tp_shard: int) -> ModelRank:
        shapes = {name: held[tp_shard] for name, held in local.items() if stage in stages[name]}
        match = Match(
            {name: pick_instance(index, name, stages[name].index(stage), len(stages[name])) for name in shapes}
        )
        held = [[name for name in names if count(shapes.get(name, (0,)))] for names in groups]
        grouped = plan_groups(list(zip(held, hypers, strict=True)), layers, shapes, degrees.max_group)
        planned = [(group, tuple(degrees.traits.list_whole(group.hyper))) for group in grouped]
        flats = [
            HeldBuffer(flat, 0, tp_shard, degrees.master, join_states(index, flat, match), whole=whole)
            for group, whole in planned
            for flat in _lay_group(group, shapes, degrees)
        ]
        tensors = [
            HeldBuffer(
                _lay_tensor(name, shapes[name], index, degrees, layers), 0, tp_shard, atoms[match.params[name]][0].dtype
            )
            for name in others
            if name in shapes
        ]
        return ModelRank(match, TargetLayout(flats, tensors))

    held = tuple(lay_out(stage, tp_shard) for stage in range(degrees.pp) for tp_shard in range(degrees.tp))
    return ForecastTarget(index, degrees, held, layouts, atoms, (*assumed, ORDER), origin)


def _lay_tensor(name: str, shape: Shape, index: AtomicIndex, degrees: Degrees, layers: Layers) -> FlatBuffer:
    """ZeRO 3 cuts parameters that it does not train as well; the module's buffers are whole on every rank."""
    if degrees.zero == 3 and name not in index.model.buffers:
        return join_reserved(0, (name,), (shape,), degrees.shards)
    read = read_name(name)
    ranks = layers[read.layer].find_ranks(read.number) if read else None
    return replace(join_parameters(0, (name,), (shape,)), ranks=ranks)


def _list_atoms(index: AtomicIndex) -> dict[ParamKey, tuple[Atom, ...]]:
    """What a load takes of each parameter: the master and the states, or the module's tensor."""
    found: dict[ParamKey, list[Atom]] = {}
    for key, atom in index.stored.atoms.items():
        if key.state != COPY and not (key.state == MODULE and index.find(key.name, MASTER, key.instance)):
            found.setdefault(key.param, []).append(atom)
    return {param: tuple(sorted(held, key=lambda atom: atom.state != MASTER)) for param, held in found.items()}


def _settle(
    made: RemappedIndex, degrees: Degrees, names: Sequence[str], rules: Sequence[RuleSet], shapes: Shapes | None
) -> tuple[Shapes, Layouts, dict[str, int]]:
    """Local shapes of the target, how both sides cut each parameter, and what settled that; rules go by saved names."""
    saved = {name: made.renamed.get(name, name) for name in names}
    if made.index.run.topology.tp == degrees.tp == 1:
        weights = list_weights(made.index)
        return shapes or {name: (weights[old].shape,) for name, old in saved.items()}, {}, {}
    degree = degrees.tp if shapes is None else None
    settled = settle_index(made.index, rules, shapes, names=list(saved.values()), degree=degree).require()
    layouts = {name: settled.pairs[old] for name, old in saved.items()}
    local = {name: want.local_shapes for name, (_, want) in layouts.items()}
    return local, layouts, dict(Counter(settled.origin.values()))


def list_groups(index: AtomicIndex) -> list[list[str]]:
    """Trained parameters per param group in the saved order, by name."""
    trained = {key.name for key in index.stored.atoms if key.state == MASTER}
    groups = [[name for name in group.names if name in trained] for group in index.run.groups] or [[]]
    groups[-1] += sorted(trained - {name for group in groups for name in group})
    # Stages may hold layers in any order; a whole pipeline has its tied modules in front, then layer after layer.
    return [sorted(names, key=_rank_layer) for names in groups] if index.run.topology.pp > 1 else groups


def _rank_layer(name: str) -> tuple[bool, int]:
    layer = find_layer(name)
    return not name.startswith(TIED), -1 if layer is None or name.startswith(TIED) else layer


def list_others(index: AtomicIndex) -> list[str]:
    """Frozen and unoptimized parameters, and buffers."""
    others = dict.fromkeys(key.name for key in index.stored.atoms if key.state == MODULE)
    return [name for name in others if not index.find(name, MASTER)]


def _lay_group(group: PlannedGroup, local: Mapping[str, Shape], degrees: Degrees) -> Iterator[FlatBuffer]:
    """The flat buffers of a param group on a model-parallel rank, as far as the same data-parallel ranks hold it."""
    if not group.tensors:
        return
    # A rank's own parameter goes by the name of the first that lies in it.
    parts = {tensor[0]: {name: local[name] for name in tensor} for tensor in group.tensors}
    shapes = [(len(held), *held[own]) if len(held) > 1 else held[own] for own, held in parts.items()]
    ranks = len(group.ranks or range(degrees.shards))
    for buffer in degrees.traits.foresee(group.number, list(parts), shapes, ranks, degrees.sub_group):
        yield replace(buffer.split(parts), ranks=group.ranks)
