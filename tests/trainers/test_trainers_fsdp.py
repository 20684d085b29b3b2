"""Trainers with FSDP on gloo: they resume exports of DeepSpeed checkpoints, and DeepSpeed loads their saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainers_fsdp

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.formats.foreign.names import MODEL_FOLDER, OPTIMIZER_FOLDER
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine
from tests.support.covering import params
from tests.support.engines import foreign_run
from tests.support.exports import check_same, read_all

pytest.importorskip("accelerate")


def read_folders(folder: Path) -> dict[str, Any]:
    """Read Accelerate's folders, in the form of :func:`read_all`."""
    optimizer = read_all(folder / OPTIMIZER_FOLDER)["optimizer"]
    return {"model": read_all(folder / MODEL_FOLDER)["model"], "optim": optimizer}


def check_engine(state: CapturedEngine, tree: dict[str, Any]) -> None:
    """Check that masters, states, steps, hyper-parameters and buffers equal torch's, to the bit."""
    assert set(state.parameters) | set(state.buffers) == set(tree["model"])
    held = {name: each.fp32 for name, each in state.parameters.items()} | state.buffers
    check_same(held, {name: tree["model"][name].to(held[name].dtype) for name in held})
    groups = {name: group for group in tree["optim"]["param_groups"] for name in group["params"]}
    for name, each in state.parameters.items():
        saved = dict(tree["optim"]["state"][name])
        assert each.scalars["step"] == float(saved.pop("step")) == 3
        check_same(each.tensors, saved)
        for key in ("lr", "betas", "eps", "weight_decay"):
            assert each.hyper[key] == groups[name][key]
    assert state.counters["global_steps"] == 3


