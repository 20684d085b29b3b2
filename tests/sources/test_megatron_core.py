"""Megatron-Core's checkpoints as indexes: forms of the common state, names, and what is damaged or made to harm.

What its own code writes is in ``tests/engine/test_engine_megatron_core.py``; these folders are of the same form.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from deepspeed_ucp.atoms import COPY, MASTER, MODULE, AtomicIndex, AtomKey
from deepspeed_ucp.cli import main
from deepspeed_ucp.errors import CheckpointError, UcpError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.sources import read_latest
from deepspeed_ucp.sources.foreign.megatron import cut_run
from deepspeed_ucp.sources.latest import find_checkpoint
from tests.export.test_safetensors import check_same
from tests.sources.test_foreign import Harm, change_metadata, open_it, read_whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WORDS, NORM = "embedding.word_embeddings.weight", "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
GATED = "decoder.layers.mlp.linear_fc1.weight"
KINDS = ("param", "exp_avg", "exp_avg_sq")
FORM = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}


def make_tensors(*, states: bool = True) -> dict[str, torch.Tensor]:
    """Of two layers, as one rank saves them."""
    torch.manual_seed(0)
    masters = {WORDS: torch.randn(8, 3), NORM: torch.randn(2, 3), GATED: torch.randn(2, 4, 3)}
    held = {
        f"optimizer.state.{kind}.{key}": each * at for at, kind in enumerate(KINDS, 1) for key, each in masters.items()
    }
    return {**{key: each.bfloat16() for key, each in masters.items()}, **(held if states else {})}


def make_group(**changes: Any) -> dict[str, Any]:
    marks = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "step": 5, "max_lr": 0.2, **marks, **changes}


def make_common(**changes: Any) -> dict[str, Any]:
    groups = [make_group(), make_group(wd_mult=0.0, weight_decay=0.0)]
    return {
        "args": Namespace(num_attention_heads=4, vocab_size=7, padded_vocab_size=8, consumed_train_samples=40),
        "iteration": 5,
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"},
        **changes,
    }


def save(folder: Path, tensors: dict[str, torch.Tensor] | None = None, common: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    dcp.save(make_tensors() if tensors is None else tensors, checkpoint_id=folder, no_dist=True)
    torch.save(make_common() if common is None else common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(FORM))
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "iter_0000005")


def list_names(index: AtomicIndex, state: str) -> list[str]:
    return sorted(key.name for key in index.stored.atoms if key.state == state)


def list_groups(index: AtomicIndex) -> dict[float, list[str]]:
    return {group.hyper["weight_decay"]: sorted(group.names) for group in index.run.groups}


def test_what_there_is(saved: Path) -> None:
    index = open_it(saved)
    layers = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(2)]
    norms = [f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight" for layer in range(2)]
    for state in (COPY, MASTER, "exp_avg", "exp_avg_sq"):
        assert list_names(index, state) == sorted([*layers, *norms, WORDS])
    assert list_groups(index) == {0.1: sorted([*layers, WORDS]), 0.0: norms}
    assert index.run.groups[0].hyper == {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "step": 5}
    assert index.run.counters == {"global_steps": 5, "global_samples": 40}
    assert (index.run.topology.precision, index.run.topology.master) == ("bfloat16", "float32")
    assert index.model.hints["args"]["num_attention_heads"] == 4


@pytest.mark.parametrize("changes", [{}, {"vocab_size": 9}, {"vocab_size": 7, "tokenizer_type": "NullTokenizer"}])
def test_rows_that_may_mean_something_are_no_padding(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Without a size all rows; a tokenizer that counts no end of a document gets one row more."""
    folder = save(tmp_path / "it", common=make_common(args=Namespace(**changes)))
    assert open_it(folder).model.hints["universal_checkpoint_info"]["original_vocab_size"] == 8


