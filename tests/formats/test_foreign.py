"""Foreign checkpoints as indexes: contents, damage, hostile files, and the choice of files."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UcpError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.headers import Piece
from deepspeed_ucp.formats.foreign import contents
from deepspeed_ucp.formats.foreign.contents import Contents, StoredTensor, TensorBlock, make_index
from deepspeed_ucp.formats.locations import FileTable
from deepspeed_ucp.io.paths import Entry
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Record
from deepspeed_ucp.model.storage import MASTER, MODULE, AtomKey, ParamKey
from deepspeed_ucp.plan.locate import Want
from deepspeed_ucp.stream.reader import AtomReader
from tests.formats.saves import check_refused, open_alone, read_whole
from tests.properties.samples import PLAIN
from tests.support import fsdp_run
from tests.support.exports import check_same, read_all
from tests.support.foreign import make_tree, write_dcp
from tests.support.memory import clear_memory, put_folder
from tests.synth import random_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = fsdp_run.build()
    fsdp_run.train(model, optimizer, range(3))
    return model, optimizer


def save_dcp(folder: Path, trained: Any, *, outer: Callable[[Any, Any], Any], flatten: bool = False) -> Path:
    weights, states = get_state_dict(*trained, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    dcp.save(outer(weights, states), checkpoint_id=folder, no_dist=True)
    return folder


def nest(weights: Any, states: Any) -> Any:
    return {"model": weights, "optim": states}


def put_apart(weights: Any, states: Any) -> Any:
    """Nest like torchtitan, with the model's names at the top level."""
    train = {"step": torch.tensor(3, dtype=torch.int32)}
    return {**weights, "optimizer": states, "lr_scheduler": {"last_epoch": 3}, "train_state": train}


def check_index(index: AtomicIndex, trained: Any) -> None:
    model, optimizer = trained
    names = {param: name for name, param in model.named_parameters()}
    saved = dict(model.state_dict())
    for key, atom in index.atoms.items():
        wanted = saved[key.name]
        if key.state not in (MASTER, MODULE):
            param = next(param for param, name in names.items() if name == key.name)
            wanted = optimizer.state[param][key.state]
        check_same({"it": read_whole(index, atom)}, {"it": wanted})
    held = {(key.name, key.state) for key in index.atoms}
    assert held == {(name, MODULE) for name in saved if name not in names.values()} | {
        (name, state) for name in names.values() for state in (MASTER, "exp_avg", "exp_avg_sq")
    }
    assert {param.name: scalars for param, scalars in index.scalars.items()} == {
        name: {"step": 3.0} for name in names.values()
    }
    groups = [({names[param] for param in group["params"]}, group["lr"]) for group in optimizer.param_groups]
    found = [(set(group.names), group.hyper["lr"]) for group in index.groups]
    assert sorted(found, key=str) == sorted(groups, key=str) or found == groups
    assert index.counters == {"global_steps": 3}


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    "outer", [nest, put_apart, lambda *both: {"app": {**nest(*both), "epoch": 4}}], ids=["nested", "apart", "deep"]
)
def test_models_and_optimizers_are_found_under_any_outer_keys(
    tmp_path: Path, trained: Any, outer: Callable[[Any, Any], Any], flatten: bool
) -> None:
    check_index(open_alone(save_dcp(tmp_path / "it", trained, outer=outer, flatten=flatten)), trained)


@pytest.mark.parametrize("kept", [("metadata.json", "common.pt"), ("common.pt",), ()], ids=str)
def test_checkpoints_of_megatron_core_are_refused(tmp_path: Path, kept: Sequence[str]) -> None:
    """Such a save is refused even without the files that it writes last."""
    dcp.save({"decoder.weight": torch.ones(2), "rng_state/shard_0_1": b"state"}, checkpoint_id=tmp_path)
    for name in kept:
        (tmp_path / name).write_text("{}")
    check_refused(tmp_path, "Convert it with Megatron-Bridge to Hugging Face's format", UnsupportedError)


