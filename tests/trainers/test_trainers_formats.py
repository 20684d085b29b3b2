"""Each trainer with each format, on gloo.

DeepSpeed's engine resumes or refuses the format; trainers with FSDP resume exports of DeepSpeed checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainers_fsdp
from safetensors.torch import save_file
from test_trainers_hf import choose

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.formats.foreign.names import MODEL_FOLDER, OPTIMIZER_FOLDER
from deepspeed_ucp.testing import World, WorldPool
from tests.support.engines.cases import Case, NetCase
from tests.support.engines.ranks import Load, load_each
from tests.support.exports import check_same, read_all

pytest.importorskip("accelerate")

OURS = ("global_step*", "pytorch_model", "checkpoint", "latest", "zero_to_fp32.py")
"""Names of engine files in a trainer's folder."""

PLAIN = {"weights": "model.safetensors", "adapter": "adapter_model.safetensors"}


def convert(saved: Path, tag: str, out: Path) -> Path:
    """Make a trainer's folder with an atomic checkpoint as tag."""
    shutil.copytree(saved, out, ignore=shutil.ignore_patterns(*OURS))
    assert main(["convert", str(saved / tag), str(out / tag)]) == 0
    (out / "latest").write_text(tag)
    return out


def export(saved: Path, out: Path, *options: str) -> Path:
    """Make a trainer's folder with exported model and optimizer."""
    assert main(["export", str(saved), str(out), "--to", "dcp", *options]) == 0
    shutil.copytree(saved, out, ignore=shutil.ignore_patterns(*OURS, "*.safetensors"), dirs_exist_ok=True)
    return out


