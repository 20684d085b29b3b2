"""Checkpoints of other libraries go on under DeepSpeed: what engines hold is what those libraries read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine
from tests.export import foreign_run, fsdp_run
from tests.export.test_dcp import read_all
from tests.export.test_safetensors import check_same

pytestmark = pytest.mark.engine

STAGES = (0, 1, 2, 3)


def check_engine(state: CapturedEngine, tree: dict[str, Any]) -> None:
    """Weights, states, steps, hyper-parameters and buffers are those that torch reads, to the bit."""
    check_weights(state, tree["model"])
    groups = {name: group for group in tree["optim"]["param_groups"] for name in group["params"]}
    for name, held in state.parameters.items():
        saved = dict(tree["optim"]["state"][name])
        assert held.scalars["step"] == float(saved.pop("step")) == 3
        check_same(held.tensors, saved)
        for key in ("lr", "betas", "eps", "weight_decay"):
            assert held.hyper[key] == groups[name][key]
    assert state.counters["global_steps"] == 3


def check_weights(state: CapturedEngine, weights: dict[str, Any]) -> None:
    """Masters and buffers, to the bit."""
    assert set(state.parameters) | set(state.buffers) == set(weights)
    held = {name: each.fp32 for name, each in state.parameters.items()} | state.buffers
    check_same(held, {name: weights[name].to(held[name].dtype) for name in held})


def test_fsdp2_goes_on_at_every_stage(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Of two ranks' FSDP2 run every weight and state is in engines on one rank and on three; the losses go on."""
    nested, flat = str(tmp_path / "nested"), str(tmp_path / "flat")
    ucp_worlds.get(2).run(foreign_run.save, nested, 3)
    ucp_worlds.get(2).run(foreign_run.save, flat, 3, flatten=True)
    tree = read_all(tmp_path / "nested")
    losses = fsdp_run.train(*fsdp_run.build(), range(5))
    for ranks, folder in ((1, nested), (3, nested), (1, flat)):
        engines = ucp_worlds.get(ranks).run(foreign_run.go_on, folder, STAGES, range(3, 5))[0]
        for state, went_on, heard, (path, client) in engines:
            check_engine(state, tree)
            assert went_on == pytest.approx(losses[3:], rel=1e-6)
            assert (path, client) == (f"{folder}/.metadata", {})
            assert any("torch.distributed.checkpoint → ZeRO-" in line for line in heard)
            assert not any("clips gradients" in line or "ranks 1" in line for line in heard)  # it tells no ranks


def test_fsdp2_in_16_bits(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Masters are FSDP's fp32 weights, and the model computes with what they round to."""
    folder = str(tmp_path / "fsdp")
    ucp_worlds.get(2).run(foreign_run.save, folder, 3)
    tree = read_all(tmp_path / "fsdp")
    options = {"precision": "bf16", "clip": 0.5}
    for state, _, heard, _ in ucp_worlds.get(2).run(foreign_run.go_on, folder, (1, 3), range(3, 5), **options)[0]:
        for name, held in state.parameters.items():
            check_same({"fp32": held.fp32, "value": held.value}, _both(tree["model"][name]))
        assert state.counters["global_steps"] == 3
        assert any("clips gradients at norm 0.5" in line for line in heard)


def _both(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"fp32": weight, "value": weight.bfloat16()}


def test_weights_alone(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """A folder of weights fills engines; the optimizer stays as it is, new here, which is told."""
    torch.manual_seed(5)
    weights = dict(fsdp_run.Net().state_dict())
    save_file(weights, tmp_path / "model.safetensors")
    engines = ucp_worlds.get(2).run(foreign_run.go_on, str(tmp_path), STAGES, range(2))[0]
    for state, losses, heard, (path, client) in engines:
        check_weights(state, weights)
        assert all(not each.tensors and not each.scalars for each in state.parameters.values())
        assert state.counters["global_steps"] == 0
        assert client == {}
        assert path is not None and losses
        assert any("weights alone" in line for line in heard)


def test_an_adapter_goes_on_over_its_base(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Each from a folder of its own, into a model that PEFT has wrapped."""
    from tests.export.test_adapter import LORAS, make_base, make_peft

    base, folder = str(tmp_path / "base"), str(tmp_path / "peft")
    make_base().save_pretrained(base)
    model = make_peft(**LORAS["saved"])
    model.save_pretrained(folder, save_embedding_layers=False)
    wanted = {name: param.detach() for name, param in model.named_parameters()}
    for values, heard in ucp_worlds.get(2).run(foreign_run.load_adapter, base, folder, STAGES)[0]:
        check_same(values, wanted)
        for told in ("the checkpoint has no adapter", "holds no weights of its base"):
            assert any(told in line for line in heard)
