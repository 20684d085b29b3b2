"""The synthesiser of 3D-parallel checkpoints held against DeepSpeed: pipelines and mpus of real engines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch
from packaging.version import Version

from .compare import clear_garbage, differences, storage_sharing
from .description import Model, Run, State, Topology
from .engines import save_all
from .engines3d import Case3D, cut
from .files import build_local_files, write_files
from .megatron import client_state, megatron_args, universal_info
from .parallel import Local, local_models
from .reader import read_locals
from .stages import placement_of

if TYPE_CHECKING:
    from pathlib import Path

    from deepspeed_ucp.testing import WorldPool

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(Version(deepspeed.__version__) < Version("0.19"), reason="the synthesiser writes 0.19's files"),
]

_ARGS = megatron_args(tensor_model_parallel_size=2, no_pipeline_parallel=True)
MEGATRON = client_state(_ARGS, 2, universal_info(_ARGS, 11))
CASES = (
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


@pytest.fixture(scope="module")
def real_saves(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per case with DeepSpeed's own save, all of one world."""
    folder = tmp_path_factory.mktemp("real3d")
    ucp_worlds.get(4).run(save_all, CASES, folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_files_are_deepspeeds(real_saves: Path, tmp_path: Path, case: Case3D) -> None:
    folder = real_saves / case.label / f"global_step{case.steps}"
    models = local_models(case.model, case.topology, cut)
    states = read_locals(folder, models, case.topology)
    layers = placement_of(case.model, case.topology)
    local = {mp: Local(models[mp], _complete(states[mp], models[mp]), layers[mp // case.topology.tp]) for mp in models}
    run = Run(case.steps, client_state=case.client_state, ds_config=case.ds_config())
    write_files(tmp_path, build_local_files(local, case.topology, run))
    real, synthetic = _contents(folder), _contents(tmp_path)
    assert synthetic.keys() == real.keys()
    for name in real:
        dp, mp = _ranks(name)
        for content in (synthetic[name], real[name]):
            clear_garbage(content, models[mp], case.topology, dp)
        path = ".module" if name.startswith("layer_") else ""
        assert list(differences(synthetic[name], real[name], path)) == [], name
        assert storage_sharing(synthetic[name]) == storage_sharing(real[name])


def _complete(state: State, model: Model) -> State:
    """With something for the weights that no file has."""
    shapes = {param.name: param.shape for param in model.owners}
    lost = {"fp32": torch.tensor(float("nan"))}
    atoms = {name: {"fp32": lost["fp32"].expand(shapes[name]), **atoms} for name, atoms in state.atoms.items()}
    return State(atoms, state.scalars, state.groups)


def _contents(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}


def _ranks(name: str) -> tuple[int, int]:
    """The dp rank and the mp rank in a file's name (0 where it has none)."""
    dp, mp = (re.search(rf"{axis}_rank_(\d+)", name) for axis in ("pp", "mp"))
    return int(dp[1]) if dp else 0, int(mp[1]) if mp else 0
