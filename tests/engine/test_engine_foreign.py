"""Checkpoints of other libraries in engines: messages, adapters, refusals; exports to them and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.export.dcp import make_scaler
from deepspeed_ucp.testing import WorldPool
from tests.support import fsdp_run
from tests.support.covering import few
from tests.support.engines import foreign_run
from tests.support.exports import check_same, read_all, save_trained
from tests.support.foreign import write_dcp
from tests.synth import Topology

STAGES = (0, 1, 2, 3)


def test_hyper_parameters_of_an_optimizer_without_states_are_restored(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """A plain SGD's groups are restored. A warning names an optimizer whose states start from zero.

    A conversion also lacks steps and gradient clipping.
    """
    model, adam = fsdp_run.build()
    optimizer = torch.optim.SGD([{"params": group["params"]} for group in adam.param_groups], lr=0.25)
    fsdp_run.train(model, optimizer, range(1))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "it", no_dist=True)
    assert main(["convert", str(tmp_path / "it"), str(tmp_path / "atomic")]) == 0
    for folder in (tmp_path / "it", tmp_path / "atomic"):
        ((state, heard),) = ucp_worlds.get(1).run(foreign_run.go_on, str(folder), (1,), clip=1.0)[0]
        assert {held.hyper["lr"] for held in state.parameters.values()} == {0.25}
        for words in ("the saved optimizer kept no states", "records no number of steps", "gradient clipping"):
            assert any(words in line for line in heard)
    fsdp_run.train(model, adam, range(1))
    weights, states = get_state_dict(model, adam)
    del states["state"]["second.weight"]
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "bare", no_dist=True)
    ((state, heard),) = ucp_worlds.get(1).run(foreign_run.go_on, str(tmp_path / "bare"), (0,))[0]
    assert any(line.startswith("second.weight: no optimizer state was saved") for line in heard)
    assert [name for name, held in state.parameters.items() if not held.tensors] == ["second.weight"]


def test_an_adapter_resumes_over_its_base_model(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two folders load into a model that PEFT has wrapped."""
    from tests.support.adapters import LORAS, make_base, make_peft

    base, folder = str(tmp_path / "base"), str(tmp_path / "peft")
    make_base().save_pretrained(base)
    model = make_peft(**LORAS["saved"])
    model.save_pretrained(folder, save_embedding_layers=False)
    wanted = {name: param.detach() for name, param in model.named_parameters()}
    for values, heard in ucp_worlds.get(1).run(foreign_run.load_adapter, base, folder, few(STAGES, 2))[0]:
        check_same(values, wanted)
        for words in ("the checkpoint has no adapter", "holds no weights of its base"):
            assert any(words in line for line in heard)


def test_a_refused_foreign_checkpoint_leaves_the_engine_unchanged(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The engine has trained. Every bit and the next losses are compared."""
    model, optimizer = fsdp_run.build()
    fsdp_run.train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    tree, wanted = {"model": weights, "optim": states}, dict[str, str]()

    def make(name: str, says: str) -> Path:
        wanted[str(tmp_path / name)] = says
        (tmp_path / name).mkdir()
        return tmp_path / name

    def make_blocks(name: str, says: str, tree: Any = tree) -> Path:
        write_dcp(make(name, says), tree, lambda tensor: [2, 2][: tensor.dim()])
        return tmp_path / name

    cut = make_blocks("flipped", "have CRC32 .*, the writer stored")
    flip_tensor(cut / "__3_0.distcp", weights["first.weight"][32:, 3:])
    make_blocks("other", "shape", {"model": {**weights, "first.weight": torch.ones(64, 7)}})
    bad = {**tree, "optim": {**states, "param_groups": [{**states["param_groups"][0], "step": float("nan")}]}}
    make_blocks("odd", "nan for a step", bad)
    save_file({**weights, "norm.bias": torch.ones(65)}, make("shapes", "norm.bias") / "model.safetensors")
    torch.save(weights, make("bin", "have CRC32 .*, the writer stored") / "pytorch_model.bin")
    flip_tensor(tmp_path / "bin" / "pytorch_model.bin", weights["second.weight"])
    save_file({"first.lora_A.weight": torch.ones(2, 6)}, make("adapter", "lora_A") / "adapter_model.safetensors")
    said, changed, *losses = ucp_worlds.get(2).run(foreign_run.refuse, list(wanted), 2)[0]
    for (folder, says), text in zip(wanted.items(), said, strict=True):
        assert re.search(says, text), f"{folder}: {text}"
    assert not changed
    assert losses[0] == losses[1]


def flip_tensor(path: Path, tensor: torch.Tensor) -> None:
    """Flip a bit of a tensor in a file."""
    data = bytearray(path.read_bytes())
    data[data.index(tensor.contiguous().numpy().tobytes()) + 9] ^= 4
    path.write_bytes(data)


# --- exports with `ds_ucp export --to dcp` under FSDP2


def test_fsdp2_resumes_an_export(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two ranks load it and take two steps. Losses and weights equal an uninterrupted run's."""
    folder = save_trained(tmp_path, Topology(3, 4))
    model, optimizer = fsdp_run.build()
    losses = fsdp_run.train(model, optimizer, range(5))
    result, _ = ucp_worlds.get(2).run(fsdp_run.resume, str(folder))
    assert result["losses"] == losses[3:]
    check_same(result["model"], dict(model.state_dict()))
    for name, param in model.named_parameters():
        check_same(result["optim"]["state"][name], optimizer.state[param])


def test_a_run_moves_from_deepspeed_to_fsdp2_and_back(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Three ranks save, two ranks of FSDP2 continue, and one rank restores masters, states, steps and hyper-parameters.

    A warning names this engine's clipping of gradients, which the format does not record.
    """
    saved, out, there = (str(tmp_path / name) for name in ("saved", "out", "there"))
    state = ucp_worlds.get(3).run(foreign_run.save_engine, saved, 3, steps=3)[0]
    assert main(["export", saved, out, "--to", "dcp"]) == 0
    ucp_worlds.get(2).run(fsdp_run.copy, out, there)
    for back, heard in ucp_worlds.get(1).run(foreign_run.go_on, there, (1, 3), clip=0.5)[0]:
        assert any("clips gradients at norm 0.5" in line for line in heard)
        assert back.parameters.keys() == state.parameters.keys()
        check_same(back.buffers, state.buffers)
        for name, held in state.parameters.items():
            found = back.parameters[name]
            check_same({"fp32": found.fp32, **found.tensors}, {"fp32": held.fp32, **held.tensors})
            assert found.scalars == held.scalars
            assert {key: found.hyper[key] for key in held.hyper} == held.hyper
        assert back.counters["global_steps"] == 3


def test_a_run_moves_from_fsdp2_to_deepspeed_and_back(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two ranks of FSDP2 save, three ranks of ZeRO-3 continue, and one rank restores all states."""
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
def test_deepspeeds_scaler_continues_torchs_scaler(overflows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales are equal until the next overflow, which halves them."""
    ours = DynamicLossScaler(2.0**16, 4, 1.0, 1, False)
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    for step in range(7):
        ours.update_scale(step in overflows)
    grad_scaler = torch.amp.GradScaler("cpu")
    grad_scaler.load_state_dict(make_scaler(vars(ours)))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    for step in range(7, 17):
        is_bad = step == 16
        grad_scaler.scale(torch.zeros(1))
        optimizer.param_groups[0]["params"][0].grad = torch.full((1,), torch.inf if is_bad else 0.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        ours.update_scale(is_bad)
        assert grad_scaler.get_scale() == ours.cur_scale
