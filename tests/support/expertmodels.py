"""Models with experts and their placements, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import gcd

import pytest
import torch
from hypothesis import strategies as st

from deepspeed_ucp.extensions.experts.names import is_expert
from tests.support.cases import Case, states
from tests.support.reshard3d import KINDS, SavedRun, draw_state, expect, make_layer
from tests.synth import ExpertLayer, Layer, Model, Param, Topology, contiguous, interleaved
from tests.synth.files import list_model_writers
from tests.synth.stages import Placement

needs_autoep = pytest.mark.skipif(
    find_spec("deepspeed.checkpoint.autoep_affine") is None, reason="DeepSpeed before 0.19 has no AutoEP"
)

NATIVE = ".deepspeed_moe.experts.deepspeed_experts."
NATIVES = Model(
    (Param("0.column", (12, 5)), *(Param(f"body{NATIVE}{n}.w", (4, 3)) for n in range(4))),
    experts=(ExpertLayer("body", 4),),
)
FUSED = Model(
    (Param("0.column", (12, 5)), *(Param(f"0.mlp.experts.{w}.{n}", (4, 3)) for w in ("w1", "w2") for n in range(4))),
    experts=(ExpertLayer("0.mlp", 4, fused=True),),
)

SHAPES = st.sampled_from([(2,), (3, 2), (5,), (1,), (4, 3), (2, 1, 3)])


@st.composite
def expert_models(draw: st.DrawFn, *, fused: bool) -> Model:
    """Draw one to three layers of experts, partly frozen, between dense parameters; one or two param groups."""
    count = draw(st.integers(1, 2))
    params = [Param(f"first{group}", draw(SHAPES), group) for group in range(count)]
    layers = []
    for number in range(draw(st.integers(1, 3))):
        layer = ExpertLayer(f"body.{number}.mlp", draw(st.sampled_from((2, 4, 6, 8))), fused)
        params += [*make_router(layer.name, "weight", (layer.count, 2), fused), *draw_experts(draw, layer, count)]
        params += [Param(f"body.{number}.frozen", draw(SHAPES), 0, frozen=True)] * draw(st.booleans())
        layers.append(layer)
    return Model(tuple(params), {"count": torch.arange(3)}, experts=tuple(layers))


def make_router(layer: str, end: str, shape: tuple[int, ...], fused: bool) -> list[Param]:
    """Make a layer's router, which AutoEP has under two names."""
    router = Param(f"{layer}.router.gate.{end}", shape)
    return [router, Param(f"{layer}.gate.gate.{end}", shape, alias_of=router.name, untold=True)][: 1 + fused]


def draw_experts(draw: st.DrawFn, layer: ExpertLayer, groups: int) -> list[Param]:
    """Draw the parameters of a layer's experts, in the module's order."""
    ends = ("w1", "w2", "w3") if layer.fused else ("fc.weight", "fc.bias", "out.weight")[: draw(st.integers(1, 3))]
    forms = {end: (draw(SHAPES), draw(st.integers(0, groups - 1))) for end in ends}
    frozen = ends[-1] if len(ends) > 1 and draw(st.integers(0, 4)) == 0 else ""
    forms[ends[-1]] = (
        forms[ends[-1]][0],
        forms[ends[0]][1] if frozen else forms[ends[-1]][1],
    )  # no group is frozen whole
    numbers = range(layer.count)
    named = [(f"{layer.prefix}{end}.{n}", end) for end in ends for n in numbers]
    if not layer.fused:
        named = [(f"{layer.prefix}{n}.{end}", end) for n in numbers for end in ends]
    return [Param(name, *forms[end], frozen=end == frozen) for name, end in named]


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@st.composite
def expert_trips(draw: st.DrawFn, *, fused: bool) -> tuple[Case, Topology]:
    """Draw a checkpoint and the topology of its load.

    ZeRO 3 saves no frozen experts. The live groups name the parameters of stage 0.
    """
    model = draw(expert_models(fused=fused))
    frozen = any(param.frozen for param in model.params if "experts" in param.name)
    stages = (0, 1, 2, 3) if fused and not frozen else (0, 1, 2)
    source = draw(spreads(model, stages, parallel=False))
    target = draw(spreads(model, stages, several=source.stage > 0, parallel=False))
    legacy = draw(st.integers(0, 9)) == 0
    return Case(model, source, draw(states(model, source.precision)), legacy), target


# -- under tensor and pipeline parallelism ----------------------------------------------------------------------------

SHARDED = ("column", "row", "gate_up", "columns_uneven", "qkv", "bias", "norm")
"""Kinds of parameters of experts (see `reshard3d`); vectors have a second param group."""


@dataclass(frozen=True)
class ExpertTrip:
    """A run with experts, and the topology that resumes it; `written`: DeepSpeed saves all its model states."""

    source: SavedRun
    target: Topology
    chunk: int

    @property
    def wanted(self) -> SavedRun:
        return expect(self.source, self.target)

    @property
    def written(self) -> bool:
        return all(list_model_writers(local.model, self.source.topology) for local in self.source.locals.values())


@st.composite
def expert_trips_3d(draw: st.DrawFn, *, fused: bool) -> ExpertTrip:
    """Draw any degrees of all kinds on both sides; stage 0 saves one degree, and the live groups name it."""
    model = draw(layered_models(fused=fused))
    frozen = any(is_expert(param.name) and param.frozen for param in model.params)
    stages = (0, 1, 1, 2, 3) if fused and not frozen else (0, 1, 1, 2)
    source = draw(spreads(model, stages))
    target = draw(spreads(model, stages, several=source.stage > 0))
    held = draw_state(model, source, draw(st.integers(0, 99)))
    return ExpertTrip(held, target, draw(st.sampled_from((16, 64, 1000))))


