"""``ds_ucp list``: every checkpoint of a folder with its step, whether it is whole and sealed, and its size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.examine.tags import find_saves
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.sources.latest import find_checkpoint
from deepspeed_ucp.sources.open import seal_folder
from tests.cli.samples import make_gpt, write_sample
from tests.synth import Topology

GPT = make_gpt(1)


def save(folder: Path, step: int, *, sealed: bool = False) -> Path:
    made = write_sample(folder, Topology(1, 2, "bf16"), GPT, global_steps=step)
    if sealed:
        seal_folder(str(made), Comm())
    return made


def test_tags_are_listed_the_newest_first(tmp_path: Path, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 9, sealed=True)
    late = save(tmp_path, 10)
    os.utime(next(late.iterdir()), (1, 1))  # a clock that was behind
    (tmp_path / "logs").mkdir()
    code, found = run_json("list", tmp_path)
    assert code == 0
    rows = [(each["tag"], each["step"], each["whole"], each["sealed"]) for each in found["checkpoints"]]
    assert rows == [("global_step10", 10, True, False), ("global_step9", 9, True, True)]
    first = found["checkpoints"][0]
    assert first["bytes"] == sum(path.stat().st_size for path in late.iterdir())
    assert (first["named_by"], found["latest"], first["topology"]) == (
        ["latest"],
        late.name,
        "ZeRO-1 dp=2 bfloat16 (zero12)",
    )
    assert main(["list", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in told[1:]] == [
        ["global_step10", "10", "yes", "no"],
        ["global_step9", "9", "yes", "yes"],
    ]
    assert told[1].endswith(" latest")


def test_a_trainer_s_checkpoints_are_found_below(tmp_path: Path, run_json: Any) -> None:
    for step in (4, 8):
        save(tmp_path / f"checkpoint-{step}", step)
    code, found = run_json("list", tmp_path)
    assert code == 0
    assert [each["tag"] for each in found["checkpoints"]] == ["checkpoint-8/global_step8", "checkpoint-4/global_step4"]
    (tmp_path / "checkpoint-8" / "rng_state_0.pth").write_text("")  # but no trainer_state.json, which comes last
    code, found = run_json("list", tmp_path)
    assert (code, [each["whole"] for each in found["checkpoints"]]) == (1, [False, True])
    assert "trainer_state.json: missing" in found["checkpoints"][0]["fault"]
    code, found = run_json("list", tmp_path / "checkpoint-4" / "global_step4")
    assert [(each["tag"], each["step"]) for each in found["checkpoints"]] == [(".", 4)]


def test_weights_beside_tags_are_none_of_them(tmp_path: Path, run_json: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As the Trainer writes them into each folder, and at the end above; a command takes what a load would."""
    for step in (4, 8):
        save(tmp_path / f"checkpoint-{step}", step)
        save_file({"it": torch.ones(2)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    code, found = run_json("list", tmp_path / "checkpoint-8")
    assert (code, [each["tag"] for each in found["checkpoints"]]) == (0, ["global_step8"])
    save_file({"it": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "other").mkdir()
    save_file({"it": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    code, found = run_json("list", tmp_path)
    below = ["checkpoint-8/global_step8", "checkpoint-4/global_step4"]
    assert [each["tag"] for each in found["checkpoints"]][:2] == below
    bare = {each["tag"]: each["bytes"] for each in found["checkpoints"][2:]}
    assert bare == dict.fromkeys([".", "other"], (tmp_path / "model.safetensors").stat().st_size)
    assert find_saves(str(tmp_path), foreign=False) == below[::-1]  # what is pruned
    open_checkpoint(find_checkpoint(str(tmp_path)), Comm())
    assert any("not the checkpoints of DeepSpeed's in checkpoint-4, checkpoint-8" in line for line in caplog.messages)
    (tmp_path / "checkpoint-8" / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"latest is missing, but .*checkpoint-8 holds checkpoints: global_step8"):
        find_checkpoint(str(tmp_path / "checkpoint-8"))


def test_one_that_is_not_whole_is_a_fault(tmp_path: Path, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    next(save(tmp_path, 2).glob("*rank_1*optim_states.pt")).unlink()
    code, found = run_json("list", tmp_path)
    assert code == 1
    assert [each["whole"] for each in found["checkpoints"]] == [False, True]
    assert "missing" in found["checkpoints"][0]["fault"]
    assert main(["list", str(tmp_path)]) == 1
    assert "global_step2: " in capsys.readouterr().out


def test_a_latest_that_cannot_be_followed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    (tmp_path / "latest").write_text("")
    assert main(["list", str(tmp_path)]) == 0
    assert "latest is empty" in capsys.readouterr().err


def test_a_folder_without_any_is_an_error_that_tells_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("")
    assert main(["list", str(tmp_path)]) == 2
    assert "a PEFT adapter" in capsys.readouterr().err


def test_a_store_is_listed(tmp_path: Path, run_json: Any) -> None:
    import fsspec

    made = save(tmp_path, 5)
    store = fsspec.filesystem("memory")
    for path in made.iterdir():
        store.pipe(f"/listed/run/global_step5/{path.name}", path.read_bytes())
    store.pipe("/listed/run/latest", b"global_step5")
    code, found = run_json("list", "memory://listed/run")
    store.rm("/listed", recursive=True)
    assert code == 0
    assert [(each["step"], each["whole"], each["named_by"]) for each in found["checkpoints"]] == [(5, True, ["latest"])]
