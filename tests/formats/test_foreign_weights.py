"""Folders of weights: unusual, damaged or harmful files, and the choice of files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from deepspeed_ucp.errors import CheckpointError, UcpError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.model.storage import MODULE, ParamKey
from deepspeed_ucp.plan.locate import Want
from deepspeed_ucp.stream.reader import AtomReader
from tests.formats.saves import check_refused, open_alone, read_whole
from tests.support.exports import check_same


def write_header(path: Path, header: Any, nbytes: int) -> None:
    """Write a file with a header, given as text or as a value for JSON."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogateescape")
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))


FORM = "a form that is not supported"


def tell(**changed: Any) -> dict[str, Any]:
    """Make a header's entry of two numbers."""
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": tell(data_offsets=[0, 4])}, "4 bytes for shape"),
        ({"a": tell(data_offsets=[0, 24])}, "truncated"),
        ({"a": tell(data_offsets=[8, 0])}, "declares .* at bytes"),
        ({"a": tell(data_offsets=[-8, 0])}, "declares .* at bytes"),
        ({"a": tell(data_offsets=[0.0, 8.0])}, "declares .* at bytes"),
        ({"a": tell(data_offsets=[False, 8])}, "declares .* at bytes"),
        ({"a": tell(data_offsets=[0, 8, 8])}, FORM),
        ({"a": tell(shape=[-2])}, "-2 in a shape"),
        ({"a": tell(shape=[True])}, "True in a shape"),
        ({"a": tell(shape=[2.0])}, "2.0 in a shape"),
        ({"a": tell(shape=[2] + [1] * 64)}, "for a shape"),
        ({"a": tell(shape=[1 << 61, 1 << 61])}, "8 bytes for shape"),
        ({"a": tell(shape="2")}, "for a shape"),
        ({"a": tell(dtype="F4")}, "type F4"),
        ({"a": tell(dtype=["F32"])}, FORM),
        ({"a": {"dtype": "F32"}}, FORM),
        ({"a": "F32"}, FORM),
        (["a"], "an array where an object is expected"),
        ({"a": tell(), "b": tell(data_offsets=[4, 12])}, "overlap"),
        ({"a": tell(), "b": tell(data_offsets=[12, 20])}, "4 bytes between a and b are no tensor's"),
        ({"a": tell(data_offsets=[8, 16])}, "8 bytes between the header and a"),
        ({"a": tell()}, "12 bytes between a and the end"),
        ({}, "20 bytes between the header and the end"),
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ('{"a": NaN}', "NaN is not allowed"),
        ('{"a": 1' + "0" * 5000 + "}", "is no valid JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"a": "\udc80"}', "is no valid JSON"),
        ({"a\x1b[31m\n": tell(dtype="\x1b[2J")}, r"a\\x1b\[31m\\n has elements of type \\x1b\[2J"),
    ],
)
def test_contradictory_headers_are_refused(tmp_path: Path, header: Any, message: str) -> None:
    """Of 20 bytes of data: holes, overlaps, invalid numbers, ambiguous JSON. The message has one line."""
    write_header(tmp_path / "model.safetensors", header, 20)
    with pytest.raises((CheckpointError, UnsupportedError), match=message) as found:
        open_alone(tmp_path)
    assert str(found.value).isprintable() and len(str(found.value)) < 500


def test_metadata_may_be_null(tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", {"__metadata__": None, "a": tell()}, 8)
    assert load_file(tmp_path / "model.safetensors").keys() == {key.name for key in open_alone(tmp_path).atoms} == {"a"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", ".metadata"]
)
@pytest.mark.parametrize("target", [None, "/dev/zero", "nowhere"], ids=["fifo", "device", "dangling"])
def test_special_files_are_refused(tmp_path: Path, name: str, target: str | None) -> None:
    if name.endswith("index.json"):
        save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / name).symlink_to(target) if target else os.mkfifo(tmp_path / name)
    check_refused(tmp_path, "FIFO|device|No such file")