def check_states(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    check_same(found["model"], wanted["model"])
    assert found["optim"]["state"].keys() == wanted["optim"]["state"].keys()
    for name, held in wanted["optim"]["state"].items():
        check_same(found["optim"]["state"][name], held)
    for one, other in zip(found["optim"]["param_groups"], wanted["optim"]["param_groups"], strict=True):
        assert {key: one[key] for key in other if key != "params"} == {k: v for k, v in other.items() if k != "params"}


def test_accelerate_resumes_a_deepspeed_save_under_fsdp(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """One rank under DeepSpeed saves; two under FSDP2 and FSDP1 load model, optimizer, schedule and random states."""
    saved, out = str(tmp_path / "saved"), str(tmp_path / "out")
    one, two, run = ucp_worlds.get(1), ucp_worlds.get(2), trainers_fsdp.accelerate
    ((_, rates, _),) = one.run(run, "deepspeed", range(3), save=saved)
    ((losses, *_),) = one.run(run, "deepspeed", range(5))
    assert main(["export", saved, out, "--to", "dcp", "--layout", "accelerate"]) == 0
    for version in ("2", "1"):
        two.run(run, f"{version} SHARDED", range(0), load=out, save=str(tmp_path / version), warm=version == "1")
    (went_on, after, drawn), _ = two.run(run, "2 SHARDED", range(3, 5), load=out)
    wanted = read_folders(Path(out))
    for version in ("2", "1"):
        check_states(read_folders(tmp_path / version), wanted)
    assert went_on == losses[3:]
    assert after == [rate / 2 for rate in rates]
    torch.manual_seed(11)
    assert drawn == int(torch.randint(1 << 30, (1,)))


def test_the_trainer_resumes_a_deepspeed_save_under_fsdp(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """One rank saves; two ranks restore schedule and position in the data, with and without a scheduler's file."""
    whole = ucp_worlds.get(1).run(trainers_fsdp.train, "deepspeed", str(tmp_path / "in"), steps=6, save=3)[0]
    for step in (3, 6):
        folder, out = (str(tmp_path / place / f"checkpoint-{step}") for place in ("in", "out"))
        assert main(["export", folder, out, "--to", "dcp", "--layout", "accelerate"]) == 0
    (tmp_path / "in/checkpoint-3/scheduler.pt").unlink()
    folder, out = (str(tmp_path / place) for place in ("in/checkpoint-3", "bare"))
    assert main(["export", folder, out, "--to", "dcp", "--layout", "accelerate"]) == 0
    for resume in (out, str(tmp_path / "out/checkpoint-3")):
        options = {"steps": 6, "save": 3, "resume": resume}
        rest = ucp_worlds.get(2).run(trainers_fsdp.train, "SHARDED", str(tmp_path / "on"), **options)[0]
        assert rest == pytest.approx(whole, rel=1e-6)
    found, wanted = (read_folders(tmp_path / place / "checkpoint-6") for place in ("on", "out"))
    for name, held in wanted["optim"]["state"].items():
        torch.testing.assert_close(found["model"][name], wanted["model"][name], rtol=0, atol=1e-6)
        torch.testing.assert_close(found["optim"]["state"][name], held, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("how", params(["2 SHARDED", "2 FULL"], ["1 SHARDED"]))
def test_deepspeed_loads_fsdp_saves_of_accelerate(tmp_path: Path, ucp_worlds: WorldPool, how: str) -> None:
    folder = tmp_path / "it"
    ucp_worlds.get(2).run(trainers_fsdp.accelerate, how, range(3), save=str(folder))
    if how.endswith("FULL"):
        optim = torch.load(folder / "optimizer.bin", weights_only=True)
        tree = {"model": torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True), "optim": optim}
    else:
        tree = read_folders(folder)
    for state, heard in ucp_worlds.get(1).run(foreign_run.go_on, str(folder), (1, 3))[0]:
        check_engine(state, tree)
        beside = "random_states_0.pkl, random_states_1.pkl, scheduler.bin"
        assert any(f"neither model nor optimizer: {beside}." in line for line in heard)


def test_deepspeed_loads_fsdp_saves_of_the_trainer(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Both kinds store the tied head separately; it is one tensor in the engine."""
    folders = {how: tmp_path / how / "checkpoint-2" for how in ("SHARDED", "FULL")}
    for how, folder in folders.items():
        ucp_worlds.get(2).run(trainers_fsdp.train, how, str(folder.parent), steps=2, save=2)
    tree = read_folders(folders["SHARDED"])
    found = ucp_worlds.get(1).run(trainers_fsdp.load_llama, [*map(str, folders.values())], (1, 3))[0]
    assert len(found) == 4
    for state, heard in found:
        assert set(state.parameters) == tree["model"].keys() - {"lm_head.weight"} == tree["optim"]["state"].keys()
        for name, held in state.parameters.items():
            saved = dict(tree["optim"]["state"][name])
            assert held.scalars["step"] == float(saved.pop("step")) == 2
            check_same({"fp32": held.fp32, **held.tensors}, {"fp32": tree["model"][name], **saved})
            assert held.hyper["lr"] == tree["optim"]["param_groups"][0]["lr"]
        (line,) = [line for line in heard if "neither model nor optimizer" in line]
        assert "rng_state_0.pth, rng_state_1.pth, scheduler.pt, trainer_state.json" in line


def cut(held: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("net."): value for name, value in held.items()}


@pytest.mark.parametrize("how", ["1", "2"], ids=["FSDPStrategy", "ModelParallelStrategy"])
def test_deepspeed_loads_fsdp_saves_of_lightning(tmp_path: Path, ucp_worlds: WorldPool, how: str) -> None:
    pytest.importorskip("lightning")
    folder = tmp_path / "it.ckpt"
    ucp_worlds.get(2).run(trainers_fsdp.fit, how, str(folder))
    held = read_all(folder)
    weights, optim = held["model" if how == "1" else "state_dict"], held["optimizer_0"]
    groups = [{**group, "params": cut(dict.fromkeys(group["params"]))} for group in optim["param_groups"]]
    tree = {"model": cut(weights), "optim": {"state": cut(optim["state"]), "param_groups": groups}}
    rules = {"rename": [{"from": r"net\.(?P<rest>.*)", "to": "{rest}"}]}
    options: dict[str, Any] = {"patterns": rules}
    for state, heard in ucp_worlds.get(1).run(foreign_run.go_on, str(folder), (1, 3), **options)[0]:
        check_engine(state, tree)
        assert any("neither model nor optimizer: meta.pt (schedulers, loops)." in line for line in heard)
