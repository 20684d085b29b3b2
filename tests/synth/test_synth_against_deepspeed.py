"""The synthesiser held against DeepSpeed: real engines save, and the same checkpoint is synthesised and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch
from packaging.version import Version

from .compare import clear_garbage, differences, storage_sharing
from .description import Model, Run, State, Topology
from .engines import CLIENT_STATE, Case, describe, parameter_groups, save_all
from .files import build_files, optim_file, write_files
from .reader import read_state

if TYPE_CHECKING:
    from pathlib import Path

    from deepspeed_ucp.testing import WorldPool

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(Version(deepspeed.__version__) < Version("0.19"), reason="the synthesiser writes 0.19's files"),
]

CASES = (
    Case(Topology(0, 2, "fp32")),
    Case(Topology(0, 2, "fp32"), "sgd"),
    Case(Topology(0, 2, "bf16")),
    Case(Topology(0, 2, "fp16")),
    Case(Topology(0, 2, "bf16", wrapper="fused"), "fusedadam"),
    Case(Topology(0, 2, "fp16", wrapper="fused"), "fusedadam"),
    Case(Topology(1, 2, "fp32")),
    Case(Topology(1, 2, "fp32"), steps=0),
    Case(Topology(1, 3, "fp16")),
    Case(Topology(1, 2, "fp32", elastic=True)),
    Case(Topology(1, 2, "bf16", wrapper="bf16")),
    Case(Topology(1, 3, "bf16", wrapper="bf16"), "sgd"),
    Case(Topology(2, 2, "bf16")),
    Case(Topology(2, 3, "bf16", round_robin=True)),
    Case(Topology(2, 2, "fp32", parameter_alignment=True), "sgd"),
    Case(Topology(2, 3, "bf16", parameter_alignment=True, round_robin=True)),
    Case(Topology(2, 2, "fp32", elastic=True, round_robin=True), "fusedadam"),
    Case(Topology(3, 2, "fp32")),
    Case(Topology(3, 2, "fp32"), steps=0),
    Case(Topology(3, 2, "bf16", sub_group_size=20)),
    Case(Topology(3, 3, "fp32", sub_group_size=10), "fusedadam"),
    Case(Topology(3, 3, "fp16"), "adagrad"),
)


def _getters_tell(case: Case) -> bool:
    """`safe_get_full_fp32_param` and the others read the wrong elements under round robin without alignment padding."""
    return case.topology.stage > 0 and (not case.topology.round_robin or case.topology.parameter_alignment)


@pytest.fixture(scope="module")
def real_saves(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per case with DeepSpeed's own save."""
    folder = tmp_path_factory.mktemp("real")
    for size in sorted({case.topology.dp for case in CASES}):
        cases = [case for case in CASES if case.topology.dp == size]
        ucp_worlds.get(size).run(save_all, cases, folder, timeout=500)  # DeepSpeed may have to compile an optimizer
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_files_are_deepspeeds(real_saves: Path, tmp_path: Path, case: Case) -> None:
    folder, model = real_saves / case.label / f"global_step{case.steps}", _model(case)
    real = _contents(folder)
    state = _state(folder, model, case, real)
    write_files(tmp_path, build_files(model, state, case.topology, _run(case)))
    synthetic = _contents(tmp_path)
    assert synthetic.keys() == real.keys()
    for name in real:
        for content in (synthetic[name], real[name]):
            clear_garbage(content, model, case.topology, _rank(name))
        assert list(differences(synthetic[name], real[name])) == []
        assert storage_sharing(synthetic[name]) == storage_sharing(real[name])


@pytest.mark.parametrize("case", [case for case in CASES if _getters_tell(case)], ids=lambda case: case.label)
def test_the_layout_is_deepspeeds(real_saves: Path, case: Case) -> None:
    """The atoms that the layout extracts are what DeepSpeed's own getters gave before the save."""
    model, folder = _model(case), real_saves / case.label
    state = read_state(folder / f"global_step{case.steps}", model, case.topology)
    truth = torch.load(folder / "truth.pt", weights_only=False)
    assert truth
    wrong = [
        (name, key)
        for name, atoms in truth.items()
        for key in atoms
        if not torch.equal(state.atoms[name][key], atoms[key])
    ]
    assert wrong == []


def _model(case: Case) -> Model:
    net = case.net
    return describe(net, parameter_groups(net, case.optimizer))


def _contents(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=False) for path in folder.iterdir()}


def _rank(name: str) -> int:
    """Of zero_pp_rank_R_... (0 for the others)."""
    return int(name.partition("zero_pp_rank_")[2].partition("_")[0] or 0)


def _state(folder: Path, model: Model, case: Case, real: dict[str, Any]) -> State:
    """What the real save holds; an elastic one keeps no hyper-parameters but the first group's step."""
    state = read_state(folder, model, case.topology)
    if not case.topology.elastic:
        return state
    optimizer = real[optim_file(case.topology, 0)]["optimizer_state_dict"]
    hyper = {"step": optimizer["base_optimizer_state_step"]} if "base_optimizer_state_step" in optimizer else {}
    return State(state.atoms, state.scalars, (hyper,) * len(model.groups))


def _run(case: Case) -> Run:
    scheduler = {"last_batch_iteration": case.steps - 1}
    return Run(case.steps, lr_scheduler=scheduler, client_state=CLIENT_STATE, ds_config=case.ds_config())
