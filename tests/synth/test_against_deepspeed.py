"""Compares synthesised checkpoints with real engines' saves of the same state."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from packaging.version import Version

from deepspeed_ucp.testing import WorldPool
from tests.support.covering import is_exhaustive

from .compare import clear_garbage, differences, storage_sharing
from .description import Model, Run, State, Topology
from .engines import Case, RealSave, save_all
from .engines3d import Case3D
from .engines_moe import CaseMoE
from .files import build_local_files, optim_file, write_files
from .megatron import client_state, megatron_args
from .parallel import Local, local_models
from .reader import read_locals, read_state
from .stages import placement_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(Version(deepspeed.__version__) < Version("0.19"), reason="the synthesiser writes 0.19's files"),
]

MEGATRON = client_state(megatron_args(tensor_model_parallel_size=2), 2, 11)
CASES = (
    Case(Topology(0, 2, "fp32")),
    Case(Topology(0, 2, "fp32"), optimizer="sgd"),
    Case(Topology(0, 2, "bf16")),
    Case(Topology(0, 2, "fp16")),
    Case(Topology(0, 2, "bf16", wrapper="fused"), optimizer="fusedadam"),
    Case(Topology(0, 2, "fp16", wrapper="fused"), optimizer="fusedadam"),
    Case(Topology(1, 2, "fp32")),
    Case(Topology(1, 2, "fp32"), steps=0),
    Case(Topology(1, 3, "fp16")),
    Case(Topology(1, 2, "fp32", elastic=True)),
    Case(Topology(1, 2, "bf16", wrapper="bf16")),
    Case(Topology(1, 3, "bf16", wrapper="bf16"), optimizer="sgd"),
    Case(Topology(2, 2, "bf16")),
    Case(Topology(2, 3, "bf16", round_robin=True)),
    Case(Topology(2, 2, "fp32", parameter_alignment=True), optimizer="sgd"),
    Case(Topology(2, 3, "bf16", parameter_alignment=True, round_robin=True)),
    Case(Topology(2, 2, "fp32", elastic=True, round_robin=True), optimizer="fusedadam"),
    Case(Topology(3, 2, "fp32")),
    Case(Topology(3, 2, "fp32"), steps=0),
    Case(Topology(3, 2, "bf16", sub_group_size=20)),
    Case(Topology(3, 3, "fp32", sub_group_size=10), optimizer="fusedadam"),
    Case(Topology(3, 3, "fp16"), optimizer="adagrad"),
)
CASES_3D = (
    Case3D(Topology(1, 1, "bf16", tp=2, pp=2)),
    Case3D(Topology(1, 2, "fp32", pp=2, placement=((0, 1), (2, 3, 4, 5))), method="parameters"),
    Case3D(Topology(1, 2, "bf16", "bf16", pp=2, model_axis=True)),
    Case3D(Topology(0, 2, "fp32", pp=2)),
    Case3D(Topology(0, 1, "fp32", pp=4), short=True),
    Case3D(Topology(0, 1, "bf16", pp=2, tp=2)),
    Case3D(Topology(0, 2, "fp16", pp=2)),
    Case3D(Topology(0, 2, "fp32", tp=2), pipeline=False),
    Case3D(Topology(1, 2, "bf16", tp=2), pipeline=False),
    Case3D(Topology(2, 2, "bf16", tp=2), pipeline=False, client_state=MEGATRON),
    Case3D(Topology(3, 2, "fp32", tp=2), pipeline=False),
)
CASES_MOE: tuple[RealSave, ...] = (
    CaseMoE(Topology(1, 4, "bf16", ep=(2, 4))),
    CaseMoE(Topology(2, 4, "fp32", ep=(2, 2), data_first=True)),
    CaseMoE(Topology(1, 4, "fp32", ep=(4, 2), shuffled=True)),
    CaseMoE(Topology(1, 2, "fp32", ep=(1, 1), max_group=110)),
    CaseMoE(Topology(2, 4, "bf16", round_robin=True, ep=(2, 1))),
    CaseMoE(Topology(0, 4, "fp32", ep=(2, 2))),
    CaseMoE(Topology(0, 4, "bf16", ep=(2, 2), data_first=True)),
    CaseMoE(Topology(1, 2, "bf16", tp=2, ep=(2, 2))),
    CaseMoE(Topology(0, 2, "fp32", tp=2, ep=(2, 2))),
    CaseMoE(Topology(0, 1, "bf16", tp=2, pp=2, ep=(1, 1), cut_experts=True)),
)
MORE_MOE: tuple[RealSave, ...] = (
    CaseMoE(Topology(2, 2, "fp32", tp=2, ep=(4, 4), data_first=True)),
    CaseMoE(Topology(1, 2, "fp32", tp=2, ep=(2, 2), cut_experts=True)),
    CaseMoE(Topology(0, 2, "bf16", tp=2, ep=(2, 2), cut_experts=True)),
    CaseMoE(Topology(1, 1, "bf16", "bf16", tp=2, pp=2, ep=(2, 2))),
    CaseMoE(Topology(1, 2, "fp32", pp=2, ep=(2, 2))),
    CaseMoE(Topology(0, 2, "fp32", pp=2, ep=(2, 2))),
)
CASES_AUTOEP = (
    CaseMoE(Topology(0, 4, "bf16", ep=(2, 2)), fused=True),
    CaseMoE(Topology(1, 4, "bf16", ep=(2, 2)), fused=True),
    CaseMoE(Topology(2, 4, "fp32", ep=(4, 4)), fused=True),
    CaseMoE(Topology(3, 4, "bf16", ep=(2, 2), data_first=True), fused=True),
    CaseMoE(Topology(3, 2, "fp32", ep=(2, 2), sub_group_size=100), fused=True),
    CaseMoE(Topology(3, 2, "bf16", tp=2, ep=(4, 4)), fused=True),
)
MORE_AUTOEP = (
    CaseMoE(Topology(1, 2, "fp32", tp=2, ep=(2, 2)), fused=True),
    CaseMoE(Topology(2, 1, "bf16", tp=4, ep=(2, 2)), fused=True),
    CaseMoE(Topology(0, 2, "bf16", tp=2, ep=(2, 2)), fused=True),
    CaseMoE(Topology(1, 2, "fp32", pp=2, ep=(2, 2)), fused=True),
    CaseMoE(Topology(0, 2, "bf16", pp=2, ep=(1, 1)), fused=True),
)
if find_spec("deepspeed.module_inject.auto_ep_layer"):
    CASES_MOE += CASES_AUTOEP
    MORE_MOE += MORE_AUTOEP
if is_exhaustive():
    CASES_MOE += MORE_MOE


EVERY_CASE = (*CASES, *CASES_3D, *CASES_MOE)


@pytest.fixture(scope="module")
def real_saves(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    worlds: dict[tuple[int, ...], list[RealSave]] = {}
    for case in EVERY_CASE:
        with_experts = isinstance(case, CaseMoE)  # these engines reuse the last engine's mpu
        tp = case.topology.tp if with_experts else 0  # AutoTP reuses the last engine's groups
        worlds.setdefault((case.topology.mp * case.topology.dp, with_experts, tp), []).append(case)
    for (size, *_), cases in sorted(worlds.items(), key=lambda item: item[0]):
        ucp_worlds.get(size).run(save_all, cases, folder, timeout=500)  # DeepSpeed may compile an optimizer
    return folder


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.label)
def test_synthesised_files_equal_deepspeeds(real_saves: Path, tmp_path: Path, case: RealSave) -> None:
    folder = real_saves / case.label / f"global_step{case.steps}"
    real, models = _read_contents(folder), local_models(case.model, case.topology, case.cut)
    states, layers = read_locals(folder, models, case.topology), placement_of(case.model, case.topology)
    local = {
        mp: Local(model, _complete(states[mp], model, case.topology, real), layers[mp // case.topology.tp])
        for mp, model in models.items()
    }
    config = case.ds_config()
    run = Run(
        case.steps,
        case.samples,
        lr_scheduler=case.scheduler,
        client_state={**case.client_state, **_keep_autotp(real)},
        ds_config=config,
        clip_grad=config.get("gradient_clipping", 1.0),
    )
    write_files(tmp_path, build_local_files(local, case.topology, run))
    synthetic = _read_contents(tmp_path)
    assert synthetic.keys() == real.keys()
    for name in real:
        dp, mp = _find_ranks(name)
        for content in (synthetic[name], real[name]):
            clear_garbage(content, models[mp], case.topology, dp)
        path = ".module" if name.startswith("layer_") else ""
        assert list(differences(synthetic[name], real[name], path)) == [], name
        assert storage_sharing(synthetic[name]) == storage_sharing(real[name])


def _keep_autotp(real: dict[str, Any]) -> dict[str, Any]:
    """AutoTP's description of dense parameters, which the synthesiser does not write."""
    key, written = "universal_checkpoint_info", ("expert_parameter_patterns", "ds_autoep_layers")
    infos = [content[key] for content in real.values() if content.get(key)]
    found = {name: value for info in infos[:1] for name, value in info.items() if name not in written}
    return {key: found} if "tp_replicated_parameter_patterns" in found else {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_synthesised_layouts_equal_deepspeeds(real_saves: Path, case: Case) -> None:
    """The atoms that the layout extracts are the engine's states at the save."""
    folder = real_saves / case.label
    state = read_state(folder / f"global_step{case.steps}", case.model, case.topology)
    truth = torch.load(folder / "truth.pt", weights_only=False).parameters
    assert truth
    for name, held in truth.items():
        for key, tensor in {"fp32": held.fp32, **held.tensors}.items():
            assert tensor is None or torch.equal(state.atoms[name][key], tensor), (name, key)


def _complete(state: State, model: Model, topology: Topology, real: dict[str, Any]) -> State:
    """Add nan for weights that no file has, and the hyper-parameters that an elastic save keeps."""
    lost = torch.tensor(float("nan"))
    atoms = {p.name: {"fp32": lost.expand(p.shape), **state.atoms[p.name]} for p in model.owners}
    if not topology.elastic:
        return State(atoms, state.scalars, state.groups)
    optimizer = real[optim_file(topology, 0)]["optimizer_state_dict"]
    hyper = {"step": optimizer["base_optimizer_state_step"]} if "base_optimizer_state_step" in optimizer else {}
    return State(atoms, state.scalars, (hyper,) * len(model.groups))


def _read_contents(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}


def _find_ranks(name: str) -> tuple[int, int]:
    """Return the dp rank and the mp rank in a file's name; 0 without one."""
    dp, mp = (re.search(rf"{axis}_rank_(\d+)", name) for axis in ("pp", "mp"))
    return int(dp[1]) if dp else 0, int(mp[1]) if mp else 0
