"""``ds_ucp diff``: exit codes, text and JSON."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli import diff as command
from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.examine.diff import AtomDifference, Difference, Tally
from deepspeed_ucp.examine.values import ValueDifference
from tests.cli.samples import make_gpt, write_sample
from tests.synth import Topology


def test_diff_accepts_further_places_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"a": Topology(1, 2), "b": Topology(3, 3)}
    paths = [str(write_sample(tmp_path / name, sides[name], make_gpt(1), global_samples=96)) for name in sides]
    kept = [str(shutil.copytree(path, f"{path}_kept")) for path in paths]
    for path in paths:
        next(Path(path).glob("*optim_states.pt")).unlink()
    assert main(["diff", *paths, "--also", kept[0], "--also-b", kept[1]]) == 0
    assert main(["diff", *paths, "--also", kept[0]]) == 2
    assert "optim_states.pt" in capsys.readouterr().err


def write_text(*atoms: AtomDifference, values: tuple[ValueDifference, ...] = (), **options: bool) -> str:
    return "\n".join(command.format_difference(Difference(9, 1234, 0, atoms, values, (), (), 0.0), **options))


FP32 = ("float32", "float32")


def test_long_tables_of_differences_are_truncated() -> None:
    tally = Tally(5, 1, 0, 2.0, 1.0)
    atoms = [AtomDifference(f"layer_{chr(97 + at)}", "fp32", "values", FP32, tally, index=(0,)) for at in range(25)]
    text = write_text(*atoms)
    assert "… 5 more lines; --all shows all, --json too" in text and text.count("layer_") == 20
    assert "… 1 more line; --all shows all" in write_text(*atoms[:21])
    assert write_text(*atoms, everything=True).count("layer_") == 25


def test_each_kind_of_difference_is_described() -> None:
    padding = Tally(10, 2, 50, math.inf, math.inf)
    text = write_text(
        AtomDifference("a", "fp32", "only in A", FP32),
        AtomDifference("b", "fp32", "shape", FP32, text="shape (2,) ≠ (3,)"),
        AtomDifference("wte", "fp32", "values", FP32, Tally(50), padding, index=(5, 0), shard=1),
        values=(ValueDifference("hyper-parameter", "lr", 0.1, 0.2, ("a", "b", "c")),),
    )
    for part in ("only in A", "shape (2,) ≠ (3,)", "padding rows", "2 of 10", "[5, 0] of tp rank 1", "inf"):
        assert part in text
    assert "hyper-parameter lr: 0.1 ≠ 0.2 (a and 2 more)" in text


CONFIG = """{  // DeepSpeed reads hjson
    "train_batch_size": 8, "zero_optimization": {"stage": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.999], "weight_decay": "auto"}},
    "checkpoint": {"universal": {"storage_options": {"anything": "S3cr3t"}}},
}"""


def test_settings_of_a_save_are_compared_with_a_file(tmp_path: Path, run_json: Any, capsys: Any) -> None:
    saved = write_sample(tmp_path / "saved", Topology(1, 2, "bf16"), make_gpt(1))
    config = tmp_path / "ds_config.json"
    config.write_text(CONFIG)
    for a, b, sides in ((saved, config, ("left", "right")), (config, saved, ("right", "left"))):
        code, found = run_json("diff", "--config", a, b)
        values = {(each["section"], each["key"], each[sides[0]]): each[sides[1]] for each in found["values"]}
        assert (code, found["equal"]) == (1, False)
        assert values["ds_config", "optimizer.params.lr", 1e-3] == 2e-3
        assert values["hyper-parameter", "lr", 1e-3] == 2e-3
        assert not any(key == "betas" for section, key, _ in values if section == "hyper-parameter")
        assert any("zero_optimization.stage" in note for note in found["notes"])
        assert values["ds_config", "checkpoint.universal.storage_options.anything", "(absent)"] == "(hidden)"
    assert main(["diff", "--config", str(saved), str(config)]) == 1
    printed = capsys.readouterr().out
    assert "hyper-parameter lr: 0.001 ≠ 0.002" in printed
    assert "S3cr3t" not in printed
    for text, message in (("{", "is no ds_config in JSON"), ("[1]", "an object is wanted")):
        config.write_text(text)
        code, found = run_json("diff", "--config", saved, config)
        assert (code, found["kind"]) == (2, "ConfigError") and message in found["error"]


def test_secrets_of_saved_configurations_are_hidden(tmp_path: Path, run_json: Any) -> None:
    saves = []
    for secret in ("S3cr3tOne", "S3cr3tTwo"):
        config = {"wandb": {"api_key": secret}, "checkpoint": {"universal": {"storage_options": {"x": secret}}}}
        client = {"hub_token": secret, "url": f"https://user:{secret}@host/run"}
        options = {"ds_config": config, "client_state": client}
        saves.append(write_sample(tmp_path / secret[-3:], Topology(1, 1, "bf16"), make_gpt(1), **options))
    for more in ([], ["--config"]):
        code, found = run_json("diff", *more, *saves)
        assert code == 1
        assert "S3cr3t" not in json.dumps(found)
        assert "(hidden)" in json.dumps(found)
