"""Muon's momentum in saves of ZeRO 1 and 2: whole, for each parameter that a rank's partition touches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.errors import CheckpointError, MismatchError
from deepspeed_ucp.load.states import OptimizerMatch
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.model.topology import Topology as SavedTopology
from deepspeed_ucp.model.wrappers import MOMENTUM
from deepspeed_ucp.plan.match import Match
from tests.support.reshard import FakeTarget, load, open_for
from tests.synth import Model, Param, Run, State, Topology, build_files, random_state, write_files

MODEL = Model((Param("a", (7, 3)), Param("b", (3, 3)), Param("c", (5, 2), group=1)))

TOUCHED = {2: (("a",), ("a", "b")), 4: (("a",), ("a",), ("a", "b"), ("b",))}
"""Parameters of the first group by rank; the parameter of the second group is on all ranks without padding."""

STATE = random_state(MODEL, 0, (MOMENTUM,), step=None)

Files = dict[str, dict[str, Any]]


class Muon(torch.optim.SGD):
    """Groups with ``use_muon``: DeepSpeed makes their momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{**group, "use_muon": True} for group in params], lr=lr)


def make_files(dp: int, state: State = STATE, **zero: Any) -> Files:
    files = build_files(MODEL, state, Topology(1, dp), Run())
    for tree in files.values():
        tree["ds_config"]["zero_optimization"].update(zero)
    for rank, tree in enumerate(tree for name, tree in sorted(files.items()) if "optim_states" in name):
        base = tree["optimizer_state_dict"]["base_optimizer_state"]
        for group in base["param_groups"]:
            group["use_muon"] = True
        for group, names in enumerate((TOUCHED[dp][rank], ("c",))):
            held = [state.atoms[name][MOMENTUM].reshape(-1) for name in names]
            base["state"][group][MOMENTUM] = torch.cat(held)
        if not any(tree["optimizer_state_dict"]["param_slice_mappings"][1]):
            del base["state"][1]
    return files


def resume(folder: Path, files: Files, target: Topology) -> list[Any]:
    write_files(folder, files)
    targets = [FakeTarget(MODEL, target, rank, Muon) for rank in range(target.dp)]
    return load(open_for(folder, targets[0]), targets)


@pytest.mark.parametrize("dp", TOUCHED)
def test_each_momentum_element_is_read_from_the_rank_that_owns_it(dp: int, tmp_path: Path) -> None:
    (rank,) = resume(tmp_path, make_files(dp), Topology(1))
    names = {0: ("a", "b"), 1: ("c",)}
    for flat in rank.target.flats:
        momentum = rank.target.wrapped.state[flat.tensor][MOMENTUM]
        expected = torch.cat([STATE.atoms[name][MOMENTUM].reshape(-1) for name in names[flat.group]])
        assert torch.equal(momentum[: expected.numel()], expected)


def test_momentum_copies_of_a_parameter_on_two_ranks_must_be_equal(tmp_path: Path) -> None:
    files = make_files(2)
    last = max(name for name in files if "optim_states" in name)
    momentum = files[last]["optimizer_state_dict"]["base_optimizer_state"]["state"][0][MOMENTUM]
    momentum[2] += 1  # an element of a, which begins on the first rank
    with pytest.raises(CheckpointError, match=r"a \(momentum_buffer\) is in the files of several ranks"):
        resume(tmp_path, files, Topology(1))


def test_momentum_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    files = make_files(2)
    for name in files:
        if "optim_states" in name:
            state = files[name]["optimizer_state_dict"]["base_optimizer_state"]["state"]
            state[0][MOMENTUM] = state[0][MOMENTUM][:-1].clone()
    with pytest.raises(MismatchError, match=r"a\.momentum_buffer \(20 elements where the parameters of a rank have 21"):
        resume(tmp_path, files, Topology(1))


def test_offloaded_momentum_has_the_layout_of_the_masters(tmp_path: Path) -> None:
    files = make_files(2, offload_optimizer={"device": "cpu"})
    with pytest.raises(MismatchError, match=r"a\.momentum_buffer \(shape \(21,\) where the parameter's part has"):
        resume(tmp_path, files, Topology(1))


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
