"""Drawn and awkward checkpoints without model parallelism, and whole reshards of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from tests.support.contents import check_load
from tests.support.reshard import Loaded
from tests.synth import Model, Param, Run, State, Topology, random_state, read_state, write_checkpoint

BUFFERS = (
    torch.arange(3),
    torch.tensor([True, False, True]),
    torch.linspace(0, 1, 5),
    torch.tensor(7),
    torch.tensor([[1.5, -0.0]], dtype=torch.float16),
    torch.zeros(0, 2),
    torch.arange(5, dtype=torch.uint8),
    torch.tensor([1 + 2j]),
)

AWKWARD = Model(
    (
        Param("a.weight", (7, 13)),
        Param("a.bias", (7,), frozen=True),
        Param("b.weight", (5, 7), group=1),
        Param("empty", (0, 3)),
        Param("one", (1,), group=1),
        Param("c.weight", (3, 5)),
        Param("outside", (3,), group=None, frozen=True),
        Param("alone", (1,), group=2),
        Param("tied", (7, 13), alias_of="a.weight"),
    ),
    {f"buffer{index}": value for index, value in enumerate(BUFFERS)},
)

KINDS = [
    Topology(0),
    Topology(0, 1, "bf16", "fused"),
    Topology(0, 2, "fp16", "unfused"),
    Topology(1, 4, "bf16"),
    Topology(1, 3, "bf16", "bf16"),
    Topology(2, 5, "fp16", round_robin=True, parameter_alignment=True),
    Topology(2, 2, round_robin=True),
    Topology(1, 3, elastic=True),
    Topology(3, 2),
    Topology(3, 7, "bf16", sub_group_size=10),
]


def pair_id(pair: tuple[Topology, ...]) -> str:
    return f"{pair[0].label}→{pair[1].label}"


# -- drawn cases -------------------------------------------------------------------------------------------------------

SHAPES = st.one_of(
    st.integers(2, 40).map(lambda n: (n,)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.just((1,)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)),
)


@st.composite
def models(draw: st.DrawFn, max_params: int = 6, max_groups: int = 3) -> Model:
    """Draw a model; every group trains at least one parameter, as DeepSpeed's wrappers require."""
    groups = draw(st.integers(1, max_groups))
    params = [Param(f"g{group}.first", draw(SHAPES), group) for group in range(groups)]
    params += [_draw_param(draw, f"p{index}", groups) for index in range(draw(st.integers(0, max_params - groups)))]
    params = draw(st.permutations(params))
    owners = [param for param in params if param.numel]
    if draw(st.booleans()):
        owner = draw(st.sampled_from(owners))
        params = [*params, Param("tied", owner.shape, owner.group, owner.frozen, alias_of=owner.name)]
    chosen = draw(st.lists(st.integers(0, len(BUFFERS) - 1), max_size=3, unique=True))
    return Model(tuple(params), {f"buffer{index}": BUFFERS[index] for index in chosen})


def _draw_param(draw: st.DrawFn, name: str, groups: int) -> Param:
    kind = draw(st.sampled_from(("plain", "plain", "plain", "frozen", "loose", "empty")))
    group = draw(st.integers(0, groups - 1))
    if kind == "frozen":
        return Param(name, draw(SHAPES), group, frozen=True)
    if kind == "loose":
        return Param(name, draw(SHAPES), None, frozen=True)
    if kind == "empty":
        return Param(name, draw(st.sampled_from(((0,), (0, 3), (2, 0)))), group)
    return Param(name, draw(SHAPES), group)


@st.composite
def topologies(draw: st.DrawFn, max_dp: int = 9) -> Topology:
    """Draw any wrapper at any size."""
    stage = draw(st.sampled_from((0, 1, 2, 3)))
    precision = draw(st.sampled_from(("fp32", "bf16", "fp16")))
    dp = draw(st.integers(1, max_dp))
    if stage == 0:
        return Topology(0, min(dp, 3), precision, None if precision == "fp32" else draw(WRAPPERS16))
    if stage == 3:
        return Topology(3, dp, precision, sub_group_size=draw(st.sampled_from((None, 1, 7, 20))))
    if stage == 1 and precision == "bf16" and draw(st.booleans()):
        return Topology(1, dp, "bf16", "bf16")
    return Topology(
        stage,
        dp,
        precision,
        round_robin=draw(st.booleans()),
        parameter_alignment=draw(st.booleans()),
        elastic=draw(st.sampled_from((False, False, True))),
    )


WRAPPERS16 = st.sampled_from(("fused", "unfused"))


@st.composite
def states(draw: st.DrawFn, model: Model, precision: str) -> State:
    """Draw a state: stepped, before the first step, or with parameters that never got a gradient."""
    seed = draw(st.integers(0, 99))
    if draw(st.integers(0, 5)) == 0:
        return random_state(model, seed, states=(), step=None, precision=precision)
    trained = [param.name for param in model.owners if param.trains and param.group is not None]
    without = tuple(draw(st.lists(st.sampled_from(trained), max_size=2, unique=True)))
    return random_state(model, seed, precision=precision, without=without, step=draw(st.integers(1, 5)))


@dataclass(frozen=True)
class Case:
    model: Model
    topology: Topology
    state: State
    legacy: bool

    def write(self, folder: Path, run: Run | None = None) -> Path:
        """Write the checkpoint, with NaN in ZeRO 3's padding."""
        run = run or Run(garbage=float("nan"))
        return write_checkpoint(folder, self.model, self.state, self.topology, run=run, legacy=self.legacy)


@st.composite
def cases(draw: st.DrawFn, max_dp: int = 9) -> Case:
    model, topology = draw(models()), draw(topologies(max_dp))
    return Case(model, topology, draw(states(model, topology.precision)), draw(st.integers(0, 4)) == 0)


# -- whole reshards ----------------------------------------------------------------------------------------------------


def resume(case: Case, target: Topology, folder: Path, **options: Any) -> tuple[State, list[Loaded]]:
    """Write a case, load it into another topology, and check everything about it."""
    path = case.write(folder)
    saved = read_state(path, case.model, case.topology)
    return saved, check_load(path, case.model, target, saved, **options)[1]


def keep_what_travels(saved: State, held: State, case: Case, there: Topology) -> State:
    """Return the state that survives B: flat buffers zero-fill states, a 16-bit model rounds frozen parameters."""
    atoms = {name: {**held.atoms[name], **value} for name, value in saved.atoms.items()}
    for param in case.model.owners:
        if not (param.trains and param.group is not None):
            atoms[param.name] = {"fp32": saved.atoms[param.name]["fp32"].to(there.dtype).float()}
    scalars = {name: {**held.scalars.get(name, {}), **value} for name, value in saved.scalars.items()}
    return State(atoms, scalars, () if there.keeps_lean_states else held.groups)
