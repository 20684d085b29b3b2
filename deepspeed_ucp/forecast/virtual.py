"""A target of any topology as pure data: what each rank's buffers would hold of a checkpoint, without an engine.

What only a live model tells is assumed: parameters in the saved order, tensor-parallel parts of equal size, pipeline
stages as saved or of near equal bytes (:mod:`.split`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, Atom, AtomicIndex, ParamKey, count
from ..flat import FlatBuffer, cut_parameter, join_parameters, join_reserved, reserve
from ..patterns import Layout
from ..plan.locate import View, Want, find_shards
from ..plan.match import Shape, pick_instance
from .degrees import Degrees
from .split import TIED, Stages, find_layer

LIVE, FRESH = 0, 1
"""Buffer numbers of wants: memory that is part of the engine, memory that is not yet (optimizer states)."""

ALIGNMENT = 2
"""ZeRO 1/2 and BF16_Optimizer pad flat buffers to this times dp elements (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True, slots=True)
class VirtualExtra:
    """A tensor that no optimizer owns, with its local shape; ``dp`` > 1: ranks hold parts of it (ZeRO 3)."""

    name: str
    shape: Shape
    dp: int

    def cut(self, dp_rank: int) -> tuple[int, int]:
        """(first element, elements) that a data-parallel rank holds."""
        return cut_parameter(count(self.shape), dp_rank % self.dp, self.dp)


@dataclass(frozen=True, slots=True)
class VirtualPart:
    """What one model-parallel rank holds.

    Attributes:
        params: name → parameter of the index, an instance's where several stages hold it.
        flats, extras: its buffers.
    """

    params: Mapping[str, ParamKey]
    flats: tuple[FlatBuffer, ...]
    extras: tuple[VirtualExtra, ...]


@dataclass(frozen=True, slots=True)
class VirtualTarget:
    """A run of any topology; ranks are numbered by pipeline stage, then data-, then tensor-parallel rank.

    Attributes:
        degrees: its topology.
        parts: by model-parallel rank ``stage * tp + tp_rank``.
        layouts: how source and target cut each parameter, by name; empty where neither cuts any.
        states: per parameter its states, the weight first.
    """

    degrees: Degrees
    parts: tuple[VirtualPart, ...]
    layouts: Mapping[str, tuple[Layout, Layout]]
    states: Mapping[ParamKey, tuple[Atom, ...]]

    @property
    def ranks(self) -> int:
        """World size."""
        return self.degrees.world

    def place(self, rank: int) -> tuple[int, int, int]:
        """(pipeline stage, rank among those that ZeRO partitions over, tensor-parallel rank)."""
        rest, tp_rank = divmod(rank, self.degrees.tp)
        stage, dp_rank = divmod(rest, self.degrees.shards)
        return stage, dp_rank, tp_rank

    def part(self, rank: int) -> VirtualPart:
        """What its model-parallel rank holds."""
        stage, _, tp_rank = self.place(rank)
        return self.parts[stage * self.degrees.tp + tp_rank]

    def wants(self, rank: int) -> Iterator[Want]:
        """What a rank needs of the checkpoint."""
        part = self.part(rank)
        _, dp_rank, tp_rank = self.place(rank)
        for flat in part.flats:
            for cut in flat.cuts(flat.find_part(dp_rank)):
                yield from self.want(part.params[cut.name], cut.start, cut.numel, tp_rank)
        for extra in part.extras:
            start, numel = extra.cut(dp_rank)
            if numel:
                yield from self.want(part.params[extra.name], start, numel, tp_rank)

    def want(self, param: ParamKey, start: int, numel: int, tp_rank: int) -> Iterator[Want]:
        """Elements [start, start + numel) of a tensor-parallel rank's shard of a parameter, all states of it."""
        for number, atom in enumerate(self.states[param]):
            yield from self.want_atom(atom, start, numel, tp_rank, FRESH if number else LIVE)

    def want_atom(self, atom: Atom, start: int, numel: int, tp_rank: int, buffer: int) -> Iterator[Want]:
        """The same of one atom."""
        layouts = self.layouts.get(atom.name)
        if layouts is None:
            yield Want(atom, start, numel, buffer, 0)
        elif layouts[0].mean:
            for shard in range(len(atom.shards)):
                yield Want(atom, start, numel, FRESH, 0, View(*layouts, tp_rank, (shard,)))
        else:
            yield Want(atom, start, numel, buffer, 0, View(*layouts, tp_rank, find_shards(*layouts, tp_rank)))

    def measure_needed(self, rank: int) -> int:
        """Bytes of the checkpoint that a rank needs."""
        part = self.part(rank)
        _, dp_rank, _ = self.place(rank)
        total = 0
        for flat in part.flats:
            total += sum(cut.numel * self._weigh(part.params[cut.name]) for cut in flat.cuts(flat.find_part(dp_rank)))
        return total + sum(extra.cut(dp_rank)[1] * self._weigh(part.params[extra.name]) for extra in part.extras)

    def _weigh(self, param: ParamKey) -> int:
        """Bytes per element of a parameter over its states; every replica whose mean is taken counts."""
        layouts = self.layouts.get(param.name)
        times = len(self.states[param][0].shards) if layouts is not None and layouts[0].mean else 1
        return sum(ITEMSIZE[atom.dtype] for atom in self.states[param]) * times

    def measure_engine(self, rank: int) -> int:
        """Bytes of the engine's own buffers on a rank: masters, optimizer states, the model's copies, extras."""
        part = self.part(rank)
        degrees = self.degrees
        total = 0
        for flat in part.flats:
            states: dict[str, int] = {}
            for name in flat.names:
                states.update({a.state: ITEMSIZE[a.dtype] for a in self.states[part.params[name]][1:]})
            total += flat.partition * (ITEMSIZE[degrees.master] + sum(states.values()))
            if degrees.wrapper != "torch":
                whole = flat.partition if flat.by_parameter else flat.partition * flat.parts
                total += whole * ITEMSIZE[degrees.precision]
        for extra in part.extras:
            total += reserve(count(extra.shape), extra.dp) * ITEMSIZE[self.states[part.params[extra.name]][0].dtype]
        return total


