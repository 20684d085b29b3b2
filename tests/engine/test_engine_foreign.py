"""Checkpoints of other libraries in engines: messages, optimizers without states, adapters, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from deepspeed_ucp.testing import WorldPool
from tests.export import foreign_run, fsdp_run
from tests.export.test_dcp import read_all
from tests.export.test_safetensors import check_same
from tests.support.foreign import write_dcp

STAGES = (0, 1, 2, 3)


def test_fsdp2_in_16_bits(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Masters are FSDP's fp32 weights; the model has them rounded."""
    folder = str(tmp_path / "fsdp")
    ucp_worlds.get(2).run(foreign_run.save, folder, 3)
    tree = read_all(tmp_path / "fsdp")
    options = {"precision": "bf16", "clip": 0.5}
    for state, _, heard, _ in ucp_worlds.get(2).run(foreign_run.go_on, folder, (1, 3), range(3, 5), **options)[0]:
        for name, held in state.parameters.items():
            weight = tree["model"][name]
            check_same({"fp32": held.fp32, "value": held.value}, {"fp32": weight, "value": weight.bfloat16()})
        assert state.counters["global_steps"] == 3
        assert any("clips gradients at norm 0.5" in line for line in heard)


def test_an_optimizer_without_states_has_hyper_parameters(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """A plain SGD's groups are taken; a warning names an optimizer whose states start from zero."""
    model, adam = fsdp_run.build()
    optimizer = torch.optim.SGD([{"params": group["params"]} for group in adam.param_groups], lr=0.25)
    fsdp_run.train(model, optimizer, range(1))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path, no_dist=True)
    ((state, _, heard, _),) = ucp_worlds.get(1).run(foreign_run.go_on, str(tmp_path), (1,), range(0))[0]
    assert {held.hyper["lr"] for held in state.parameters.values()} == {0.25}
    assert any("the saved optimizer kept no states" in line for line in heard)
    fsdp_run.train(model, adam, range(1))
    weights, states = get_state_dict(model, adam)
    del states["state"]["second.weight"]
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "bare", no_dist=True)
    ((state, _, heard, _),) = ucp_worlds.get(1).run(foreign_run.go_on, str(tmp_path / "bare"), (0,), range(0))[0]
    assert any(line.startswith("second.weight: no optimizer state was saved") for line in heard)
    assert [name for name, held in state.parameters.items() if not held.tensors] == ["second.weight"]


def test_an_adapter_goes_on_over_its_base(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """From two folders, into a model that PEFT has wrapped."""
    from tests.export.test_adapter import LORAS, make_base, make_peft

    base, folder = str(tmp_path / "base"), str(tmp_path / "peft")
    make_base().save_pretrained(base)
    model = make_peft(**LORAS["saved"])
    model.save_pretrained(folder, save_embedding_layers=False)
    wanted = {name: param.detach() for name, param in model.named_parameters()}
    for values, heard in ucp_worlds.get(2).run(foreign_run.load_adapter, base, folder, STAGES)[0]:
        check_same(values, wanted)
        for words in ("the checkpoint has no adapter", "holds no weights of its base"):
            assert any(words in line for line in heard)


def test_what_is_refused_leaves_the_engine_as_it_was(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The engine has trained: every bit, and the next losses."""
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