def test_states_without_a_weight_are_a_warning(tmp_path: Path, trained: Any, caplog: pytest.LogCaptureFixture) -> None:
    lacking = next(iter(dict(trained[0].named_parameters())))

    def cut(weights: Any, states: Any) -> Any:
        return nest({name: held for name, held in weights.items() if name != lacking}, states)

    open_alone(save_dcp(tmp_path / "it", trained, outer=cut))
    text = "not loaded by the engine, since it is states of parameters without weights in the checkpoint"
    assert f"{text}: {lacking}" in caplog.text


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_states_by_number_are_refused_with_advice_to_save_names(tmp_path: Path, trained: Any, kind: str) -> None:
    model, optimizer = trained
    if kind == "SGD":  # an optimizer with param groups but without states
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(tree, checkpoint_id=tmp_path / "it", no_dist=True)
    index = open_alone(tmp_path / "it")
    assert "get_state_dict" in index.stateless
    assert not index.is_weights_alone


def test_states_of_other_shapes_than_their_weights_are_irregular(tmp_path: Path, trained: Any) -> None:
    weights, states = get_state_dict(*trained)
    held = states["state"]["first.weight"]
    states["state"]["first.weight"] = {**held, "exp_avg": held["exp_avg"].T.contiguous()}
    dcp.save(nest(weights, states), checkpoint_id=tmp_path / "it", no_dist=True)
    index = open_alone(tmp_path / "it")
    assert index.irregular == {
        AtomKey("first.weight", "exp_avg"): "of shape (6, 64), its weight of (64, 6)",
    }
    assert AtomKey("first.weight", "exp_avg") not in index.atoms
    states["state"]["first.weight"]["fp32"] = held["exp_avg"].T.contiguous()
    dcp.save(nest(weights, states), checkpoint_id=tmp_path / "master", no_dist=True)
    check_refused(tmp_path / "master", "first.weight: the master is of shape")


@pytest.mark.parametrize("kind", ["dcp", "state dict"])
@pytest.mark.parametrize(
    ("tensor", "text"),
    [(torch.ones(4, 3).t(), "its memory is not contiguous"), (torch._neg_view(torch.ones(2)), "torch's neg or conj")],
    ids=["turned", "negated"],
)
def test_transposed_and_negated_tensors_are_refused(tmp_path: Path, kind: str, tensor: torch.Tensor, text: str) -> None:
    if kind == "dcp":
        dcp.save({"model": {"w": tensor}}, checkpoint_id=tmp_path, no_dist=True)
    else:
        torch.save({"model": {"w": tensor}}, tmp_path / "model.pt")
    check_refused(tmp_path, rf"w\b.*: {text}", UnsupportedError)


def test_several_models_or_optimizers_are_ambiguous(tmp_path: Path, trained: Any) -> None:
    weights, states = get_state_dict(*trained)
    other = {name: tensor + 1 for name, tensor in weights.items()}
    trees = {
        "average": {"ema": other, "model": weights, "optim": states},
        "any": {"net": weights, "avg": other, "optim": states},
        "optimizers": {"model": weights, "optim": states, "more": states},
    }
    for name, tree in trees.items():
        dcp.save(tree, checkpoint_id=tmp_path / name, no_dist=True)
    check_index(open_alone(tmp_path / "average"), trained)
    check_refused(tmp_path / "any", r"several models .*avg\., net\.", UnsupportedError)
    check_refused(tmp_path / "optimizers", "several optimizers in it hold states of first.bias", UnsupportedError)
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"):  # Accelerate's names
        dcp.save({"model": weights}, checkpoint_id=tmp_path / "two" / name, no_dist=True)
    check_refused(tmp_path / "two", "fsdp_0 and pytorch_model_fsdp_1 both hold")