def write_shard(folder: Path, number: int, tensors: dict[str, tuple[torch.Tensor, list[int]]]) -> Path:
    """Write a rank's file as ``HuggingFaceStorageWriter`` does: tensors with their first index in the whole ones."""
    offsets = json.dumps({name: {"saved_offsets": begin} for name, (_, begin) in tensors.items()})
    path = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": offsets}
    save_file({name: tensor.contiguous() for name, (tensor, _) in tensors.items()}, path, metadata)
    return path


def test_shards_of_ranks_are_joined_like_torchs_consolidation(tmp_path: Path) -> None:
    """Two ranks have cut rows, cut columns, and a whole tensor on one rank."""
    rows, columns = torch.arange(15.0).view(5, 3), torch.arange(8.0).view(2, 4).bfloat16()
    whole, joined = torch.arange(2.0), tmp_path / "joined"
    joined.mkdir()
    write_shard(tmp_path, 1, {"r": (rows[:3], [0, 0]), "c": (columns[:, :2], [0, 0]), "w": (whole, [0])})
    second = write_shard(tmp_path, 2, {"r": (rows[3:], [3, 0]), "c": (columns[:, 2:], [0, 2])})
    index = open_alone(tmp_path)
    consolidate_safetensors_files(str(tmp_path), str(joined), dict.fromkeys("rcw", 1))
    for found in (index, open_alone(joined)):
        for name, value in (("r", rows), ("c", columns), ("w", whole)):
            assert read_whole(found, found.atoms[name, MODULE, 0]).equal(value)
    write_shard(tmp_path, 2, {"r": (rows[4:], [4, 0])})
    with pytest.raises(CheckpointError, match=r"elements \[9, 12\) are missing"):
        open_alone(tmp_path)
    write_shard(tmp_path, 2, {"r": (rows[2:], [2, 0])})
    with pytest.raises(CheckpointError, match="covered twice"):
        open_alone(tmp_path)
    write_shard(tmp_path, 2, {"r": (rows[3:].double(), [3, 0])})
    with pytest.raises(CheckpointError, match="r is in .* and in another file"):
        open_alone(tmp_path)
    second.unlink()
    save_file({"w": whole}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="w is in .* and in another file"):
        open_alone(tmp_path)


def test_a_file_truncated_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(9), "b": torch.ones(9)}, tmp_path / "model.safetensors")
    index = open_alone(tmp_path)
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 20)
    with pytest.raises(CheckpointError, match="truncated since"):
        read_whole(index, index.atoms["b", MODULE, 0])


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_numbered_files_without_an_index_are_one_model(tmp_path: Path, kind: str) -> None:
    """Each name may occur once. A gap in the numbers is an error."""
    save = save_file if kind == "safetensors" else torch.save
    stem = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    last = tmp_path / f"{stem}-00002-of-00002.{kind}"
    save({"a": torch.ones(2)}, tmp_path / f"{stem}-00001-of-00002.{kind}")
    save({"b": torch.ones(3)}, last)
    assert {key.name for key in open_alone(tmp_path).atoms} == {"a", "b"}
    save({"a": torch.ones(2)}, last)
    check_refused(tmp_path, "a is in .* and in another file")
    last.unlink()
    check_refused(tmp_path, f"{last.name} missing")


def write_content(path: Path, content: Any) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)


