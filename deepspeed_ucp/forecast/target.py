"""The target of a checkpoint at given degrees, without an engine: what each rank's buffers would hold.

What only a live model tells is assumed: parameters in the saved order, tensor-parallel parts of equal size, pipeline
stages as saved or of near equal bytes (:mod:`.split`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, Atom, AtomicIndex, ParamKey, count
from ..flat import FlatBuffer, Shape, join_parameters, join_reserved, reserve
from ..patterns import Layout, RuleSet
from ..plan.match import Match, pick_instance
from ..plan.settling import Shapes, list_weights, settle_index
from ..plan.wants import HeldBuffer, Layouts, TargetLayout, Wants, join_states, list_states, list_wants
from .degrees import Degrees
from .split import TIED, Stages, find_layer, place_stages

ALIGNMENT = 2
"""ZeRO 1/2 and BF16_Optimizer pad flat buffers to this times dp elements (``nccl_start_alignment_factor``)."""

EQUAL = "Tensor-parallel ranks hold equal parts; the live model's own shapes count in the load."
ORDER = "Parameters lie in the flat buffers in the order in which they were saved."


@dataclass(frozen=True, slots=True)
class ModelRank:
    """What the data-parallel ranks of one model-parallel rank hold together.

    Attributes:
        match: its parameters, of several pipeline stages' the instance that this one takes.
        flats: buffers that the optimizer owns.
        states: per flat buffer the optimizer states, with their dtypes.
        tensors: what no optimizer owns, a buffer each.
    """

    match: Match
    flats: tuple[FlatBuffer, ...]
    states: tuple[Mapping[str, str], ...]
    tensors: tuple[FlatBuffer, ...]


@dataclass(frozen=True, slots=True)
class ForecastTarget:
    """A run of any topology; ranks are numbered by pipeline stage, then data-, then tensor-parallel rank.

    Attributes:
        index: the checkpoint.
        degrees: of the run.
        model_ranks: by model-parallel rank ``stage * tp + tp_rank``.
        layouts: how source and target cut each parameter, by name; empty where neither cuts any.
        atoms: what is taken of each parameter, the weight first.
        weights: bytes per element of each parameter over its states; every replica whose mean is taken counts.
        assumed: what only the live model tells, and what was assumed instead.
        origin: what settled the patterns → how many parameters.
    """

    index: AtomicIndex
    degrees: Degrees
    model_ranks: tuple[ModelRank, ...]
    layouts: Layouts
    atoms: Mapping[ParamKey, tuple[Atom, ...]]
    weights: Mapping[ParamKey, int]
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

    def lay_out(self, rank: int) -> TargetLayout:
        """What a rank holds."""
        held, (_, dp_rank, tp_rank) = self.model_rank(rank), self.place(rank)
        flats = [
            HeldBuffer(flat, flat.find_part(dp_rank), self.degrees.master, states)
            for flat, states in zip(held.flats, held.states, strict=True)
        ]
        tensors = [HeldBuffer(each, each.find_part(dp_rank), self.find_dtype(held, each)) for each in held.tensors]
        return TargetLayout(tp_rank, flats, tensors)

    def find_dtype(self, held: ModelRank, tensor: FlatBuffer) -> str:
        """Of a tensor that no optimizer owns: as saved."""
        return self.atoms[held.match.params[tensor.names[0]]][0].dtype

    def wants(self, rank: int) -> Wants:
        """What a rank wants of the checkpoint."""
        match = self.model_rank(rank).match
        return list_wants(self.index, self.lay_out(rank), match, self.layouts, with_states=True)

    def measure_needed(self, rank: int) -> int:
        """Bytes of the checkpoint that a rank needs: those of its wants."""
        held, (_, dp_rank, _) = self.model_rank(rank), self.place(rank)
        cuts = (cut for buffer in (*held.flats, *held.tensors) for cut in buffer.cuts(buffer.find_part(dp_rank)))
        return sum(cut.numel * self.weights[held.match.params[cut.name]] for cut in cuts)

    def measure_engine(self, rank: int) -> int:
        """Bytes of the engine's own buffers on a rank: masters, optimizer states, the model's copies, other tensors."""
        held, degrees = self.model_rank(rank), self.degrees
        total = sum(tensor.partition * ITEMSIZE[self.find_dtype(held, tensor)] for tensor in held.tensors)
        for flat, states in zip(held.flats, held.states, strict=True):
            total += flat.partition * sum(ITEMSIZE[dtype] for dtype in (degrees.master, *states.values()))
            if degrees.wrapper != "torch":
                whole = flat.partition if flat.by_parameter else flat.partition * flat.parts
                total += whole * ITEMSIZE[degrees.precision]
        return total


def foretell_target(
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
        MismatchError: parameters whose pattern nothing settles, or that cannot be cut; too few layers.
    """
    groups, others = list_groups(index), list_others(index)
    names = [name for group in groups for name in group] + others
    local, layouts, origin = _settle(index, degrees, names, rules, shapes)
    assumed = [EQUAL] if index.run.topology.tp != degrees.tp and shapes is None else []
    if stages is None:
        stages, how = place_stages(index, names, _weigh_all(index, names), degrees.pp)
        assumed[:0] = [f"Pipeline stages are unknown without the model; taken are {how}."] if how else []
    lay_out = partial(_lay_model_rank, index, degrees, groups, others, stages, list_states(index))
    held = tuple(
        lay_out(stage, {name: shapes[tp_rank] for name, shapes in local.items()})
        for stage in range(degrees.pp)
        for tp_rank in range(degrees.tp)
    )
    atoms = _list_atoms(index)
    weights = {param: _weigh(taken, layouts.get(param.name)) for param, taken in atoms.items()}
    return ForecastTarget(index, degrees, held, layouts, atoms, weights, (*assumed, ORDER), origin)