def test_files_of_another_step_are_a_warning(tmp_path: Path, trained: Any, caplog: pytest.LogCaptureFixture) -> None:
    """For example an older optimizer, a trainer's state, or torchtitan's counter."""
    weights, states = get_state_dict(*trained)
    for name, tree in (("pytorch_model_fsdp_0", {"model": weights}), ("optimizer_0", {"optimizer": states})):
        dcp.save(tree, checkpoint_id=tmp_path / name, no_dist=True)
    state, found = tmp_path / "trainer_state.json", list[tuple[bool, bool]]()
    for step, hours in ((3, 0), (4, 0), (3, 5)):
        state.write_text(f'{{"global_step": {step}}}')
        for file in (tmp_path / "optimizer_0").iterdir():
            os.utime(file, (changed := file.stat().st_mtime - 3600 * hours, changed))
        caplog.clear()
        open_alone(tmp_path)
        found.append(("counts 4 steps, the optimizer 3" in caplog.text, "written 5 hours" in caplog.text))
    assert found == [(False, False), (True, False), (False, True)]
    for step in (2, 4):  # fp16 skips steps of the optimizer, never of the trainer
        state.write_text(f'{{"global_step": {step}}}')
        (tmp_path / "scaler.pt").touch()
        caplog.clear()
        open_alone(tmp_path)
        assert (" steps, the optimizer " in caplog.text) is (step == 2)
    for step in (3, 4):
        tree = put_apart(weights, states) | {"train_state": {"step": torch.tensor(step, dtype=torch.int32)}}
        dcp.save(tree, checkpoint_id=tmp_path / str(step), no_dist=True)
        caplog.clear()
        open_alone(tmp_path / str(step))
        assert (f"counts {step} steps, the optimizer 3" in caplog.text) is (step == 4)


@pytest.fixture
def saved(tmp_path: Path, trained: Any) -> Path:
    return save_dcp(tmp_path / "it", trained, outer=nest)


def change_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def find_info(metadata: Any, key: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


WEIGHT = "model.first.weight"


def place(**fields: Any) -> Callable[[Any], object]:
    return lambda metadata: vars(find_info(metadata, WEIGHT)).update(fields)


def overlap(metadata: Any) -> None:
    """Add a second block of 64 elements that begins in the middle of the first."""
    item = metadata.state_dict_metadata["model.first.bias"]
    item.size = torch.Size([96])
    item.chunks.append(ChunkStorageMetadata(torch.Size([32]), torch.Size([64])))
    index = MetadataIndex("model.first.bias", torch.Size([32]))
    metadata.storage_data[index] = find_info(metadata, "model.norm.bias")


def point_elsewhere(metadata: Any) -> None:
    other = find_info(metadata, "model.second.weight")
    place(offset=other.offset, length=other.length)(metadata)


def name_at_length(metadata: Any) -> None:
    """Add a name with as many prefixes as words."""
    metadata.state_dict_metadata["param_groups." * 50_000] = metadata.state_dict_metadata[WEIGHT]


def nest_path(metadata: Any) -> None:
    """Add a text of 2^60 characters in 60 opcodes."""
    name: Any = "x"
    for _ in range(60):
        name = (name, name)
    metadata.planner_data[WEIGHT] = ("state", name, "x")


def set_dtype(dtype: torch.dtype, metadata: Any) -> None:
    metadata.state_dict_metadata[WEIGHT].properties.dtype = dtype


OTHER_TYPE = r"holds float32 .* model\.first\.weight .* The folder mixes"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda metadata: metadata.state_dict_metadata[WEIGHT].chunks.clear(), "fragments hold 0"),
        (overlap, "covered twice"),
        (place(relative_path="../../etc/passwd"), "outside of the folder"),
        (place(relative_path="/etc/passwd"), "outside of the folder"),
        (place(relative_path="__7_0.distcp"), "do not exist.*__7_0.distcp"),
        (place(offset=1 << 40), "it is truncated"),
        (point_elsewhere, "mixes files"),
        (
            lambda metadata: vars(metadata.state_dict_metadata[WEIGHT]).update(size=torch.Size([1 << 40, 1 << 20])),
            "are missing",
        ),
        (place(transform_descriptors=["zstd"]), "transformed"),
        (name_at_length, "for a name"),
        (nest_path, "for a name"),
        *((partial(set_dtype, dtype), OTHER_TYPE) for dtype in (torch.bfloat16, torch.int32, torch.float64)),
    ],
)
def test_contradictory_metadata_is_refused(saved: Path, change: Callable[[Any], None], text: str) -> None:
    change_metadata(saved, change)
    check_refused(saved, text, (CheckpointError, UnsupportedError))


