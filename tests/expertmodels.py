"""Models with experts and the placements of them, as hypothesis draws them."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
from hypothesis import strategies as st

from tests.reshard import Case
from tests.synth import ExpertLayer, Model, Param, State, Topology, random_state

SHAPES = st.sampled_from([(2,), (3, 2), (5,), (1,), (4, 3), (2, 1, 3)])


@st.composite
def expert_models(draw: st.DrawFn, *, fused: bool) -> Model:
    """One to three layers of experts, some frozen in part, between dense parameters; one or two param groups."""
    count = draw(st.integers(1, 2))
    params = [Param(f"first{group}", draw(SHAPES), group) for group in range(count)]
    layers = []
    for number in range(draw(st.integers(1, 3))):
        layer = ExpertLayer(f"body.{number}.mlp", draw(st.sampled_from((2, 4, 6, 8))), fused)
        params.append(Param(f"{layer.name}.gate.weight", (layer.count, 2), 0))
        params += draw_experts(draw, layer, count)
        params += [Param(f"body.{number}.frozen", draw(SHAPES), 0, frozen=True)] * draw(st.booleans())
        layers.append(layer)
    return Model(tuple(params), {"count": torch.arange(3)}, experts=tuple(layers))


def draw_experts(draw: st.DrawFn, layer: ExpertLayer, groups: int) -> list[Param]:
    """The parameters of a layer's experts, in the module's order."""
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


@st.composite
def placements(draw: st.DrawFn, model: Model, stages: tuple[int, ...], *, several: bool = True) -> Topology:
    """Any topology that can hold a model: stages, precisions, degrees of each layer, orders of ranks and groups.

    `several` degrees, and groups cut by size, are what stage 0 does not save.
    """
    stage, precision = draw(st.sampled_from(stages)), draw(st.sampled_from(("fp32", "bf16", "fp16")))
    dp, fused = draw(st.sampled_from((1, 2, 3, 4, 6, 8))), model.experts[0].fused
    ep = tuple(draw(st.sampled_from(divisors(gcd(dp, layer.count)))) for layer in model.experts)
    if not several or fused:
        ep = (draw(st.sampled_from(divisors(gcd(dp, *(layer.count for layer in model.experts))))),) * len(ep)
    bare = Topology(stage, dp, precision, ep=ep, data_first=draw(st.booleans()))
    if stage == 0:
        return replace(bare, wrapper=draw(st.sampled_from(("fused", "unfused"))) if precision != "fp32" else None)
    if stage == 3:
        return replace(bare, sub_group_size=draw(st.sampled_from((None, 1, 7, 20))), dealt=draw(st.booleans()))
    frozen = any(param.frozen for param in model.params if "experts" in param.name)
    limit = draw(st.sampled_from((None, 96, 200))) if several and not frozen else None
    bare = replace(bare, max_group=limit, shuffled=several and draw(st.booleans()))
    if stage == 1 and precision == "bf16" and draw(st.booleans()):
        return replace(bare, wrapper="bf16")
    return replace(bare, round_robin=draw(st.booleans()), parameter_alignment=draw(st.booleans()))


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@st.composite
def expert_trips(draw: st.DrawFn, *, fused: bool) -> tuple[Case, Topology]:
    """A checkpoint, and the topology that it comes back in.

    Frozen experts are in no file of ZeRO 3; of stage 0 the live groups tell what the saved ones were.
    """
    model = draw(expert_models(fused=fused))
    frozen = any(param.frozen for param in model.params if "experts" in param.name)
    stages = (0, 1, 2, 3) if fused and not frozen else (0, 1, 2)
    source = draw(placements(model, stages))
    several = source.stage > 0
    if not several:
        source = draw(placements(model, (0,), several=False))
    target = draw(placements(model, stages, several=several))
    return Case(
        model, source, draw(expert_states(model, source.precision)), legacy=draw(st.integers(0, 9)) == 0
    ), target


@st.composite
def expert_states(draw: st.DrawFn, model: Model, precision: str) -> State:
    """Stepped, before the first step, or with parameters that never got a gradient, as experts without tokens."""
    seed = draw(st.integers(0, 99))
    if draw(st.integers(0, 5)) == 0:
        return random_state(model, seed, states=(), step=None, precision=precision)
    trained = [param.name for param in model.owners if param.trains]
    without = tuple(draw(st.lists(st.sampled_from(trained), max_size=2, unique=True)))
    return random_state(model, seed, precision=precision, without=without, step=draw(st.integers(1, 5)))
