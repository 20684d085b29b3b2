"""Folders of Hugging Face's libraries: the files of the model, and quantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.model import AtomicIndex
from deepspeed_ucp.plan import Want
from deepspeed_ucp.stream.reader import AtomReader

INDEX = "model.safetensors.index.json"


def write(folder: Path, *files: str) -> None:
    """Each file has a tensor that is named for it; an index names the shards alone."""
    for file in files:
        name = file.split(".")[0]
        if file.endswith(".safetensors"):
            save_file({name: torch.ones(2)}, folder / file)
        elif file.endswith(".json"):
            shards = {each.split(".")[0]: each for each in files if "-of-" in each}
            (folder / file).write_text(json.dumps({"weight_map": shards}))
        else:
            torch.save({name: torch.ones(2)}, folder / file)


def open_it(folder: Path) -> AtomicIndex:
    return open_checkpoint(str(folder), Comm())


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        (["model.safetensors"], ["pytorch_model.bin"]),
        (["model.safetensors"], ["model.fp16.safetensors", "other.safetensors"]),
        (["model.safetensors"], [INDEX, *SHARDS]),
        ([*SHARDS, INDEX], ["consolidated.safetensors"]),
        ([*SHARDS, INDEX], ["stray.safetensors", "pytorch_model.bin"]),
        (["pytorch_model.bin"], ["model.pt"]),
        (["adapter_model.safetensors"], ["adapter_model.bin"]),
    ],
)
def test_the_model_of_transformers_is_chosen_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, taken: list[str], left: list[str]
) -> None:
    write(tmp_path, *taken, *left)
    index = open_it(tmp_path)
    assert {Path(file.path).name for file in index.stored.files} == {*taken} - {INDEX}
    (told,) = [line for line in caplog.messages if "not read" in line]
    assert all(name in told for name in left if name != INDEX)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "pytorch_model.bin"])
def test_an_empty_file_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    """As trainers write it under ZeRO 3; a lenient load would pass over the whole model."""
    save_file({}, tmp_path / name) if name.endswith("safetensors") else torch.save({}, tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: holds no tensors: .*stage3_gather_16bit_weights"):
        open_it(tmp_path)


def test_a_variant_alone_and_links_of_the_hubs_cache_are_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "model.fp16.safetensors")
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "snapshots" / "abc" / "model.safetensors").symlink_to("../../model.fp16.safetensors")
    for folder in (tmp_path, tmp_path / "snapshots" / "abc"):
        index = open_it(folder)
        assert [key.name for key in index.stored.atoms] == ["model"]
        with AtomReader(index) as reader:
            assert reader.read_want(Want(next(iter(index.stored.atoms.values())), 0, 2)) == b"\0\0\x80\x3f" * 2
        assert verify_checkpoint(str(folder)).whole
    assert not any("not read" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("config", "name", "text"),
    [
        ({"quant_method": "fp8"}, "b", "fp8"),
        ({"bits": 4}, "b", "quantization_config in config.json"),
        *(
            (None, name, name)
            for name in ("a.weight_scale_inv", "a.qweight", "a.weight.absmax", "a.gate_up_proj_blocks")
        ),
    ],
)
def test_quantized_weights_are_refused(tmp_path: Path, config: object, name: str, text: str) -> None:
    """By the configuration, or by the names of their scales."""
    save_file({"a.weight": torch.ones(2).to(torch.float8_e4m3fn), name: torch.ones(1)}, tmp_path / "model.safetensors")
    if config:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(UnsupportedError, match=rf"quantized \({text}\).*dequantize"):
        open_it(tmp_path)


def test_an_old_adapter_of_peft_s(tmp_path: Path) -> None:
    torch.save({"base_model.model.q.lora_A.weight": torch.ones(2, 3)}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert [key.name for key in open_it(tmp_path).stored.atoms] == ["base_model.model.q.lora_A.default.weight"]


def test_states_by_number_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the Trainer leaves them without FSDP."""
    write(tmp_path, "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt"):
        (tmp_path / name).write_bytes(b"")
    open_it(tmp_path)
    assert [line for line in caplog.messages if "optimizer.pt" in line and "states by number" in line]
    assert [line for line in caplog.messages if "scheduler.pt" in line and "neither" in line]