def _lay_model_rank(
    index: AtomicIndex,
    degrees: Degrees,
    groups: Sequence[Sequence[str]],
    others: Sequence[str],
    stages: Stages,
    states: Mapping[ParamKey, Mapping[str, str]],
    stage: int,
    shapes: Mapping[str, Shape],
) -> ModelRank:
    """What a model-parallel rank holds, whose tensor-parallel rank has parameters of these ``shapes``."""
    local = {name: shape for name, shape in shapes.items() if stage in stages[name]}
    params = {name: pick_instance(index, name, stages[name].index(stage), len(stages[name])) for name in local}
    flats = [flat for number, names in enumerate(groups) for flat in _lay_group(number, names, local, degrees)]
    tensors = [_lay_tensor(name, local[name], index, degrees) for name in others if name in local]
    match = Match(params)
    return ModelRank(match, tuple(flats), tuple(join_states(flat, match, states) for flat in flats), tuple(tensors))


def _lay_tensor(name: str, shape: Shape, index: AtomicIndex, degrees: Degrees) -> FlatBuffer:
    """ZeRO 3 cuts parameters that it does not train as well; the module's buffers are whole on every rank."""
    if degrees.zero == 3 and name not in index.model.buffers:
        return join_reserved(0, (name,), (shape,), degrees.shards)
    return join_parameters(0, (name,), (shape,))


def _list_atoms(index: AtomicIndex) -> dict[ParamKey, tuple[Atom, ...]]:
    """What a load takes of each parameter: the master and the states, or the module's tensor."""
    found: dict[ParamKey, list[Atom]] = {}
    for key, atom in index.stored.atoms.items():
        if key.state != COPY and not (key.state == MODULE and index.find(key.name, MASTER, key.instance)):
            found.setdefault(key.param, []).append(atom)
    return {param: tuple(sorted(held, key=lambda atom: atom.state != MASTER)) for param, held in found.items()}


def _weigh(atoms: Iterable[Atom], layouts: tuple[Layout, Layout] | None) -> int:
    times = len(layouts[0].shards) if layouts is not None and layouts[0].mean else 1
    return sum(ITEMSIZE[atom.dtype] for atom in atoms) * times


def _weigh_all(index: AtomicIndex, names: Iterable[str]) -> dict[str, int]:
    """Bytes of each parameter and its states."""
    weights = dict.fromkeys(names, 0)
    for key, atom in index.stored.atoms.items():
        if key.state != COPY and key.instance == 0 and key.name in weights:
            weights[key.name] += atom.nbytes
    return weights


def _settle(
    index: AtomicIndex, degrees: Degrees, names: Sequence[str], rules: Sequence[RuleSet], shapes: Shapes | None
) -> tuple[Shapes, Layouts, dict[str, int]]:
    """Local shapes of the target, how both sides cut each parameter, and what settled that."""
    if index.run.topology.tp == degrees.tp == 1:
        weights = list_weights(index)
        return shapes or {name: (weights[name].shape,) for name in names}, {}, {}
    degree = degrees.tp if shapes is None else None
    settled = settle_index(index, rules, shapes, names=names, degree=degree).require()
    local = {name: want.local_shapes for name, (_, want) in settled.pairs.items()}
    return local, settled.pairs, dict(Counter(settled.origin.values()))


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


def _lay_group(group: int, names: Sequence[str], local: Mapping[str, Shape], degrees: Degrees) -> Iterator[FlatBuffer]:
    """The flat buffers of a param group on a model-parallel rank."""
    held = [name for name in names if name in local and count(local[name])]
    shapes = [local[name] for name in held]
    if not held:
        return
    if degrees.wrapper == "zero3":
        for some in cut_sub_groups(list(map(count, shapes)), degrees.shards, degrees.sub_group):
            yield join_reserved(group, held[some], shapes[some], degrees.shards)
    elif degrees.wrapper in ("zero12", "bf16"):
        partition = -(-sum(map(count, shapes)) // (ALIGNMENT * degrees.shards)) * ALIGNMENT
        yield join_parameters(group, held, shapes, parts=degrees.shards, partition=partition)
    elif degrees.wrapper == "fp16_fused":
        yield join_parameters(group, held, shapes)
    else:
        for name, shape in zip(held, shapes, strict=True):
            yield join_parameters(group, (name,), (shape,))


def cut_sub_groups(numels: Sequence[int], dp: int, size: int) -> Iterator[slice]:
    """ZeRO 3 (stage3.py ``_create_fp16_sub_groups``): a sub-group ends with the parameter that reaches ``size``."""
    begin = held = 0
    for at, numel in enumerate(numels):
        held += reserve(numel, dp)
        if held >= size or at == len(numels) - 1:
            yield slice(begin, at + 1)
            begin, held = at + 1, 0
