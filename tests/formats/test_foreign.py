"""DCP folders as indexes: contents, contradictory metadata, harmful files."""

from __future__ import annotations

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
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.headers import Piece
from deepspeed_ucp.formats.foreign import contents
from deepspeed_ucp.formats.foreign.contents import Contents, StoredTensor, TensorBlock, make_index
from deepspeed_ucp.formats.locations import FileTable
from deepspeed_ucp.io.paths import Entry
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Record
from deepspeed_ucp.model.storage import MASTER, MODULE, AtomKey
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