def make_plain(saved: Path, parent: Path) -> dict[str, Path]:
    """Make a trainer's folder for each format without optimizer states, with the trainer's files."""
    folders = {}
    for kind, name in PLAIN.items():
        folders[kind] = parent / kind / saved.name
        shutil.copytree(saved, folders[kind], ignore=shutil.ignore_patterns(*OURS, "*.safetensors", "rng_*", "sched*"))
        save_file({"some.lora_A.weight": torch.zeros(2)}, folders[kind] / name)
        if kind == "adapter":
            (folders[kind] / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    return folders


def resume(trainer: str, folders: dict[str, Path], pool: WorldPool, **options: Any) -> dict[str, tuple[Any, str]]:
    """Return for each format the result of the resumed run, or its error, and the log."""
    found = pool.get(1).run(trainers_fsdp.attempt_all, trainer, [*map(str, folders.values())], **options)[0]
    return {kind: (made, "\n".join(lines)) for kind, (made, lines) in zip(folders, found, strict=True)}


def check(
    found: dict[str, tuple[Any, str]], loaded: Iterable[str], refused: dict[str, Path], *, samples: int, advice: str
) -> None:
    """Check logs of resumed runs and errors of refused ones."""
    for kind in loaded:
        made, log = found[kind]
        assert not isinstance(made, str), (kind, made)
        text = f"records no total batch; this run takes {samples} samples a step"
        assert (text in log) is (kind not in ("tag", "atomic"))
    for kind, folder in refused.items():
        error = str(found[kind][0])
        assert error.startswith(f"CheckpointError: {folder}: ") and advice in error, (kind, error)


def read_folders(folder: Path) -> dict[str, Any]:
    """Read Accelerate's folders, in the form of :func:`read_all`."""
    optimizer = read_all(folder / OPTIMIZER_FOLDER)["optimizer"]
    return {"model": read_all(folder / MODEL_FOLDER)["model"], "optim": optimizer}


def check_engines(
    world: World, kind: type[Case], folder: Path, tree: dict[str, Any], steps: int, beside: str, **options: Any
) -> None:
    """Load a folder of FSDP at ZeRO 1 and 3; compare with torch's states to the bit, and the names of unread files.

    The tied head of a Llama is stored separately; it is one tensor in the engine.
    """
    groups = {name: group for group in tree["optim"]["param_groups"] for name in group["params"]}
    for stage in (1, 3):
        work = load_each, kind(stage, 1).on(**options).training(1), [Load(str(folder))]
        ((local,),) = world.run(*work)
        state = local.state
        held = {name: each.fp32 for name, each in state.parameters.items()} | state.buffers
        assert held.keys() == tree["model"].keys() - {"lm_head.weight"}
        check_same(held, {name: tree["model"][name].to(held[name].dtype) for name in held})
        for name, each in state.parameters.items():
            saved = dict(tree["optim"]["state"][name])
            assert each.scalars["step"] == float(saved.pop("step")) == state.counters["global_steps"] == steps
            check_same(each.tensors, saved)
            assert all(each.hyper[key] == groups[name][key] for key in ("lr", "betas", "eps", "weight_decay"))
        assert any("neither model nor optimizer" in line and beside in line for _, line in local.log)


def test_the_trainer_resumes_or_refuses_each_format(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    saved = tmp_path / "in/checkpoint-2"
    whole = ucp_worlds.get(1).run(trainers_fsdp.train, "deepspeed", str(saved.parent), steps=4, save=2)[0]
    folders = {"tag": saved, "atomic": convert(saved, "global_step2", tmp_path / "atomic/checkpoint-2")}
    for how in ("SHARDED", "FULL"):
        ucp_worlds.get(2).run(trainers_fsdp.train, how, str(tmp_path / how), steps=2, save=2)
        folders[how] = tmp_path / how / "checkpoint-2"
        tree = read_folders(tmp_path / "SHARDED/checkpoint-2")
        beside = "rng_state_0.pth, rng_state_1.pth, scheduler.pt, trainer_state.json"
        check_engines(ucp_worlds.get(1), trainers_fsdp.LlamaCase, folders[how], tree, 2, beside)
    folders["dcp"] = export(saved, tmp_path / "dcp/checkpoint-2")
    numbered = tmp_path / "numbered/checkpoint-2"
    shutil.copytree(saved, numbered, ignore=shutil.ignore_patterns(*OURS))
    torch.save({}, numbered / "optimizer.pt")
    refused = {**make_plain(saved, tmp_path), "numbered": numbered}
    found = resume("trainer", {**folders, **refused}, ucp_worlds)
    check(found, folders, refused, samples=4, advice='"arguments": {"load_module_only": true}')
    for kind, folder in folders.items():
        assert found[kind][0] == pytest.approx(whole, rel=1e-6), kind
        assert choose(str(folder), fallback=True) == str(folder)


def test_the_trainer_resumes_an_adapter_from_each_format(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Sharded weights have the names of PEFT's files; optimizer states have the names of the model."""
    pytest.importorskip("peft")
    options: dict[str, Any] = {"steps": 4, "save": 2, "lora": True}
    saved = tmp_path / "in/checkpoint-2"
    whole = ucp_worlds.get(1).run(trainers_fsdp.train, "deepspeed", str(saved.parent), **options)[0]
    folders = {"tag": saved}
    for how in ("SHARDED", "FULL"):
        ucp_worlds.get(2).run(trainers_fsdp.train, how, str(tmp_path / how), **{**options, "steps": 2})
        folders[how] = tmp_path / how / "checkpoint-2"
    for kind, (losses, _) in resume("trainer", folders, ucp_worlds, lora=True).items():
        assert losses == pytest.approx(whole, rel=1e-6), (kind, losses)


def test_accelerate_resumes_or_refuses_each_format(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    saved = tmp_path / "in/it"
    ucp_worlds.get(1).run(trainers_fsdp.accelerate, "deepspeed", range(3), save=str(saved))
    losses, rates, _ = ucp_worlds.get(1).run(trainers_fsdp.accelerate, "deepspeed", range(5))[0]
    folders = {"tag": saved, "atomic": convert(saved, "pytorch_model", tmp_path / "atomic/it")}
    for how in ("2 SHARDED", "1 SHARDED", "2 FULL"):
        folders[how] = tmp_path / how / "it"
        ucp_worlds.get(2).run(trainers_fsdp.accelerate, how, range(3), save=str(folders[how]))
        if how.endswith("FULL"):
            model, optim = folders[how] / "pytorch_model_fsdp.bin", folders[how] / "optimizer.bin"
            tree = {"model": torch.load(model, weights_only=True), "optim": torch.load(optim, weights_only=True)}
        else:
            tree = read_folders(folders[how])
        beside = ": random_states_0.pkl, random_states_1.pkl, scheduler.bin."
        check_engines(ucp_worlds.get(1), NetCase, folders[how], tree, 3, beside)
    folders["dcp"] = export(saved, tmp_path / "dcp/it")
    refused = make_plain(saved, tmp_path)
    torch.manual_seed(11)
    drawn = int(torch.randint(1 << 30, (1,)))
    found = resume("accelerate", {**folders, **refused}, ucp_worlds)
    check(found, folders, refused, samples=8, advice="engine.load_checkpoint(folder, load_module_only=True)")
    for kind in folders:
        made = found[kind][0]
        assert (made[0], made[1]) == (pytest.approx(losses[3:], rel=1e-6), pytest.approx(rates, rel=1e-6)), kind
        assert made[2] == drawn or kind == "dcp", kind


def cut(held: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("net."): value for name, value in held.items()}


def test_lightning_resumes_or_refuses_each_format(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    pytest.importorskip("lightning")
    saved = tmp_path / "in/it.ckpt"
    pool = ucp_worlds.get(1)
    pool.run(trainers_fsdp.fit, "deepspeed", str(saved))
    losses = pool.run(trainers_fsdp.fit, "deepspeed", "", steps=5)[0]
    folders = {"tag": saved, "atomic": convert(saved, "checkpoint", tmp_path / "atomic/it.ckpt")}
    for how in ("1", "2"):
        folders[how] = tmp_path / how / "it.ckpt"
        ucp_worlds.get(2).run(trainers_fsdp.fit, how, str(folders[how]))
        held = read_all(folders[how])
        weights, optim = held["model" if how == "1" else "state_dict"], held["optimizer_0"]
        groups = [{**group, "params": cut(dict.fromkeys(group["params"]))} for group in optim["param_groups"]]
        tree = {"model": cut(weights), "optim": {"state": cut(optim["state"]), "param_groups": groups}}
        rules = {"rename": [{"from": r"net\.(?P<rest>.*)", "to": "{rest}"}]}
        check_engines(pool, NetCase, folders[how], tree, 3, ": meta.pt (schedulers, loops).", patterns=rules)
    refused = {**make_plain(saved, tmp_path), "dcp": export(saved, tmp_path / "dcp/it.ckpt")}
    found = resume("lightning", {**folders, **refused}, ucp_worlds)
    check(found, folders, refused, samples=2, advice="engine.load_checkpoint(folder) in on_fit_start")
    for kind in folders:
        assert found[kind][0] == pytest.approx(losses[3:], rel=1e-6), kind


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
