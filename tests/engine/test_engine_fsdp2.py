"""Exports with `ds_ucp export --to dcp` under FSDP2, which has no knowledge of DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.export.beside import make_scaler
from deepspeed_ucp.testing import WorldPool
from tests.export import foreign_run, fsdp_run
from tests.export.test_dcp import read_all, save_trained
from tests.export.test_safetensors import check_same
from tests.synth import Topology


def test_fsdp2_goes_on(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two ranks load it and take two steps: losses and weights equal an uninterrupted run's."""
    folder = save_trained(tmp_path, Topology(3, 4))
    model, optimizer = fsdp_run.build()
    losses = fsdp_run.train(model, optimizer, range(5))
    result, _ = ucp_worlds.get(2).run(fsdp_run.resume, str(folder))
    assert result["losses"] == losses[3:]
    check_same(result["model"], dict(model.state_dict()))
    for name, param in model.named_parameters():
        check_same(result["optim"]["state"][name], optimizer.state[param])


def test_from_deepspeed_to_fsdp2_and_back(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Masters, states, steps and hyper-parameters of three ranks are on one rank after two ranks of FSDP2."""
    saved, out, there = (str(tmp_path / name) for name in ("saved", "out", "there"))
    state = ucp_worlds.get(3).run(foreign_run.save_engine, saved, 3, steps=3)[0]
    assert main(["export", saved, out, "--to", "dcp"]) == 0
    ucp_worlds.get(2).run(fsdp_run.copy, out, there)
    for back, *_ in ucp_worlds.get(1).run(foreign_run.go_on, there, (1, 3), range(0))[0]:
        assert back.parameters.keys() == state.parameters.keys()
        check_same(back.buffers, state.buffers)
        for name, held in state.parameters.items():
            found = back.parameters[name]
            check_same({"fp32": found.fp32, **found.tensors}, {"fp32": held.fp32, **held.tensors})
            assert found.scalars == held.scalars
            assert {key: found.hyper[key] for key in held.hyper} == held.hyper
        assert back.counters["global_steps"] == 3


def test_from_fsdp2_to_deepspeed_and_back(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """All states of two ranks of FSDP2 are on one rank after three ranks of ZeRO-3."""
    saved, there, out, back = (str(tmp_path / name) for name in ("saved", "there", "out", "back"))
    ucp_worlds.get(2).run(foreign_run.save, saved, 3)
    ucp_worlds.get(3).run(foreign_run.save_engine, there, 3, load=saved)
    assert main(["export", there, out, "--to", "dcp"]) == 0
    ucp_worlds.get(1).run(fsdp_run.copy, out, back)
    first, last = read_all(Path(saved)), read_all(Path(back))
    check_same(last["model"], first["model"])
    assert last["optim"]["param_groups"] == first["optim"]["param_groups"]
    assert last["optim"]["state"].keys() == first["optim"]["state"].keys()
    for name, held in first["optim"]["state"].items():
        check_same(last["optim"]["state"][name], held)


@pytest.mark.parametrize("overflows", [(), (3,), (0, 1, 6)])
def test_torchs_scaler_goes_on_as_deepspeeds(overflows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales are equal up to the next overflow, which halves them."""
    ours = DynamicLossScaler(2.0**16, 4, 1.0, 1, False)
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    for step in range(7):
        ours.update_scale(step in overflows)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(make_scaler(vars(ours)))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    for step in range(7, 17):
        is_bad = step == 16
        theirs.scale(torch.zeros(1))
        optimizer.param_groups[0]["params"][0].grad = torch.full((1,), torch.inf if is_bad else 0.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update_scale(is_bad)
        assert theirs.get_scale() == ours.cur_scale