@pytest.mark.parametrize(
    ("name", "groups", "number"),
    [
        ("decoder.layers.0.mlp.experts.experts.linear_fc1.weight", [{}, {"is_expert_parallel": True}], 1),
        ("decoder.layers.0.mlp.experts.experts.linear_fc1.weight", [{}, {"wd_mult": 0.0}], 0),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", [{}, {"is_expert_parallel": True}], 0),
        (WORDS, [{}, {"is_decoupled_lr": True}], 1),
        (WORDS, [{}, {"max_lr": 0.7}], 1),
        ("decoder.layers.0.mlp.linear_fc1.weight", [{"max_lr": 0.7}, {}], 1),
        ("decoder.layers.0.mlp.linear_fc1.weight", [{}, {"pre_wd_mult": 0.0, "wd_mult": 0.0}], 0),
        ("decoder.layers.0.self_attention.q_layernorm.bias", [{}, {"wd_mult": 0.0}], 0),
    ],
)
def test_groups_are_told_by_their_marks(tmp_path: Path, name: str, groups: list[Any], number: int) -> None:
    weight = torch.randn(2, 2, 2)
    tensors = {name: weight, **{f"optimizer.state.{kind}.{name}": weight for kind in ("exp_avg", "exp_avg_sq")}}
    held = [make_group(**{"lr": float(at), **each}) for at, each in enumerate(groups)]
    args = Namespace(decoupled_lr=0.7, apply_wd_to_qk_layernorm=True)
    folder = save(tmp_path / "it", tensors, make_common(args=args, optimizer={"param_groups": held}))
    assert [group.hyper["lr"] for group in open_it(folder).run.groups] == [float(number)]


def test_groups_that_nothing_tells_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = {"param_groups": [make_group(lr=0.1), make_group(lr=0.2)], "state": {"common_step": torch.tensor(5.0)}}
    index = open_it(save(tmp_path / "it", common=make_common(optimizer=optimizer)))
    assert index.run.groups == ()
    assert "do not tell whose they are" in caplog.text
    assert {told["step"] for told in index.run.scalars.values()} == {5.0}


def test_steps_that_nothing_tells(tmp_path: Path) -> None:
    index = open_it(save(tmp_path / "it", common=make_common(optimizer={"param_groups": [make_group(step=None)]})))
    assert index.run.scalars == {} and "step" not in index.run.groups[0].hyper


def test_states_in_objects_of_ranks(saved: Path) -> None:
    """As dp_zero_gather_scatter, whose states are no tensors at all."""

    def tell(told: Any) -> None:
        told.state_dict_metadata["optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"] = BytesStorageMetadata()

    change_metadata(saved, tell)
    assert "nothing tells whose they are" in open_it(saved).limits.stateless


def test_weights_alone(tmp_path: Path) -> None:
    index = open_it(save(tmp_path / "it", make_tensors(states=False), {"args": None, "iteration": 5}))
    assert {key.state for key in index.stored.atoms} == {MODULE}
    assert index.is_weights_alone


@given(st.data())
def test_a_run_of_a_flattened_tensor_as_blocks(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, math.prod(shape)), st.integers(0, math.prod(shape)))))
    elements = np.arange(math.prod(shape)).reshape(shape)
    found = []
    for offsets, block, first in cut_run(shape, start, stop):
        held = elements[tuple(slice(at, at + size) for at, size in zip(offsets, block, strict=True))].ravel()
        assert held.tolist() == list(range(first, first + held.size))
        found += held.tolist()
    assert sorted(found) == list(range(start, stop))


