"""``ds_ucp export``: options, messages, and the files for other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_ucp.cli.dispatch import main
from tests.support.expertmodels import NATIVES
from tests.support.exports import check_same, read_all
from tests.support.reshard3d import VOCAB, draw_state, make_plain
from tests.synth import Model, Param, Run, State, Topology, random_state, write_checkpoint

MODEL = Model((Param("net.a", (30, 7)), Param("net.b", (30,)), Param("head", (30, 7), alias_of="net.a")))
STATE = random_state(MODEL, 0, precision="bf16")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    topology = Topology(2, 3, "bf16")
    run = Run(ds_config={**topology.ds_config(), "optimizer": {"type": "AdamW"}})
    path = write_checkpoint(tmp_path / "saved", MODEL, STATE, topology, run=run)
    (path.parent / "latest").write_text(path.name)
    return path.parent


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


def test_every_export_option_for_weights(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "tokenizer.json", "training.log"):
        (tmp_path / "hf" / name).write_text("{}")
    options = ["--dtype", "bf16", "--max-shard-size", "0.3KB", "--tied", "copy", "--strip-prefix", "net."]
    options += ["--rename", "head=net.lm_head", "--like", str(tmp_path / "hf"), "--workers", "2", "--window-mb", "16"]
    assert export(checkpoint, tmp_path / "out", *options, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert set(report["files"]) == {*shards, "model.safetensors.index.json", "config.json", "tokenizer.json"}
    assert report["bytes_written"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert (report["format"], report["tensors"], report["dtypes"]) == ("safetensors", 3, ["bfloat16"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights, shapes = index["weight_map"], [STATE.atoms[name]["fp32"].shape for name in ("net.a", "net.b", "net.a")]
    assert set(weights) == {"a", "b", "lm_head"}
    assert index["metadata"]["total_size"] == sum(2 * shape.numel() for shape in shapes)
    a = load_file(tmp_path / "out" / weights["lm_head"])["lm_head"]
    assert torch.equal(a, STATE.atoms["net.a"]["fp32"].bfloat16())
    assert export(checkpoint, tmp_path / "out", "--overwrite") == 0
    assert "from_pretrained" not in capsys.readouterr().out and (tmp_path / "out" / "config.json").exists()
    assert export(checkpoint, tmp_path / "out", "--overwrite", "--to", "dcp") == 0
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("", "model.net.a optim.state.net.a.exp_avg optim.param_groups.0.lr"),
        ("--layout flattened", "model.head optim.state.net.a.step optim.param_groups.net.b.lr"),
        ("--layout torchtitan", "net.a head optimizer.state.net.a.exp_avg optimizer.param_groups.net.b.lr"),
        ("--weights-only --tied drop", "model.net.a model.net.b"),
    ],
)
def test_export_to_dcp(checkpoint: Path, tmp_path: Path, options: str, keys: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    assert export(checkpoint, tmp_path / "out", "--to", "dcp", *options.split()) == 0
    found = set(FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata)
    assert found == {*keys.split()} if "--weights-only" in options else found > {*keys.split()}


def test_export_to_accelerates_folders(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It copies the trainer's files from the tag's folder, warns about missing ones and replaces an older export."""
    out, options = tmp_path / "out", ["--to", "dcp", "--layout", "accelerate", "--overwrite"]
    assert export(checkpoint, out, *options) == 0
    warning = "scheduler.bin (which load_state wants for a prepared scheduler: prepare it afterwards, at step "
    assert warning in capsys.readouterr().err
    for name in ("trainer_state.json", "rng_state_0.pth", "training.log"):
        (checkpoint / name).write_text(name)
    assert export(checkpoint, out, *options, "--weights-only") == 0
    assert capsys.readouterr().err == ""
    assert {path.name for path in out.iterdir()} == {"pytorch_model_fsdp_0", "trainer_state.json", "rng_state_0.pth"}
    assert export(checkpoint, out, *options) == 0
    assert "scheduler.pt has only its step, 3" in capsys.readouterr().err
    assert torch.load(out / "scheduler.pt", weights_only=True)["last_epoch"] == 3
    (checkpoint / "scheduler.pt").write_text("s")
    assert export(checkpoint, out, *options) == 0
    assert capsys.readouterr().err == ""
    assert (out / "scheduler.pt").read_text() == "s"
    assert {path.name for path in (out / "optimizer_0").iterdir()} >= {".metadata", "__0_0.distcp"}
    for weights, warning in ((), "neither model nor optimizer: "), (("--weights-only",), ""):
        assert export(out, tmp_path / "again", "--to", "dcp", "--overwrite", *weights) == 0
        assert warning in (err := capsys.readouterr().err) and bool(err) == bool(warning)


def test_export_accepts_patterns(tmp_path: Path) -> None:
    saved_run = draw_state(make_plain(("word", "row")), Topology(1, 2, tp=2))
    saved_run.write(tmp_path / "in")
    word, row = {"match": ".*word", "pattern": "shard-v", "vocab": True}, {"match": ".*row", "pattern": "shard-h"}
    rules = {
        "rules": [word, row],
        "original_vocab_size": VOCAB,
        "rename": [{"from": "body\\.(?P<rest>.*)", "to": "h.0.{rest}"}],
    }
    assert export(tmp_path / "in", tmp_path / "out", "--patterns", json.dumps(rules)) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["h.0.row"], saved_run.state.atoms["body.row"]["fp32"])
    assert torch.equal(found["h.0.word"], saved_run.state.atoms["body.word"]["fp32"][:VOCAB])


def test_export_of_stage_0_needs_groups_for_masters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = State({name: dict(states) for name, states in random_state(MODEL, 0).atoms.items()}, STATE.scalars)
    path = write_checkpoint(tmp_path / "in", MODEL, state, Topology(0, precision="fp16", wrapper="fused"))
    assert export(path, tmp_path / "own") == 0
    assert "--groups module" in capsys.readouterr().err
    assert export(path, tmp_path / "master", "--groups", "module") == 0
    expected = state.atoms["net.b"]["fp32"]
    assert torch.equal(load_file(tmp_path / "own" / "model.safetensors")["net.b"], expected.half().float())
    assert torch.equal(load_file(tmp_path / "master" / "model.safetensors")["net.b"], expected)


def test_masters_and_states_of_experts_at_stage_0_are_exported_with_names(tmp_path: Path) -> None:
    """DeepSpeed moves experts out of the optimizer's group, which needs names."""
    state = random_state(NATIVES, 1, precision="bf16")
    path = write_checkpoint(tmp_path, NATIVES, state, Topology(0, 4, "bf16", "unfused", ep=(2,)))
    assert export(path, tmp_path / "out", "--to", "dcp") == 2
    assert export(path, tmp_path / "out", "--to", "dcp", "--groups", "module") == 0
    found = read_all(tmp_path / "out")
    check_same(found["model"], {name: held["fp32"] for name, held in state.atoms.items()})
    states = found["optim"]["state"]
    check_same({n: states[n]["exp_avg"] for n in states}, {n: held["exp_avg"] for n, held in state.atoms.items()})