def make_virtual(
    index: AtomicIndex,
    degrees: Degrees,
    shapes: Mapping[str, tuple[Shape, ...]],
    layouts: Mapping[str, tuple[Layout, Layout]],
    stages: Stages,
) -> VirtualTarget:
    """The target of a checkpoint at given degrees.

    Args:
        shapes: per name the local shape on each tensor-parallel rank of the target.
        layouts: how both sides cut each parameter; empty where neither cuts any.
        stages: which pipeline stages hold which names.
    """
    states = _list_states(index)
    groups = list_groups(index)
    extras = list_extras(index)
    parts = []
    for stage in range(degrees.pp):
        held = {name: stages[name].index(stage) for name in shapes if stage in stages[name]}
        params = {name: pick_instance(index, name, at, len(stages[name])) for name, at in held.items()}
        for tp_rank in range(degrees.tp):
            local = {name: shapes[name][tp_rank] for name in held}
            flats = [flat for n, names in enumerate(groups) for flat in _lay_group(n, names, local, degrees)]
            dp = degrees.shards if degrees.zero == 3 else 1
            others = [VirtualExtra(n, local[n], 1 if n in index.buffers else dp) for n in extras if n in local]
            parts.append(VirtualPart(params, tuple(flats), tuple(others)))
    return VirtualTarget(degrees, tuple(parts), layouts, states)


def _list_states(index: AtomicIndex) -> dict[ParamKey, tuple[Atom, ...]]:
    """What a load takes of each parameter: the master and the states, or the module's tensor."""
    found: dict[ParamKey, list[Atom]] = {}
    for key, atom in index.atoms.items():
        if key.state != COPY and not (key.state == MODULE and index.find(key.name, MASTER, key.instance)):
            found.setdefault(key.param, []).append(atom)
    return {param: tuple(sorted(held, key=lambda atom: atom.state != MASTER)) for param, held in found.items()}


def list_groups(index: AtomicIndex) -> list[list[str]]:
    """Trained parameters per param group in the saved order, by name."""
    trained = {key.name for key in index.atoms if key.state == MASTER}
    groups = [[name for name in group.names if name in trained] for group in index.groups] or [[]]
    groups[-1] += sorted(trained - {name for group in groups for name in group})
    # Stages may hold layers in any order; a whole pipeline has its tied modules in front, then layer after layer.
    return [sorted(names, key=_rank_layer) for names in groups] if index.topology.pp > 1 else groups


def _rank_layer(name: str) -> tuple[bool, int]:
    layer = find_layer(name)
    return not name.startswith(TIED), -1 if layer is None or name.startswith(TIED) else layer


def list_extras(index: AtomicIndex) -> list[str]:
    """Frozen and unoptimized parameters, and buffers."""
    others = dict.fromkeys(key.name for key in index.atoms if key.state == MODULE)
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
