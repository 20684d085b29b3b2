"""Each trainer under DeepSpeed with each format that ``engine.load_checkpoint`` loads: resumed, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trainers_fsdp
from safetensors.torch import save_file
from test_trainers_hf import choose

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.testing import WorldPool

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


def test_the_trainer_resumes_or_refuses_each_format(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    saved = tmp_path / "in/checkpoint-2"
    whole = ucp_worlds.get(1).run(trainers_fsdp.train, "deepspeed", str(saved.parent), steps=4, save=2)[0]
    folders = {"tag": saved, "atomic": convert(saved, "global_step2", tmp_path / "atomic/checkpoint-2")}
    for how in ("SHARDED", "FULL"):
        ucp_worlds.get(2).run(trainers_fsdp.train, how, str(tmp_path / how), steps=2, save=2)
        folders[how] = tmp_path / how / "checkpoint-2"
    folders["dcp"] = export(saved, tmp_path / "dcp/checkpoint-2")
    numbered = tmp_path / "numbered/checkpoint-2"
    shutil.copytree(saved, numbered, ignore=shutil.ignore_patterns(*OURS))
    torch.save({}, numbered / "optimizer.pt")
    refused = {**make_plain(saved, tmp_path), "numbered": numbered}
    found = resume("trainer", {**folders, **refused}, ucp_worlds)
    for kind, folder in folders.items():
        losses, log = found[kind]
        assert losses == pytest.approx(whole, rel=1e-6), (kind, losses)
        assert ("records no total batch; this run takes 4 samples a step" in log) is (kind not in ("tag", "atomic"))
        assert choose(str(folder), fallback=True) == str(folder)
    for kind, folder in refused.items():
        error, _ = found[kind]
        assert str(error).startswith(f"CheckpointError: {folder}: "), (kind, error)
        assert '"arguments": {"load_module_only": true}' in error, (kind, error)


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
    folders["dcp"] = export(saved, tmp_path / "dcp/it")
    refused = make_plain(saved, tmp_path)
    torch.manual_seed(11)
    drawn = int(torch.randint(1 << 30, (1,)))
    found = resume("accelerate", {**folders, **refused}, ucp_worlds)
    for kind in folders:
        made, log = found[kind]
        assert not isinstance(made, str), (kind, made)
        assert (made[0], made[1]) == (pytest.approx(losses[3:], rel=1e-6), pytest.approx(rates, rel=1e-6)), kind
        assert made[2] == drawn or kind == "dcp", kind
        assert ("records no total batch; this run takes 8 samples a step" in log) is (kind not in ("tag", "atomic"))
    for kind, folder in refused.items():
        error, _ = found[kind]
        assert str(error).startswith(f"CheckpointError: {folder}: has only weights"), (kind, error)
        assert "load_module_only=True" in error


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
    refused = {**make_plain(saved, tmp_path), "dcp": export(saved, tmp_path / "dcp/it.ckpt")}
    found = resume("lightning", {**folders, **refused}, ucp_worlds)
    for kind in folders:
        made, log = found[kind]
        assert made == pytest.approx(losses[3:], rel=1e-6), (kind, made)
        assert ("records no total batch; this run takes 2 samples a step" in log) is (kind not in ("tag", "atomic"))
    for kind, folder in refused.items():
        error, _ = found[kind]
        assert str(error).startswith(f"CheckpointError: {folder}: "), (kind, error)
        assert "engine.load_checkpoint(folder) in on_fit_start" in error, (kind, error)
