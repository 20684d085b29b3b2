"""Optimizers: element-wise states of any name are carried over, everything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import AdamW

from deepspeed_ucp.engine.optimizer import adopt_hyper, probe_optimizer, restore_hyper, restore_scalar
from deepspeed_ucp.errors import CheckpointError, MismatchError
from deepspeed_ucp.load.states import OptimizerMatch
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.model.topology import Topology as SavedTopology
from deepspeed_ucp.model.wrappers import MOMENTUM
from deepspeed_ucp.plan.match import Match
from tests.support.contents import check_load
from tests.support.covering import cover, params
from tests.support.direct import Eager, Lion
from tests.support.foreign import make_tree
from tests.support.reshard import FakeTarget, load, make_targets, open_for, take_a_step
from tests.synth import (
    Model,
    Param,
    Run,
    State,
    Topology,
    build_files,
    random_state,
    read_state,
    write_checkpoint,
    write_files,
)

MODEL = Model((Param("a", (7, 3)), Param("b", (5,), group=1), Param("c", (4,))))


class Factored(Lion):
    """Like Adafactor: an optimizer with a state that is not element-wise."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["row"] = torch.zeros(3)


ADAMS = ("exp_avg", "exp_avg_sq")
ADAM = {"lr": 2e-3, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.1, "amsgrad": False}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}

FAMILY: dict[str, tuple[Any, tuple[str, ...], float | None, dict[str, Any]]] = {
    "adamw": (AdamW, ADAMS, 3, ADAM),
    "adam": (torch.optim.Adam, ADAMS, 3, ADAM),
    "amsgrad": (partial(AdamW, amsgrad=True), (*ADAMS, "max_exp_avg_sq"), 3, {**ADAM, "amsgrad": True}),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), ("momentum_buffer",), None, SGD),
    "plain sgd": (torch.optim.SGD, (), None, {**SGD, "momentum": 0}),
    "adagrad": (torch.optim.Adagrad, ("sum",), 3, {"lr": 0.1, "lr_decay": 0, "weight_decay": 0, "eps": 1e-10}),
    "rmsprop": (
        partial(torch.optim.RMSprop, momentum=0.5),
        ("square_avg", "momentum_buffer"),
        3,
        {"lr": 0.1, "alpha": 0.9, "eps": 1e-7, "momentum": 0.5, "centered": False, "weight_decay": 0},
    ),
    "lion": (Lion, ("exp_avg",), 3, {"lr": 0.1, "betas": (0.9, 0.99)}),
    "eager": (Eager, ("sum",), None, {"lr": 0.1, "betas": (0.9, 0.99)}),
}


def make_state(keys: tuple[str, ...], step: float | None, hyper: dict[str, Any], precision: str = "fp32") -> State:
    state = random_state(MODEL, 1, keys, step=step, precision=precision)
    return replace(state, groups=tuple({**hyper, "lr": hyper["lr"] / (1 + i)} for i in range(2)))


SOURCES = [Topology(0), Topology(1, 3, "bf16"), Topology(3, 2)]
TARGETS = [Topology(0), Topology(2, 2), Topology(3, 3, "bf16")]


@pytest.mark.parametrize(
    ("family", "source", "target"),
    params(
        cover(list(FAMILY), SOURCES, TARGETS),
        product(FAMILY, SOURCES, TARGETS),
        lambda row: f"{row[0]}-{row[1].label}→{row[2].label}",
    ),
)
def test_every_elementwise_optimizer_loads(family: str, source: Topology, target: Topology, tmp_path: Path) -> None:
    make, keys, step, hyper = FAMILY[family]
    path = write_checkpoint(tmp_path, MODEL, make_state(keys, step, hyper, source.precision), source)
    _, ranks = check_load(path, MODEL, target, read_state(path, MODEL, source), make)
    for rank in ranks:
        entries = rank.target.wrapped.state.values()
        assert family != "lion" or {type(entry["step"]) for entry in entries} == {int}
        take_a_step(rank.target.wrapped)