@pytest.mark.parametrize(
    "step", ["x", None, -1.0, float("nan"), float("inf"), 10**30, [3], torch.tensor(3j), torch.ones(2)]
)
def test_an_invalid_step_is_refused(tmp_path: Path, step: Any) -> None:
    tree = make_tree(PLAIN, random_state(PLAIN, 0))
    tree["optim"]["param_groups"][0]["step"] = step
    write_dcp(tmp_path, tree, lambda tensor: [1] * tensor.dim())
    check_refused(tmp_path, "for a step|is wanted|without its place", (CheckpointError, UnsupportedError))


def test_step_numbers_are_read_and_other_non_tensor_states_refused(tmp_path: Path) -> None:
    """Some optimizers keep the step as a number. The live optimizer cannot accept other values."""
    tree = make_tree(PLAIN, random_state(PLAIN, 0))
    for held in tree["optim"]["state"].values():
        held |= {"step": 7, "unset": None}
    write_dcp(tmp_path, tree, lambda tensor: [1] * tensor.dim())
    index = open_alone(tmp_path)
    assert {param.name: scalars for param, scalars in index.scalars.items()} == {
        name: {"step": 7} for name in tree["optim"]["state"]
    }
    assert (index.counters, index.stateless) == ({"global_steps": 7}, "")
    tree["optim"]["state"]["a.weight"]["mode"] = "fast"
    write_dcp(tmp_path, tree, lambda tensor: [1] * tensor.dim())
    assert "neither tensors nor numbers: optim.state.a.weight.mode. Load only" in open_alone(tmp_path).stateless


def test_contradictory_trees_are_refused(tmp_path: Path) -> None:
    tree = {"a": torch.ones(2), "optim.param_groups.x.params": ["a"], "optim.state.a.exp_avg": torch.ones(2)}
    (tmp_path / "groups").mkdir()
    write_dcp(tmp_path / "groups", tree, lambda tensor: [1])
    check_refused(tmp_path / "groups", "invalid literal for int", UnsupportedError)
    for name, size in (("pytorch_model_fsdp_0", 2), ("optimizer_0", 3)):
        (tmp_path / "two" / name).mkdir(parents=True)
        write_dcp(tmp_path / "two" / name, {"model": {"a": torch.ones(size)}}, lambda tensor: [1])
    check_refused(tmp_path / "two", r"model\.a as float32 of shape \(3,\) and as float32 of shape \(2,\)")


def test_moments_may_have_another_dtype_than_weights(tmp_path: Path) -> None:
    tree = make_tree(PLAIN, random_state(PLAIN, 0))
    tree["model"]["a.weight"] = tree["model"]["a.weight"].bfloat16()
    write_dcp(tmp_path, tree, lambda tensor: [2, 2][: tensor.dim()])
    index = open_alone(tmp_path)
    expected = {"fp32": tree["model"]["a.weight"], "exp_avg": tree["optim"]["state"]["a.weight"]["exp_avg"]}
    for state, tensor in expected.items():
        check_same({"it": read_whole(index, index.atoms["a.weight", state, 0])}, {"it": tensor})


class Harm:
    def __reduce__(self) -> Any:
        return (open, ("harm", "w"))