@st.composite
def layered_models(draw: st.DrawFn, *, fused: bool) -> Model:
    """Draw one to four layers, most with experts; every layer trains a parameter of each param group."""
    params, layers = [], []
    for number in range(draw(st.integers(1, 4))):
        params += make_layer(number, draw(st.sampled_from((("column", "norm"), ("qkv", "bias", "row")))))
        if not number or draw(st.integers(0, 3)):
            layer = ExpertLayer(f"{number}.mlp", draw(st.sampled_from((2, 4, 6, 8))), fused)
            experts = draw_experts(draw, layer, 2) if fused else draw_sharded(draw, layer)
            params += [*make_router(layer.name, "router", KINDS["router"].shape, fused), *experts]
            layers.append(layer)
    count = 1 + int(params[-1].name.partition(".")[0])
    return Model(tuple(params), {"0.count": torch.arange(3)}, (Layer(),) * count, tuple(layers))


def draw_sharded(draw: st.DrawFn, layer: ExpertLayer) -> list[Param]:
    """Draw experts that tensor parallelism may cut; one kind may be frozen if its group trains another."""
    ends = draw(st.lists(st.sampled_from(SHARDED), min_size=1, max_size=3, unique=True))
    group = {end: int(len(KINDS[end].shape) == 1) for end in ends}
    frozen = ends[-1] if draw(st.integers(0, 4)) == 0 and group[ends[-1]] in [group[end] for end in ends[:-1]] else ""
    return [
        Param(f"{layer.prefix}{n}.{end}", KINDS[end].shape, group[end], frozen=end == frozen)
        for n in range(layer.count)
        for end in ends
    ]


@st.composite
def spreads(
    draw: st.DrawFn, model: Model, stages: tuple[int, ...], *, several: bool = True, parallel: bool = True
) -> Topology:
    """Draw a topology that can hold a model: stages, precisions, degrees of each layer, orders of ranks and groups.

    AutoEP runs under AutoTP or in a pipeline, with one order of the groups.

    Args:
        several: several degrees, and groups cut by size, which stage 0 does not save.
        parallel: tensor and pipeline parallelism, with experts whole on the tensor-parallel ranks or cut by them.
    """
    precisions = ("fp32", "bf16") if parallel else ("fp32", "bf16", "fp16")
    stage, precision = draw(st.sampled_from(stages)), draw(st.sampled_from(precisions))
    fused, tp = model.experts[0].fused, draw(st.sampled_from((1, 2, 2, 3, 4))) if parallel else 1
    placed = parallel and stage < 2 and not (fused and tp > 1)
    placement = draw(st.sampled_from(list_placements(model))) if placed else None
    pp = len(placement) if placement else 1
    dp = draw(st.sampled_from([dp for dp in (1, 2, 3, 4, 6, 8) if dp * tp * pp <= 12]))
    cut = tp > 1 and not fused and draw(st.booleans())
    several = several and stage > 0 and pp == 1
    ep = draw_degrees(draw, model, dp if cut else dp * tp, several=several and not fused)
    first = not (fused and tp > 1) and draw(st.booleans())
    bare = Topology(stage, dp, precision, tp=tp, pp=pp, placement=placement, cut_experts=cut, ep=ep, data_first=first)
    if stage == 0:
        chosen = parallel or precision == "fp32"
        return bare if chosen else replace(bare, wrapper=draw(st.sampled_from(("fused", "unfused"))))
    if stage == 3:
        return replace(bare, sub_group_size=draw(st.sampled_from((None, 1, 7, 20))), dealt=draw(st.booleans()))
    frozen = any(param.frozen for param in model.params if "experts" in param.name)
    limit = draw(st.sampled_from((None, 96, 200))) if several and not (frozen or parallel) else None
    shuffled = several and not (fused and parallel) and draw(st.booleans())
    bare = replace(bare, max_group=limit, shuffled=shuffled)
    if stage == 1 and precision == "bf16" and draw(st.booleans()):
        return replace(bare, wrapper="bf16")
    return replace(bare, round_robin=draw(st.booleans()), parameter_alignment=not parallel and draw(st.booleans()))


def draw_degrees(draw: st.DrawFn, model: Model, seats: int, *, several: bool) -> tuple[int, ...]:
    """Draw the expert-parallel degree of each layer, `several` or one."""
    counts = [layer.count for layer in model.experts]
    if several:
        return tuple(draw(st.sampled_from(divisors(gcd(seats, count)))) for count in counts)
    return (draw(st.sampled_from(divisors(gcd(seats, *counts)))),) * len(counts)


def list_placements(model: Model) -> list[Placement | None]:
    """List placements of a pipeline's layers; each stage has experts, as DeepSpeed requires."""
    layers = len(model.layers)
    pieces = contiguous(layers, 4)
    v_shaped = (pieces[0] + pieces[3], pieces[1] + pieces[2])  # DualPipeV
    found = [contiguous(layers, 2), contiguous(layers, 3), v_shaped, interleaved(layers, 2, 2)]
    having = {int(layer.name.partition(".")[0]) for layer in model.experts}
    return [None, *(each for each in dict.fromkeys(found) if all(having & {*stage} for stage in each))]
