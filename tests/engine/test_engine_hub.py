"""Hugging Face's mixture-of-experts models: trained under AutoEP, exported under the hub's names, back without it."""

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
from deepspeed_ucp.testing import WorldPool

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")
pytest.importorskip("transformers", minversion="5.0", reason="AutoEP knows transformers' fused experts alone")

NAMES = {"mixtral": (2, 3, None), "qwen3": (3, 1, 2), "deepseek": (1, 2, 2)}
"""By model the ZeRO stage of training, and the stage and expert-parallel degree of a new run."""

CLOSE = {"rtol": 0, "atol": 1e-6}  # AutoEP sums an expert's tokens in another order


@pytest.fixture(scope="module")
def engine_hub() -> Any:
    """Imported late: every worker collects this module, and the models take seconds to import."""
    return importlib.import_module("tests.support.engines.hub")


@pytest.mark.parametrize("name", NAMES)
def test_what_autoep_trained_is_a_model_of_the_hub(
    engine_hub: Any, name: str, ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    stage, *begun = NAMES[name]
    trained, *_ = ucp_worlds.get(2).run(engine_hub.save, name, stage, 2, str(tmp_path))
    index = open_checkpoint(str(next(tmp_path.glob("global_step*"))), Comm(), Naming(weights_only=stage == 3))
    out = str(tmp_path / "out")
    export_safetensors(index, out, options=ExportOptions(), like=str(tmp_path / "hf"))
    kind, _ = engine_hub.MODELS[name]
    model, info = kind.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model.eval()(input_ids=engine_hub.TOKENS).logits
    torch.testing.assert_close(logits, trained, **CLOSE)
    (_, dense), *_ = ucp_worlds.get(1).run(engine_hub.load, name, 1, None, str(tmp_path))
    exported = model.state_dict()
    assert dense.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[key]) for key, tensor in dense.items())
    for logits, _ in ucp_worlds.get(2).run(engine_hub.load, name, *begun, out):  # under the names of the hub
        torch.testing.assert_close(logits, trained, **CLOSE)


def test_a_model_of_the_hub_goes_on_under_autoep(engine_hub: Any, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    trained, *_ = ucp_worlds.get(2).run(engine_hub.save, "deepseek", 3, None, str(tmp_path))
    for logits, _ in ucp_worlds.get(2).run(engine_hub.load, "deepseek", 2, 2, str(tmp_path)):
        torch.testing.assert_close(logits, trained, **CLOSE)


def test_stages_of_a_pipeline_read_alike(engine_hub: Any, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    """Rules of a model that one stage alone has inside are no rules of the checkpoint's: all ranks need one view."""
    for message, steps in ucp_worlds.get(2).run(engine_hub.load_stages, str(tmp_path)):
        assert "0.bert.embeddings.position_ids: in the checkpoint, not in the model" in message
        assert steps == 1