def test_a_metadata_file_runs_no_code(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    change_metadata(saved, lambda metadata: metadata.planner_data.update(x=Harm()))
    open_alone(saved)
    assert not (saved / "harm").exists()


def test_whole_weights_with_an_optimizer_file_open(tmp_path: Path, trained: Any) -> None:
    """States by name (FSDP) are read. States by number are refused; the weights still open."""
    weights, states = get_state_dict(*trained)
    torch.save(weights, tmp_path / "pytorch_model_fsdp.bin")
    save_file(weights, tmp_path / "model.safetensors")
    torch.save(states, tmp_path / "optimizer.bin")
    check_index(open_alone(tmp_path), trained)
    assert verify_checkpoint(str(tmp_path)).whole
    torch.save(trained[1].state_dict(), tmp_path / "optimizer.bin")
    index = open_alone(tmp_path)
    assert "numbers, not names" in index.stateless and not index.is_weights_alone
    for odd in ([1], {"state": {}}):
        torch.save(odd, tmp_path / "optimizer.bin")
        check_refused(tmp_path, "not an optimizer's", UnsupportedError)


def test_a_folder_with_model_states_is_read_as_deepspeeds(tmp_path: Path, trained: Any) -> None:
    folder = save_dcp(tmp_path / "it", trained, outer=nest)
    (folder / "mp_rank_00_model_states.pt").touch()
    check_refused(folder, "mp_rank_00")


def make_tensor(folder: Path, shape: tuple[int, int], *boxes: tuple[int, int, int, int]) -> Any:
    """Make a tensor in blocks (row, column, rows, columns) of a sparse file; return contents and table."""
    chunks, at = [], 0
    for row, column, *block in boxes:
        nbytes = block[0] * block[1] * 4
        record = Record(at, nbytes, None)
        chunks.append(TensorBlock((row, column), "it", Piece(record, 0, (block[0], block[1]), "float32")))
        at += nbytes
    (folder / "it").touch()
    os.truncate(folder / "it", at)
    entries = {"it": Entry(at, 0.0)}
    held = Contents("made", "it", {"w": StoredTensor("float32", shape, tuple(chunks))})
    return held, FileTable((str(folder),), entries, (entries,))


def cut_irregularly(rows: int) -> list[tuple[int, int, int, int]]:
    """Cut each half of the rows into columns of other widths, which makes two pieces for each row."""
    half = rows // 2
    return [(0, 0, half, 1), (0, 1, half, 3), (half, 0, half, 2), (half, 2, half, 2)]


def test_the_number_of_irregular_pieces_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted before they are allocated: a sparse file may describe a billion rows."""
    with pytest.raises(UnsupportedError, match="w is cut irregularly, .* more than 4194304 pieces"):
        make_index(*make_tensor(tmp_path, (10**9, 4), *cut_irregularly(10**9)))
    monkeypatch.setattr(contents, "_MOST_RUNS", 24)
    (atom,) = make_index(*make_tensor(tmp_path, (12, 4), *cut_irregularly(12))).atoms.values()
    assert len(atom.shards[0].list_fragments(atom.state)) == 24
    with pytest.raises(UnsupportedError, match="more than 24 pieces"):
        make_index(*make_tensor(tmp_path, (14, 4), *cut_irregularly(14)))


def test_a_grid_has_one_piece_for_each_block(tmp_path: Path) -> None:
    half = 10**9 // 2
    grid = [(row, column, half, 2) for column in (0, 2) for row in (0, half)]
    (atom,) = make_index(*make_tensor(tmp_path, (10**9, 4), *grid)).atoms.values()
    assert [piece.start for piece in atom.shards[0].list_fragments(atom.state)] == [0, 2, half * 4, half * 4 + 2]


def test_a_block_beyond_its_record_is_refused(tmp_path: Path) -> None:
    held, table = make_tensor(tmp_path, (4, 4), (0, 0, 4, 4))
    tensor = held.weights["w"]
    (block,) = tensor.chunks
    moved = replace(tensor, chunks=(replace(block, piece=replace(block.piece, offset=4)),))
    with pytest.raises(CheckpointError, match="w: 64 bytes do not fit into 64 of the file's 64"):
        make_index(replace(held, weights={"w": moved}), table)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([(0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 2, 2)], "are missing"),
        ([(0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 2, 2), (2, 2, 2, 2), (0, 0, 2, 2)], "covered twice"),
        ([(0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 2, 2), (0, 2, 2, 2)], "covered twice"),
        ([(0, 0, 4, 1), (0, 2, 4, 2)], "missing"),
        ([(0, 0, 4, 3), (0, 2, 4, 2)], "covered twice"),
    ],
)
def test_a_grid_with_a_fault_is_refused(tmp_path: Path, grid: list[Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        make_index(*make_tensor(tmp_path, (4, 4), *grid))


def test_an_index_in_a_store_equals_that_of_a_folder(saved: Path) -> None:
    """Headers are prefetched as ranges of large files."""
    clear_memory()
    put_folder(saved, "memory://foreign/it")
    here, there = open_alone(saved), open_checkpoint("memory://foreign/it", Comm())
    assert there.records == here.records
    assert there.atoms.keys() == here.atoms.keys()
    assert (there.scalars, there.groups) == (here.scalars, here.groups)


@pytest.mark.parametrize("tiled", [False, True])
def test_commands_accept_dcp(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiled: bool) -> None:
    if tiled:  # each tensor is cut in two along each dimension
        (tmp_path / "tiles").mkdir()
        write_dcp(tmp_path / "tiles", read_all(saved), lambda tensor: [2, 2][: tensor.dim()])
        saved = tmp_path / "tiles"
        assert main(["diff", str(tmp_path / "it"), str(saved)]) == 0
    assert main(["convert", str(saved), str(tmp_path / "atomic")]) == 0
    assert main(["diff", str(saved), str(tmp_path / "atomic")]) == 0
    assert main(["verify", str(tmp_path / "atomic")]) == 0
    assert main(["inspect", str(saved), "--param", "first.weight"]) == 0
    blocks = re.findall(r"\[(?:\d+:\d+, )+\d+:\d+\]", capsys.readouterr().out)
    assert blocks == ["[0:32, 0:3]", "[0:32, 3:6]", "[32:64, 0:3]", "[32:64, 3:6]"] * 3 * tiled
    assert main(["inspect", str(saved)]) == 0
    assert "written by  torch.distributed.checkpoint, float32" in capsys.readouterr().out
    assert main(["plan", str(saved), "--target", "zero=3,dp=2"]) == 0
    assert main(["list", str(saved)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "torch.distributed.checkpoint" in line and line.split()[1] == "3"


def test_commands_report_weights_without_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.randn(3, 2)}, tmp_path / "hf" / "model.safetensors")
    for command, *out in (["inspect"], ["verify"], ["convert", "atomic"], ["export", "out"]):
        assert main([command, *(str(tmp_path / name) for name in ("hf", *out))]) == 0
    assert re.search("^  optimizer +no states$", capsys.readouterr().out, re.M)
    assert open_alone(tmp_path / "atomic").is_weights_alone


@pytest.mark.parametrize("adapter", ["default", "other"])
def test_weights_of_an_adapter_get_the_names_of_its_states(tmp_path: Path, adapter: str) -> None:
    """FSDP saves weights under the names of PEFT's file, and states under the names of the model."""
    root, weight = "base_model.model", torch.zeros(2, 2)
    weights = {f"{root}.a.lora_A.weight": weight + 1, f"{root}.a.lora_B.weight": weight, f"{root}.b.weight": weight}
    live = [f"{root}.a.lora_{kind}.{adapter}.weight" for kind in "AB"] + [f"{root}.b.modules_to_save.{adapter}.weight"]
    state = {name: {"exp_avg": weight.clone(), "step": torch.tensor(3.0)} for name in live}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": live}]}
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=tmp_path, no_dist=True)
    index = open_alone(tmp_path)
    assert {key.name for key in index.atoms} == {*live}
    assert torch.equal(read_whole(index, index.atoms[AtomKey(live[0], MASTER)]), weight + 1)
    assert "adapter" in index.dropped


def test_weights_of_a_base_model_keep_their_names(tmp_path: Path) -> None:
    """A base model may have a tensor with a name as in PEFT's files."""
    weights = {"a.lora_A.weight": torch.zeros(2), "a.weight": torch.zeros(2)}
    dcp.save({"model": weights}, checkpoint_id=tmp_path, no_dist=True)
    index = open_alone(tmp_path)
    assert {(key.name, key.state) for key in index.atoms} == {(name, MODULE) for name in weights}
    assert index.is_weights_alone and not index.dropped


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
    for file in files:
        name = file.split(".")[0]
        if file.endswith(".safetensors"):
            save_file({name: torch.ones(2)}, folder / file)
        elif file.endswith(".json"):
            shards = {each.split(".")[0]: each for each in files if "-of-" in each}
            (folder / file).write_text(json.dumps({"weight_map": shards}))
        else:
            torch.save({name: torch.ones(2)}, folder / file)


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
