"""Modules that a model registers under several names, as exports write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.testing import WorldPool
from tests.export.test_dcp import read_all
from tests.export.test_safetensors import check_same


class Net(torch.nn.Module):
    """A block and a norm are registered twice; a weight is shared by two modules.

    Args:
        unclear: of the second layer two siblings may be the first one.
    """

    def __init__(self, *, unclear: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        if unclear:
            self.other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.again = self.layer
        self.norm = torch.nn.BatchNorm1d(4)
        self.second_norm = self.norm
        self.embed, self.head = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.embed(self.second_norm(self.again(self.norm(self.layer(x)))))).square().mean()


def save(folder: str, stage: int, *, unclear: bool) -> dict[str, torch.Tensor]:
    """Save after a step; the model's state dict."""
    torch.manual_seed(0)
    model = Net(unclear=unclear)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"universal": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.randn(2, 4)))
    engine.step()
    engine.save_checkpoint(folder)
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=stage == 3):
        held = {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}
    engine.destroy()
    return held


AGAIN = [f"again.{layer}.{kind}" for layer in (0, 1) for kind in ("bias", "weight")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exports_have_every_name(tmp_path: Path, ucp_worlds: WorldPool, stage: int) -> None:
    """As torch's state dict has them; in files of Hugging Face's each tensor is there once."""
    held = ucp_worlds.get(2).run(save, str(tmp_path / "it"), stage, unclear=False)[0]
    assert main(["convert", str(tmp_path / "it/global_step1"), str(tmp_path / "atomic/global_step1")]) == 0
    for name in ("it", "atomic"):
        for kind in ("dcp", "hf"):
            assert main(["export", str(tmp_path / name), str(tmp_path / name / kind), "--to", kind]) == 0
        check_same(read_all(tmp_path / name / "dcp")["model"], held)
        once = load_file(tmp_path / name / "hf/model.safetensors")
        check_same(once, {key: held[key] for key in once})
        ties = {"head.weight", *(key for key in held if key.startswith(("again.", "second_norm.")))}
        assert once.keys() == held.keys() - ties


def test_what_zero3_does_not_record_is_named(
    tmp_path: Path, ucp_worlds: WorldPool, capsys: pytest.CaptureFixture[str]
) -> None:
    held = ucp_worlds.get(1).run(save, str(tmp_path / "it"), 3, unclear=True)[0]
    assert main(["export", str(tmp_path / "it"), str(tmp_path / "out"), "--to", "dcp"]) == 0
    warnings = capsys.readouterr().err
    written = read_all(tmp_path / "out")["model"]
    assert held.keys() - written.keys() == {*AGAIN}
    assert torch.equal(written["second_norm.weight"], held["second_norm.weight"])
    assert "again.0.bias" in warnings and "are not written" in warnings