WEIGHTS = "model.safetensors.index.json"
ONE, OTHER = {"a": torch.zeros(2)}, {"b": torch.ones(2)}
EMPTY = "holds no tensors: .*stage3_gather_16bit_weights"  # such files are by trainers under ZeRO 3
MAPS: list[tuple[type[UcpError], Any, str]] = [
    (CheckpointError, {"a": "model-2.safetensors"}, "missing"),
    (CheckpointError, {"b": "model-1.safetensors"}, "do not contain"),
    (CheckpointError, {"a": "../model.safetensors"}, "outside"),
    (CheckpointError, {"a": "/dev/zero.safetensors"}, "outside"),
    (CheckpointError, {"a": "config.json"}, "another kind"),
    (CheckpointError, {"a": None}, "another kind"),
    (CheckpointError, {}, "names no files"),
    (UnsupportedError, "a", FORM),
]
REFUSED: list[tuple[type[UcpError], dict[str, Any], str]] = [
    *((CheckpointError, {"model.safetensors": length.to_bytes(8, "little") + b"{}" + bytes(20)}, "declares a header")
      for length in (0, 1, 30, 101_000_000, 2**64 - 1)),
    *((kind, {"model-1.safetensors": ONE, WEIGHTS: {"weight_map": names}}, text) for kind, names, text in MAPS),
    # names that differ by the prefix of ``torch.compile``, by type, or by PEFT's renaming
    (CheckpointError, {"model.safetensors": {"a.w": ONE["a"], "_orig_mod.a.w": OTHER["b"]}},
     r"holds a\.w \(module\) twice"),
    (CheckpointError, {"model.pt": {1: ONE["a"], "1": OTHER["b"]}}, "two tensors under 1"),
    (CheckpointError, {"adapter_model.safetensors": {"m.lora_magnitude_vector": ONE["a"],
                                                     "m.lora_magnitude_vector.weight": OTHER["b"]}},
     "two of its tensors are one"),
    # other contents
    *((CheckpointError, {name: {}}, f"{name}: {EMPTY}") for name in ("adapter_model.safetensors", "pytorch_model.bin")),
    (UnsupportedError, {"one.safetensors": ONE, "other.safetensors": ONE}, "several models"),
    (UnsupportedError, {"model-1-of-1.safetensors": ONE, "model-1-of-2.safetensors": OTHER,
                        "model-2-of-2.safetensors": {"c": OTHER["b"]}}, "holds several models"),
    (UnsupportedError, {"model.pt": {**ONE, "b": object()}}, "no state dict"),
    (CheckpointError, {"model.safetensors": ONE, "optimizer.bin": {"state": {}, "param_groups": [
        {"params": ["a"], "lr": 1}, {"params": ["a"], "lr": 2}]}}, "holds a in several param groups"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "files", "text"), REFUSED, ids=[row[2] for row in REFUSED])
def test_contradictory_files_are_refused(
    tmp_path: Path, kind: type[UcpError], files: dict[str, Any], text: str
) -> None:
    for name, content in files.items():
        write_content(tmp_path / name, content)
    check_refused(tmp_path, text, kind)


