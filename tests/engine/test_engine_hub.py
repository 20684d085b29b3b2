"""Hugging Face's mixture-of-experts models: training under AutoEP, export under the hub's names, loads without it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from tests.support.covering import params
from tests.support.engines.driver import Engines
from tests.support.engines.ranks import Load

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")
pytest.importorskip("transformers", minversion="5.0", reason="AutoEP knows transformers' fused experts alone")

NAMES: dict[str, tuple[int, Any]] = {
    "mixtral": (2, {"stage": 3}),
    "qwen3": (3, {"stage": 1, "ep": 2}),
    "deepseek": (1, {"stage": 2, "ep": 2}),
}
"""By model the ZeRO stage of training, and the stage and expert-parallel degree of a new run. Qwen3's experts have
Mixtral's form."""

CLOSE = {"rtol": 0, "atol": 1e-6}  # AutoEP sums an expert's tokens in another order


@pytest.fixture(scope="module")
def hub() -> Any:
    """Import the models late: every worker collects this module, and the import takes seconds."""
    return importlib.import_module("tests.support.engines.hub")


@pytest.mark.parametrize("name", params(["mixtral", "deepseek"], NAMES))
def test_an_autoep_runs_export_is_a_model_of_the_hub(hub: Any, name: str, engines: Engines, tmp_path: Path) -> None:
    stage, begun = NAMES[name]
    trained, _ = engines.save(hub.Kind(stage, model=name, ep=2), tmp_path).state
    index = open_checkpoint(str(next(tmp_path.glob("global_step*"))), Comm(), Naming(weights_only=stage == 3))
    kind, config = hub.MODELS[name]
    config.save_pretrained(tmp_path / "hf")
    export_safetensors(index, str(tmp_path / "out"), options=ExportOptions(), like=str(tmp_path / "hf"))
    model, info = kind.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model.eval()(input_ids=hub.TOKENS).logits
    torch.testing.assert_close(logits, trained, **CLOSE)
    _, dense = load(engines, hub.Kind(1, 1, model=name), tmp_path)
    exported = model.state_dict()
    assert dense.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[key]) for key, tensor in dense.items())
    again, _ = load(engines, hub.Kind(model=name, **begun), tmp_path / "out")  # with names of the hub
    torch.testing.assert_close(again, trained, **CLOSE)


def load(engines: Engines, kind: Any, folder: Path) -> Any:
    """Return the logits and the state dict of an engine after a load."""
    (outcome,) = engines.load(kind, Load(str(folder)))
    assert not outcome.errors, outcome.errors[0]
    return outcome.state


def test_all_stages_of_a_pipeline_read_a_hub_model_equally(hub: Any, engines: Engines) -> None:
    """Only one stage contains the model with rename rules, but all ranks must read the checkpoint equally."""
    folder = str(engines.save(hub.Stages(1), steps=(1,), after=0).folder)
    refused, taken = engines.load(hub.Stages(0), Load(folder), Load(folder, {"load_module_strict": False}))
    refused.check_refused("MismatchError", "0.bert.embeddings.position_ids: in the checkpoint, not in the model")
    assert not taken.errors and [local.state for local in taken.ranks] == [1, 1]
