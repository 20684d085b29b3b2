"""`ds_ucp diff` with a checkpoint without masters: its weights are compared with rounded masters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.examine.diff import Difference, DiffOptions, diff_checkpoints
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.model.index import AtomicIndex
from tests.synth import Model, Param, State, Topology, random_state, write_checkpoint
from tests.synth.description import DTYPES

MODEL = Model((Param("a", (3, 50)), Param("b", (7,)), Param("c", (4, 5), frozen=True)))
NAMES = {"a", "b"}
FULL = [Topology(1, 2, "bf16"), Topology(3, 2, "bf16"), Topology(2, 3, "fp16"), Topology(1, 2)]


def write(
    folder: Path, topology: Topology, state: State, model: Model = MODEL, *, optimizer: bool = True
) -> AtomicIndex:
    path = write_checkpoint(folder, model, state, topology)
    for file in () if optimizer else list(path.glob("*optim_states.pt")):
        file.unlink()
    return open_checkpoint(str(path), Comm())


def write_weights(folder: Path, topology: Topology, state: State, *, bare: bool) -> AtomicIndex:
    """Write a save without masters: by an engine without optimizer (`bare`), or without the optimizer's files."""
    if not bare:
        return write(folder, replace(topology, stage=1), state, optimizer=False)
    path = write_checkpoint(folder, MODEL, state, Topology(0, 1, topology.precision)) / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "optimizer": None}, path)
    return open_checkpoint(str(path.parent), Comm())


def change(state: State, name: str, place: tuple[int, ...], value: float) -> State:
    master = state.atoms[name]["fp32"].clone()
    master[place] = value
    return replace(state, atoms={**state.atoms, name: {**state.atoms[name], "fp32": master}})


def list_differences(found: Difference) -> set[tuple[str, str, str]]:
    return {(atom.name, atom.state, atom.kind) for atom in found.atoms}


@pytest.mark.parametrize("bare", [False, True], ids=["without-files", "without-optimizer"])
@pytest.mark.parametrize("topology", FULL, ids=lambda t: t.label)
def test_weights_are_compared_with_rounded_masters(topology: Topology, bare: bool, tmp_path: Path) -> None:
    state = random_state(MODEL, 0, precision=topology.precision)
    full = write(tmp_path / "full", topology, state)
    weights = write_weights(tmp_path / "weights", topology, state, bare=bare)
    changed = write_weights(tmp_path / "changed", topology, change(state, "a", (2, 7), 2.5), bare=bare)
    dtype = str(DTYPES[topology.precision]).removeprefix("torch.")
    for sides, side in (((full, weights), "A"), ((weights, full), "B")):
        found = diff_checkpoints(*sides)
        lacking = {(name, state, f"only in {side}") for name in NAMES for state in ("exp_avg", "exp_avg_sq")}
        assert list_differences(found) == lacking and found.compared == len(MODEL.params)
        note = f"masters of {side} are compared after rounding to {dtype}"
        assert (note in found.notes) == (dtype != "float32") and found.converted == 2 * (dtype != "float32")
    value = float(state.atoms["a"]["fp32"].to(DTYPES[topology.precision])[2, 7])
    for names in (("fp32",), ("module",), ("copy",))[: 2 + (not bare)]:
        (atom,) = diff_checkpoints(full, changed, options=DiffOptions(states=names)).atoms
        assert (atom.name, atom.index, atom.tally.differing) == ("a", (2, 7), 1)
        assert atom.tally.largest == abs(value - 2.5)
    assert not diff_checkpoints(weights, weights).atoms


def test_a_parameter_that_only_one_run_trains_is_a_difference(tmp_path: Path) -> None:
    state = random_state(MODEL, 0, precision="bf16")
    frozen = Model((MODEL.params[0], replace(MODEL.params[1], frozen=True), MODEL.params[2]))
    atoms = {**state.atoms, "b": {"fp32": state.atoms["b"]["fp32"].to(torch.bfloat16)}}
    a = write(tmp_path / "a", Topology(1, 2, "bf16"), state)
    b = write(tmp_path / "b", Topology(1, 2, "bf16"), replace(state, atoms=atoms), frozen)
    assert ("b", "fp32", "only in A") in list_differences(diff_checkpoints(a, b))
    assert ("b", "module", "only in A") in list_differences(diff_checkpoints(b, a))