SIX = torch.arange(6.0)
EXTRA = {**ONE, "a._extra_state": torch.zeros(3, dtype=torch.uint8)}  # by Transformer Engine
TREE = {"model": {**ONE, "b": object}, "optimizer_state_dict": {"state": {}}, "module": OTHER, "epoch": 3}
STORED = {"embed": SIX, "bias": torch.zeros(0), "": torch.ones(2)}
PARTS = {"a": SIX[:2], "b": SIX[2:].view(2, 2)}
LISTED = {"embed": "pytorch_model-1.bin", "head": "pytorch_model-2.bin"}
QUERY, VALUE = (f"base_model.model.{name}.lora_A" for name in "qv")
Q, V = (f"{name}.default.weight" for name in (QUERY, VALUE))
OPENED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, str], str]] = {
    # files; the index's tensors and ties; words of a warning
    "more than a state dict": ({"model.pt": TREE}, ONE, {},
        "not in the model's state dict: 'b', 'optimizer_state_dict', 'module', 'epoch'."),
    **{f"extra state in {name}": ({name: EXTRA}, ONE, {},
        "not loaded by the engine, since it is an extra state of a module: a._extra_state.")
       for name in ("model.safetensors", "pytorch_model.bin")},
    "states by number": ({"model.safetensors": ONE, "optimizer.pt": b""}, ONE, {}, "by number, .*: optimizer.pt"),
    "scheduler": ({"model.safetensors": ONE, "scheduler.pt": b""}, ONE, {}, "neither model nor .*: scheduler.pt"),
    # `head` equals the copy of `embed` in its file, but the index takes `embed` from another one
    "no tie over files": ({"pytorch_model-1.bin": {"embed": OTHER["b"]},
                           "pytorch_model-2.bin": dict.fromkeys(LISTED, ONE["a"]),
                           "pytorch_model.bin.index.json": {"weight_map": LISTED}},
        {"embed": OTHER["b"], "head": ONE["a"]}, {}, ""),
    "one storage": ({"pytorch_model.bin": {**STORED, "head": SIX}}, STORED, {"head": "embed"}, ""),
    "offsets in a storage": ({"pytorch_model.bin": PARTS}, PARTS, {}, ""),
    "old adapter": ({"adapter_model.bin": {f"{QUERY}.weight": SIX}, "adapter_config.json": {}}, {Q: SIX}, {}, ""),
    # an embedding and a tied head in modules_to_save, which PEFT writes without safetensors
    "tied adapter": ({"adapter_model.bin": dict.fromkeys((f"{QUERY}.weight", f"{VALUE}.weight"), SIX)},
        {Q: SIX}, {V: Q}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", OPENED)
def test_files_of_weights_open_with_their_tensors_and_ties(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, tensors, ties, words = OPENED[case]
    for name, content in files.items():
        write_content(tmp_path / name, content)
    index = open_alone(tmp_path)
    check_same({key.name: read_whole(index, atom) for key, atom in index.atoms.items()}, tensors)
    assert index.aliases == ties
    assert [bool(re.search(words, line)) for line in caplog.messages] == [True] * bool(words)


def test_unusable_contents_of_an_optimizer_file_do_not_prevent_a_load_of_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(ONE, tmp_path / "pytorch_model.bin")
    groups = [{"params": ["a"], "lr": 1e-3}]
    for state, text in (({"unset": None}, ""), ({"mode": "fast"}, "numbers: a.mode ('fast'). Load only the weights")):
        held = {"step": 2, "exp_avg": torch.ones(2), **state}
        torch.save({"state": {"a": held}, "param_groups": groups, "extra": 1}, tmp_path / "optimizer.bin")
        index = open_alone(tmp_path)
        assert index.scalars == {ParamKey("a"): {"step": 2}}
        assert text in index.stateless and bool(text) == bool(index.stateless)
        assert "optimizer.bin: not loaded by the engine, since it is neither states nor param groups: 'extra'." in (
            caplog.text
        )


def write_files(folder: Path, *files: str) -> None:
    """Write files, each with a tensor named after it. An index lists only the shards."""
    index = {"weight_map": {file.split(".")[0]: file for file in files if "-of-" in file}}
    for file in files:
        write_content(folder / file, index if file == WEIGHTS else {file.split(".")[0]: torch.ones(2)})


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        (["model.safetensors"], ["pytorch_model.bin"]),
        (["model.safetensors"], ["model.fp16.safetensors", "other.safetensors"]),
        (["model.safetensors"], [WEIGHTS, *SHARDS]),
        ([*SHARDS, WEIGHTS], ["consolidated.safetensors"]),
        ([*SHARDS, WEIGHTS], ["stray.safetensors", "pytorch_model.bin"]),
        (["pytorch_model.bin"], ["model.pt"]),
        (["adapter_model.safetensors"], ["adapter_model.bin"]),
    ],
)
def test_transformers_model_files_are_preferred_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, taken: list[str], left: list[str]
) -> None:
    write_files(tmp_path, *taken, *left)
    index = open_alone(tmp_path)
    assert {Path(file.path).name for file in index.files} == {*taken} - {WEIGHTS}
    (message,) = [line for line in caplog.messages if "not read" in line]
    assert all(name in message for name in left if name != WEIGHTS)


def test_variants_and_links_in_the_hubs_cache_open_as_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, "model.fp16.safetensors")
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "snapshots" / "abc" / "model.safetensors").symlink_to("../../model.fp16.safetensors")
    for folder in (tmp_path, tmp_path / "snapshots" / "abc"):
        index = open_alone(folder)
        assert [key.name for key in index.atoms] == ["model"]
        with AtomReader(index) as reader:
            assert reader.read_want(Want(next(iter(index.atoms.values())), 0, 2)) == b"\0\0\x80\x3f" * 2
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
    save_file({"a.weight": torch.ones(2).to(torch.float8_e4m3fn), name: torch.ones(1)}, tmp_path / "model.safetensors")
    if config:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    check_refused(tmp_path, rf"quantized \({text}\).*dequantize", UnsupportedError)