def save_flattened(folder: Path, states: dict[str, torch.Tensor], cuts: dict[str, tuple[int, ...]]) -> Path:
    """As fully_sharded_model_space: states in as many blocks along each dimension, each flattened and cut in two."""
    parts: dict[str, dict[tuple[int, ...], torch.Tensor]] = {key: {} for key in states}
    for key, tensor in states.items():
        for place in itertools.product(*map(range, cuts[key])):
            block = tensor
            for dim, (at, cut) in enumerate(zip(place, cuts[key], strict=True)):
                block = block.chunk(cut, dim)[at]
            for start, part in zip((0, block.numel() // 3), (block.numel() // 3, None), strict=True):
                parts[key][(*place, start)] = block.flatten()[start:part].reshape(*(1,) * len(place), -1).clone()
    single = {f"{key}/{place}": part for key, held in parts.items() for place, part in held.items()}
    content = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
    save(folder, {**make_tensors(states=False), **single}, make_common(content_metadata=content))

    def join(told: Any) -> None:
        for key, held in parts.items():
            items = {place: told.state_dict_metadata.pop(f"{key}/{place}") for place in held}
            whole = next(iter(items.values()))
            whole.size = torch.Size((*cuts[key], states[key].numel() // math.prod(cuts[key])))
            whole.chunks = [
                ChunkStorageMetadata(torch.Size(place), part.chunks[0].sizes) for place, part in items.items()
            ]
            told.state_dict_metadata[key] = whole
            for place in held:
                info = told.storage_data.pop(MetadataIndex(f"{key}/{place}", torch.Size([0] * len(place))))
                told.storage_data[MetadataIndex(key, torch.Size(place))] = info
        told.mcore_data = {key: {"nd_reformulated_orig_global_shape": each.shape} for key, each in states.items()}

    change_metadata(folder, join)
    return folder


def test_states_that_are_flattened_block_by_block(tmp_path: Path) -> None:
    states, cuts = {}, {}
    for kind in ("fp32_param", "exp_avg", "exp_avg_sq"):
        for key, cut in ((WORDS, (2, 1)), (NORM, (2, 1)), (GATED, (2, 2, 3))):
            states[f"optimizer.state.{kind}.{key}"] = torch.randn(make_tensors()[key].shape)
            cuts[f"optimizer.state.{kind}.{key}"] = cut
    index = open_it(save_flattened(tmp_path / "it", states, cuts))
    for layer in range(2):
        atom = index.stored.atoms[AtomKey(f"decoder.layers.{layer}.mlp.linear_fc1.weight", "exp_avg")]
        check_same({"it": read_whole(index, atom)}, {"it": states[f"optimizer.state.exp_avg.{GATED}"][layer]})
    atom = index.stored.atoms[AtomKey(WORDS, MASTER)]
    check_same({"it": read_whole(index, atom)}, {"it": states[f"optimizer.state.fp32_param.{WORDS}"]})


def test_states_of_megatron_fsdp_are_refused(tmp_path: Path) -> None:
    """Its tensors are those of torch.distributed.checkpoint, without the files that Megatron-Core adds."""
    name, weight = "module.output_layer.weight", torch.randn(2, 3)
    states = {"state": {name: {"exp_avg": weight, "exp_avg_sq": weight}}, "param_to_group_meta": {name: {"lr": 0.1}}}
    dcp.save({"model": {name: weight}, "optimizer": states, "args": Namespace()}, checkpoint_id=tmp_path, no_dist=True)
    index = open_it(tmp_path)
    assert list_names(index, MODULE) == [name]
    assert "fsdp_dtensor" in index.limits.stateless and "--ckpt-format torch_dist" in index.limits.stateless


# -- which one is meant -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("told", "name"), [("5", "iter_0000005"), ("release\n", "release"), ("5\n", "iter_0000005")])
def test_the_newest_is_the_one_that_megatron_names(tmp_path: Path, told: str, name: str) -> None:
    for each in ("iter_0000004", "iter_0000005", "release"):
        save(tmp_path / each)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(told)
    assert read_latest(str(tmp_path), foreign=True) == name
    assert find_checkpoint(str(tmp_path)) == f"{tmp_path}/{name}"
    assert find_checkpoint(f"{tmp_path}/iter_0000004") == f"{tmp_path}/iter_0000004"


@pytest.mark.parametrize(
    ("told", "match"),
    [("6", "iter_0000006.*the folder holds iter_0000005"), ("../x", "outside|no iter"), ("", "empty")],
)
def test_a_name_that_leads_nowhere(saved: Path, told: str, match: str) -> None:
    (saved.parent / "latest_checkpointed_iteration.txt").write_text(told)
    with pytest.raises(CheckpointError, match=match):
        find_checkpoint(str(saved.parent))


def test_megatrons_format_of_a_folder_for_each_rank(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(UnsupportedError, match="--ckpt-convert-format torch_dist"):
        open_it(Path(find_checkpoint(str(tmp_path))))


def test_commands_take_a_run(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("5")
    run, out = str(saved.parent), tmp_path / "out"
    out.mkdir()
    assert main(["convert", run, str(out / "atomic")]) == 0
    assert main(["diff", run, str(out / "atomic")]) == 0
    assert main(["export", run, str(out / "weights")]) == 0
    for command in (["inspect"], ["verify"], ["list"]):
        assert main([*command, run]) == 0
    assert main(["plan", run, "--target", "zero=3,dp=2"]) == 0
    told = capsys.readouterr().out
    assert "written by  Megatron-Core, bfloat16" in told and "shard-v vocab=7" in told
    assert re.search(r"iter_0000005\s+5\s+yes", told)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({**FORM, "sharded_backend": "zarr"}, "'zarr'.*--ckpt-format torch_dist"),
        ({**FORM, "sharded_backend": 7}, "form 7"),
        ({**FORM, "sharded_backend_version": 2}, "version 2"),
        ({}, "a form that is not supported"),
        ([], "an array where an object is expected"),
    ],
)
def test_other_forms_are_refused(saved: Path, form: Any, told: str) -> None:
    (saved / "metadata.json").write_text(json.dumps(form))
    with pytest.raises((CheckpointError, UnsupportedError), match=told):
        open_it(saved)


def test_a_file_of_that_name_that_is_somebody_elses(tmp_path: Path) -> None:
    weight = torch.randn(2, 3)
    dcp.save({"model": {"a": weight}}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"step": 3}')
    index = open_it(tmp_path)
    assert (index.run.format, list_names(index, MODULE)) == ("torch.distributed.checkpoint", ["a"])


def test_a_save_that_was_interrupted(tmp_path: Path) -> None:
    """Where the common state is among the blocks, their keys alone tell what it is."""
    dcp.save({"a": torch.zeros(2), "common_state/shard_0_1": "x"}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match="without the metadata.json"):
        open_it(tmp_path)


def test_zarr_is_refused_by_its_name(saved: Path) -> None:
    (saved / "metadata.json").write_text(json.dumps({**FORM, "sharded_backend": "zarr"}))
    (saved / ".metadata").unlink()
    with pytest.raises(UnsupportedError, match="zarr"):
        open_it(saved)


@pytest.mark.parametrize(
    ("name", "told"), [("metadata.json", "interrupted"), ("common.pt", "common.pt.*missing"), (".metadata", "missing")]
)
def test_files_that_are_missing(saved: Path, name: str, told: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=told):
        open_it(saved)


def lose_layer(told: Any) -> None:
    del told.state_dict_metadata[GATED].chunks[0]


def resize(*shape: int) -> Callable[[Any], None]:
    def change(told: Any) -> None:
        told.state_dict_metadata[GATED].size = torch.Size(shape)

    return change


def repeat(told: Any) -> None:
    key = "decoder.layers.1.mlp.linear_fc1.weight"
    told.state_dict_metadata[key] = told.state_dict_metadata[GATED]
    for index, info in [*told.storage_data.items()]:
        if index.fqn == GATED:
            told.storage_data[type(index)(key, index.offset)] = info


def tell_flattened(shape: Any) -> Callable[[Any], None]:
    def change(told: Any) -> None:
        told.mcore_data = {WORDS: {"nd_reformulated_orig_global_shape": shape}, NORM: {}}

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lose_layer, "no block of .* layers 0-1"),
        (resize(10**9, 4, 3), "1000000000 layers"),
        (resize(1 << 14, 4, 3), "no block of .* layers 2-16383"),
        (resize(0, 4, 3), "not inside"),
        (resize(), "not inside"),
        (resize(1, 4, 3), "not inside"),
        (resize(3, 4, 3), "no block of .* layers 2"),
        (resize(2, 4), "not inside"),
        (repeat, "twice"),
        (tell_flattened([8, 3]), "damaged"),
        (tell_flattened((3, 3)), "in blocks of"),
        (tell_flattened((8, 1 << 40)), "in blocks of"),
        (tell_flattened((8, 3)), "in blocks of"),
    ],
)
def test_metadata_that_lies_is_refused(saved: Path, change: Callable[[Any], None], told: str) -> None:
    change_metadata(saved, change)
    with pytest.raises((CheckpointError, UnsupportedError), match=told):
        open_it(saved)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"a.weight_w": torch.zeros(2, 2), "a.weight_v": torch.zeros(3, 2)}, "do not fit"),
        ({"a.weight_w": torch.zeros(2), "a.weight_v": torch.zeros(2)}, "do not fit"),
        ({"a.weight": torch.zeros(2, 2), "a.weight_w": torch.ones(2, 2), "a.weight_v": torch.ones(2, 2)}, "twice"),
        ({f"mlp.experts.experts.{n}.fc.weight": torch.zeros(2, 2) for n in (0, 2)}, "each expert"),
        ({"a": torch.zeros(2), "optimizer.state.copy.a": torch.zeros(2)}, "beside another"),
        (
            {"a": torch.zeros(2), **{f"{n}optimizer.state.m.a": torch.zeros(2) for n in ("", "chained_0.")}},
            "beside another",
        ),
        ({"optimizer.state.exp_avg.a": torch.zeros(2)}, "no model"),
        ({"decoder.layers.a": torch.zeros(1 << 14, 0)}, "16384 layers"),
    ],
)
def test_parts_that_are_no_whole(tmp_path: Path, tensors: dict[str, torch.Tensor], told: str) -> None:
    folder = save(tmp_path / "it", tensors)
    with pytest.raises((CheckpointError, UnsupportedError), match=told):
        open_it(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"iteration": -1},
        {"iteration": True},
        {"iteration": 0.5},
        {"optimizer": {"param_groups": [make_group(step="x")]}},
        {"optimizer": {"param_groups": [make_group(step=-1)]}},
        {"optimizer": {"param_groups": [make_group(step=2.5)]}},
        {"optimizer": {"param_groups": [make_group(step=None)], "state": {"common_step": torch.tensor(float("nan"))}}},
        {"args": {"consumed_train_samples": "many"}},
        {"args": {"consumed_train_samples": -5}},
    ],
)
def test_counts_that_are_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = save(tmp_path / "it", common=make_common(**changes))
    with pytest.raises(CheckpointError, match="global_|steps"):
        open_it(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"iteration": "x", "args": 5},
        {"args": [1], "optimizer": []},
        {"args": {"vocab_size": "7", "padded_vocab_size": -1, "decoupled_lr": [1]}},
        {"args": Namespace(vocab_size=1 << 80), "content_metadata": 4},
        {"optimizer": {"param_groups": [5, {"step": None, "lr": torch.zeros(3), "wd_mult": []}]}},
        {"optimizer": {"param_groups": 5, "state": [3], 0: {"param_groups": [{}]}, "optimizer": {"optimizer": 0}}},
    ],
)
def test_odd_values_are_no_faults_of_the_reader(tmp_path: Path, changes: dict[str, Any]) -> None:
    with suppress(UcpError):
        open_it(save(tmp_path / "it", common=make_common(**changes)))