WITH_MOMENTUM, SUMS = make_state((MOMENTUM,), None, SGD), random_state(MODEL, 0, ("sum",))
NO_ADAM = r"keeps momentum_buffer for .*; this run's AdamW keeps exp_avg, exp_avg_sq.*load_optimizer_states=False"
REFUSED: list[tuple[State, str, Topology, Any, str]] = [
    *((WITH_MOMENTUM, "", each, None, NO_ADAM) for each in (*TARGETS[:2], Topology(3, 2))),
    (random_state(MODEL, 0), "", Topology(2, 2), torch.optim.SGD, "this run's SGD keeps no state"),
    (SUMS, "Adagrad", Topology(3, 2), None, r"checkpoint's optimizer \(Adagrad\) keeps sum"),
    (random_state(MODEL, 0), "", Topology(2, 2), Factored,
     r"Factored keeps states that are not element-wise: row \(shape \(3,\)\)"),
    # It keeps one variance for a flat buffer, and rows and columns for a matrix.
    (random_state(MODEL, 0, ("variance",)), "", Topology(0), torch.optim.Adafactor,
     "Adafactor keeps states that are not element-wise"),
]  # fmt: skip
"""Saved states, the optimizer that the saved configuration names, the target and its optimizer, the refusal."""


@pytest.mark.parametrize(
    ("state", "name", "target", "make", "text"),
    REFUSED,
    ids=["other-raw", "other-zero12", "other-zero3", "stateless", "named", "live-not-elementwise", "flat-buffer"],
)
def test_states_of_another_optimizer_are_refused(
    state: State, name: str, target: Topology, make: Any, text: str, tmp_path: Path
) -> None:
    config = Topology(1, 2).ds_config() | ({"optimizer": {"type": name, "params": {"lr": 1}}} if name else {})
    path = write_checkpoint(tmp_path, MODEL, state, Topology(1, 2), run=Run(ds_config=config))
    targets = make_targets(MODEL, target, make or AdamW)
    with pytest.raises(MismatchError, match=text):
        load(open_for(path, targets[0]), targets)
    load(open_for(path, targets[0]), targets, with_states=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_parameter_that_lacks_a_state_of_others_is_refused(tmp_path: Path) -> None:
    tree = make_tree(MODEL, random_state(MODEL, 0))
    del tree["optim"]["state"]["a"]["exp_avg_sq"]
    dcp.save(tree, checkpoint_id=tmp_path, no_dist=True)
    targets = make_targets(MODEL, Topology(2, 2))
    with pytest.raises(MismatchError, match="has exp_avg of a, and exp_avg, exp_avg_sq of others"):
        load(open_for(tmp_path, targets[0]), targets)
    load(open_for(tmp_path, targets[0]), targets, with_states=False)


@pytest.mark.parametrize("family", FAMILY)
def test_any_optimizer_loads_a_save_from_before_the_first_step(family: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0, (), step=None), Topology(1, 2))
    targets = make_targets(MODEL, Topology(3, 2), FAMILY[family][0])
    for rank in load(open_for(path, targets[0]), targets):
        take_a_step(rank.target.wrapped)


def write_changed(folder: Path, source: Topology, change: Callable[[dict[str, Any]], None]) -> State:
    """Write a checkpoint with other states of each parameter or flat buffer."""
    state = random_state(MODEL, 0)
    files = build_files(MODEL, state, source)
    for content in files.values():
        saved = content.get("optimizer_state_dict") or content.get("optimizer") or {}
        base = saved.get("base_optimizer_state") or saved.get("optimizer_state_dict") or saved
        for entry in base.get("state", {}).values():
            change(entry)
    write_files(folder, files)
    return state


@pytest.mark.parametrize("source", [Topology(0), Topology(1, 2), Topology(3, 2)], ids=lambda t: t.label)
@pytest.mark.parametrize("odd", [torch.zeros(3), "a note", [torch.zeros(2)]], ids=["tensor", "text", "list"])
def test_saved_states_that_are_not_elementwise_are_refused_by_name(source: Topology, odd: Any, tmp_path: Path) -> None:
    write_changed(tmp_path, source, lambda entry: entry.update(row=odd))
    targets = make_targets(MODEL, Topology(2, 3))
    with pytest.raises(MismatchError, match=r"a\.row \(.*not element-wise|not element-wise.*a\.row \("):
        load(open_for(tmp_path, targets[0]), targets)
    ranks = load(open_for(tmp_path, targets[0]), targets, with_states=False)
    assert not ranks[0].target.wrapped.state


class OneElement(AdamW):
    """Keeps its step as a tensor of shape (1,)."""

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["step"] = state["step"].reshape(())
        super().step(closure)
        for state in self.state.values():
            state["step"] = state["step"].reshape(1)


@pytest.mark.parametrize("kind", [AdamW, OneElement])
@pytest.mark.parametrize("source", [Topology(0), Topology(1, 2), Topology(3, 2)], ids=lambda t: t.label)
def test_a_state_of_one_element_is_a_scalar(source: Topology, kind: Any, tmp_path: Path) -> None:
    state = write_changed(tmp_path, source, lambda entry: entry.update(step=torch.as_tensor(entry["step"]).reshape(1)))
    _, ranks = check_load(tmp_path, MODEL, Topology(2, 3), state, kind)
    steps = [each["step"] for rank in ranks for each in rank.target.wrapped.state.values()]
    assert {step.shape for step in steps} == {torch.Size([1] if kind is OneElement else [])}


# -- probing ----------------------------------------------------------------------------------------------------------


def make_optimizer(make: Any = AdamW, **options: Any) -> tuple[Any, torch.Tensor]:
    param = torch.nn.Parameter(torch.arange(4.0))
    return make([{"params": [param]}], lr=0.5, **options), param


class Nested(torch.optim.SGD):
    """An optimizer that changes an inner one in each step, like DeepSpeed's Muon."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, momentum=0.9, **options)
        self.inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        self.notes: list[str] = []

    def step(self, closure: Any = None) -> None:
        self.inner.param_groups = []
        self.inner.state.clear()
        self.notes.append("stepped")
        super().step()


@pytest.mark.parametrize("family", [*FAMILY, "nested"])
def test_probe_optimizer_lists_states_without_changing_the_optimizer(family: str) -> None:
    make, keys, step, hyper = {**FAMILY, "nested": (Nested, *FAMILY["momentum"][1:])}[family]
    optimizer, param = make_optimizer(make)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.register_step_pre_hook(lambda *_: called.append(2))
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    states = repr(optimizer.state)  # Adagrad makes them at once
    kept = probe_optimizer(optimizer, 0, hyper, param)
    assert kept is not None
    assert set(kept.elementwise) == set(keys)
    assert ("step" in kept.scalars) == (step is not None)
    assert not (kept.other or called)
    assert repr(optimizer.state) == states
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == before
    assert (param.tolist(), param.grad) == ([0, 1, 2, 3], None)
    if family == "nested":
        assert len(optimizer.inner.param_groups) == 1 and not optimizer.notes


def test_probe_optimizer_reads_existing_states_if_a_step_raises() -> None:
    class Stubborn(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no kernel here")

    optimizer, param = make_optimizer(Stubborn)
    assert probe_optimizer(optimizer, 0, {}, param) is None
    optimizer.state[param] = {"momentum_buffer": torch.zeros(4), "count": 3}
    kept = probe_optimizer(optimizer, 0, {}, param)
    assert kept is not None
    assert (kept.elementwise, kept.scalars) == ({"momentum_buffer": torch.float32}, {"count": 3})


# -- hyper-parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "saved", "dropped"),
    [
        ({"params": [1], "lr": 1.0, "betas": (0.9,)}, {"lr": 0.5, "betas": (0.8,), "x": "", "params": [2]}, "params"),
        ({"lr": 1.0, "bias_correction": True}, {"lr": 0.5, "fused": None, "initial_lr": 2.0, "step": 3}, "fused"),
        ({"lr": 1.0, "more": {}}, {"lr": 0.5, "more": {"beta": [0.5]}}, ""),
        ({"lr": 1.0}, {"lr": 0.5, "hook": object()}, "hook"),
        ({"lr": 1.0}, {"lr": 0.5, "nested": [1, (2, object())]}, "nested"),
    ],
    ids=["same class", "another implementation keeps its switches", "dicts", "object", "object inside"],
)
def test_adopt_hyper_drops_fields_that_do_not_apply(live: dict[str, Any], saved: dict[str, Any], dropped: str) -> None:
    assert adopt_hyper(live, saved) == {key: value for key, value in saved.items() if key != dropped}


def test_restore_hyper_fills_a_tensor_learning_rate_in_place() -> None:
    lr = torch.tensor(1.0)
    group = {"lr": lr, "eps": 1e-8}
    restore_hyper(group, {"lr": 0.25, "eps": 1e-6})
    assert group["lr"] is lr
    assert (float(lr), group["eps"]) == (0.25, 1e-6)


def test_restore_scalar_uses_the_optimizers_type() -> None:
    optimizer, param = make_optimizer()
    kept = probe_optimizer(optimizer, 0, {}, param)
    step = restore_scalar("step", 3.0, kept)
    assert (step.dtype, step.shape, float(step)) == (torch.float32, (), 3.0)
    optimizer, param = make_optimizer(Lion)
    lion = probe_optimizer(optimizer, 0, {}, param)
    assert restore_scalar("step", 3.0, lion) == 3
    assert type(restore_scalar("step", 3.0, lion)) is int
    assert restore_scalar("flag", True, None) is True
    assert float(restore_scalar("step", 7, None)) == 7.0
    for value in ((1 << 24) + 1, 0.1):  # a float32 tensor has other values
        assert float(restore_scalar("ema", value, None)) == value
    assert isinstance(restore_scalar("step", 7.0, None), torch.Tensor)


# -- Muon's momentum in saves of ZeRO 1 and 2: whole, for each parameter that a rank's partition touches --------------

MIXED = Model((Param("a", (7, 3)), Param("b", (3, 3)), Param("c", (5, 2), group=1)))
TOUCHED = {2: (("a",), ("a", "b")), 4: (("a",), ("a",), ("a", "b"), ("b",))}
"""Parameters of the first group by rank; the parameter of the second group is on all ranks without padding."""
MOMENTA = random_state(MIXED, 0, (MOMENTUM,), step=None)
States = list[dict[int, dict[str, torch.Tensor]]]


class Muon(torch.optim.SGD):
    """Groups with ``use_muon``: DeepSpeed makes their momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{**group, "use_muon": True} for group in params], lr=lr)