def test_an_optimizer_inside_of_itself(tmp_path: Path) -> None:
    held: dict[Any, Any] = {"param_groups": [make_group()]}
    held["optimizer"] = held
    folder = save(tmp_path / "it", common=make_common(optimizer=held))
    with pytest.raises(CheckpointError):
        open_it(folder)


def test_what_is_left_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = {**make_common()["optimizer"], "grad_scaler": {"scale": torch.ones(1)}}
    save(tmp_path / "it", common=make_common(optimizer=held, opt_param_scheduler={"num_steps": 5}))

    def tell(told: Any) -> None:
        objects = ("rng_state/shard_0.0_1.1", "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2")
        told.state_dict_metadata |= {key: BytesStorageMetadata() for key in objects}

    change_metadata(tmp_path / "it", tell)
    open_it(tmp_path / "it")
    assert "Megatron's own: opt_param_scheduler, grad_scaler, rng_state." in caplog.text


def test_no_code_of_a_common_state_runs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    torch.save(make_common(rng_state=Harm(), args=Harm(), optimizer={"param_groups": [Harm()]}), saved / "common.pt")
    open_it(saved)
    assert not (saved / "harm").exists()
    (saved / "common.pt").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(UcpError):
        open_it(saved)
    assert not (saved / "harm").exists()


def test_a_flipped_bit_is_found(saved: Path) -> None:
    assert verify_checkpoint(str(saved)).whole
    index = open_it(saved)
    record = max(index.stored.records, key=lambda each: each.nbytes)
    path = Path(index.stored.files[record.file].path)
    data = bytearray(path.read_bytes())
    data[record.offset + 5] ^= 4
    path.write_bytes(data)
    assert not verify_checkpoint(str(saved)).whole


@pytest.mark.parametrize("name", ["common.pt", "metadata.json"])
def test_damage_anywhere_is_one_error_or_none(saved: Path, name: str) -> None:
    whole, draw = (saved / name).read_bytes(), np.random.default_rng(0)
    for at in draw.integers(0, len(whole), 60).tolist():
        data = bytearray(whole)
        data[at] = int(draw.integers(256))
        (saved / name).write_bytes(data[: at + 1] if at % 3 == 0 else data)
        with suppress(UcpError):
            open_it(saved)