def load_muon(folder: Path, dp: int, change: Callable[[States], Any] = len, **zero: Any) -> FakeTarget:
    """Load a save of `dp` ranks into one; `change` gets the states in each rank's file, by group."""
    files, states = build_files(MIXED, MOMENTA, Topology(1, dp), Run()), []
    for tree in files.values():
        tree["ds_config"]["zero_optimization"].update(zero)
    for rank, tree in enumerate(tree for name, tree in sorted(files.items()) if "optim_states" in name):
        base = tree["optimizer_state_dict"]["base_optimizer_state"]
        for group in base["param_groups"]:
            group["use_muon"] = True
        for group, names in enumerate((TOUCHED[dp][rank], ("c",))):
            base["state"][group][MOMENTUM] = torch.cat([MOMENTA.atoms[name][MOMENTUM].reshape(-1) for name in names])
        if not any(tree["optimizer_state_dict"]["param_slice_mappings"][1]):
            del base["state"][1]
        states.append(base["state"])
    change(states)
    write_files(folder, files)
    target = FakeTarget(MIXED, Topology(1), 0, Muon)
    load(open_for(folder, target), [target])
    return target


@pytest.mark.parametrize("dp", TOUCHED)
def test_each_momentum_element_is_read_from_the_rank_that_owns_it(dp: int, tmp_path: Path) -> None:
    target = load_muon(tmp_path, dp)
    for flat, names in zip(target.flats, (("a", "b"), ("c",)), strict=True):
        momentum = target.wrapped.state[flat.tensor][MOMENTUM]
        expected = torch.cat([MOMENTA.atoms[name][MOMENTUM].reshape(-1) for name in names])
        assert torch.equal(momentum[: expected.numel()], expected)


def drift(states: States) -> None:
    states[1][0][MOMENTUM][2] += 1  # an element of a, which begins on the first rank


def shorten(states: States) -> None:
    for each in states:
        each[0][MOMENTUM] = each[0][MOMENTUM][:-1].clone()


@pytest.mark.parametrize(
    ("change", "zero", "kind", "text"),
    [
        (drift, {}, CheckpointError, r"a \(momentum_buffer\) is in the files of several ranks"),
        (shorten, {}, MismatchError, r"a\.momentum_buffer \(20 elements where the parameters of a rank have 21"),
        # offloaded momentum has the layout of the masters
        (len, {"offload_optimizer": {"device": "cpu"}}, MismatchError,
         r"a\.momentum_buffer \(shape \(21,\) where the parameter's part has"),
    ],
    ids=["unequal", "short", "offloaded"],
)  # fmt: skip
def test_inconsistent_momentum_is_refused(
    change: Callable[[States], Any], zero: dict[str, Any], kind: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=text):
        load_muon(tmp_path, 2, change, **zero)


@pytest.mark.parametrize(
    ("wrapper", "saved", "refused"),
    [("torch", 2, True), ("fp16_unfused", 4, True), ("torch", 1, False), ("zero12", 2, False), ("atomic", 2, False)],
)
def test_muons_sorted_groups_are_refused_at_another_degree(wrapper: str, saved: int, *, refused: bool) -> None:
    """At stage 0 a state is identified by its index in its group, and Muon sorts the group by local shapes."""
    index = AtomicIndex.of((), Records(), (), SavedTopology(0, wrapper, "float32", tp=saved), "")
    target: Any = SimpleNamespace(parallel=SimpleNamespace(tp=1), flats=[])
    optimizer = OptimizerMatch(index, target, Match(hyper={0: {"use_muon": True}}))  # type: ignore[arg-type]
    if not refused:
        optimizer.check()
        return
    with pytest.raises(MismatchError, match=f"sorts its parameters by their local shapes, which tp {saved} → 1"):
        optimizer.check()
