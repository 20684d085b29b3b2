"""Keys in parameter files: upstream's loader cuts a parameter like the pattern."""

import types
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import merge_tp_slices
from deepspeed.checkpoint.universal_checkpoint import SubparamShape, load_hp_checkpoint_state

from deepspeed_ucp.formats.universal.upstream import upstream_keys
from deepspeed_ucp.tensor_parallel.kinds import Partial, Replicate, SameShards, ShardH, ShardHy, ShardNC, ShardV, Unique
from deepspeed_ucp.tensor_parallel.metadata import Mapped, Viewed, from_universal_info, generalise
from deepspeed_ucp.tensor_parallel.settle import settle
from deepspeed_ucp.torchsave.zipframe import make_image
from tests.tensor_parallel.shards import cut_array


def draw(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def write_param(folder, stored, keys, rows=None):
    """Write a parameter's file like the converter: the tensor views the first ``rows`` stored rows."""
    shape = (stored.shape[0] if rows is None else rows, *stored.shape[1:]) if stored.dim() else ()
    image, data = make_image(keys, "float32", stored.numel(), shape), stored.contiguous().numpy().tobytes()
    (folder / "fp32.pt").write_bytes(image.head + data + image.tail(zlib.crc32(data)))


def load_upstream(folder, local_shape, rank, tp):
    """Load the shard of rank ``rank`` of ``tp`` with upstream's loader."""
    param = torch.nn.Parameter(torch.empty(local_shape))
    fragment = torch.full((param.numel(),), float("nan"))
    address = SimpleNamespace(start=0, numel=param.numel())
    param._hp_mapping = SimpleNamespace(lp_fragment_address=address, get_hp_fragment=lambda: fragment)
    types.MethodType(load_hp_checkpoint_state, param)(str(folder), rank, tp)
    return fragment.view(local_shape)


GQA = ShardNC(parts=(16, 4, 4), sized=True)
CASES = {  # pattern, shape, and a pattern with the same cut at any degree
    "shard-v": (ShardV(), (8, 3)),
    "shard-v-bias": (ShardV(unit=2), (8,)),
    "shard-h": (ShardH(), (3, 8)),
    "shard-h-last": (ShardH(dim=-1), (2, 3, 8)),
    "shard-hy-one-axis": (ShardHy(grid=(1, 4)), (3, 8), ShardH()),
    "gate-up": (ShardNC(parts=(1, 1)), (16, 3)),
    "gate-up-dim-1": (ShardNC(parts=(1, 1), dim=1), (3, 16)),
    "qkv": (ShardNC(parts=(1, 1, 1)), (24, 2)),
    "qkv-gqa": (GQA, (24, 2)),
    "qkv-gqa-shares": (ShardNC(parts=(4, 1, 1)), (24,)),
    "qkv-gqa-widths": (replace(GQA, widths=((10, 6), (2, 2), (2, 2))), (24, 2), GQA),
    "experts": (ShardNC(blocks=3), (24, 2)),
    "experts-gate-up": (ShardNC(parts=(1, 1), blocks=2), (32, 2)),
    "viewed": (Viewed((0, -1), 0, (16, 4, 4)), (24, 5), GQA),
    "viewed-count": (Viewed((0, -1), 0, 3), (24, 5), ShardNC(parts=(1, 1, 1))),
    "viewed-one-part": (Viewed((3, 0), 1, (8,)), (3, 8), ShardH()),
    "viewed-blocks": (Viewed((2, 0, -1), 1, (8, 4)), (24, 2), ShardNC(parts=(8, 4), sized=True, blocks=2)),
    "replicate": (Replicate(), (4, 4)),
    "partial": (Partial(), (4,), Replicate()),
    "unique": (Unique(), (4, 2), Replicate()),
    "unknown": (None, (4, 2), Replicate()),
    "kept": (SameShards(), (16,), ShardV()),
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_upstreams_loader_cuts_like_the_pattern(case, tp, tmp_path):
    pattern, shape, *like = CASES[case]
    tensor, locals_ = draw(*shape), (like or [pattern])[0].spread(shape, tp)
    write_param(tmp_path, tensor, upstream_keys(pattern, shape, "a.weight"))
    expected = cut_array((like or [pattern])[0].join(locals_), tensor.numpy())
    for rank, local in enumerate(locals_):
        assert np.array_equal(load_upstream(tmp_path, local, rank, tp), expected[rank].reshape(local))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pattern", [ShardV(vocab=13), Unique(vocab=13)], ids=["shard-v", "unique"])
def test_a_vocabulary_is_padded_for_the_targets_degree(pattern, tp, tmp_path):
    """The file's tensor has 13 rows without padding. The source pads to 16 rows, the target to 24."""
    stored = draw(16, 2)
    write_param(tmp_path, stored, upstream_keys(pattern, (16, 2)), rows=13)
    wanted = torch.nn.functional.pad(stored[:13], (0, 0, 0, 11))
    for rank in range(tp):
        assert torch.equal(load_upstream(tmp_path, (24 // tp, 2), rank, tp), wanted.chunk(tp)[rank])


@pytest.mark.parametrize("shape", [(16,), (16, 2, 2)])
def test_upstream_pads_matrices_only(shape):
    assert upstream_keys(ShardV(vocab=13), shape) == {"cat_dim": 0}


@pytest.mark.parametrize(
    "pattern",
    [
        ShardHy(grid=(2, 2)),
        ShardNC(parts=(5, 2), sized=True),
        Mapped(ShardHy((2, 2)).join([(2, 2)] * 4)),
        Replicate(vocab=3),
    ],
    ids=["grid", "parts-of-another-size", "map-of-a-grid", "replicated-vocabulary"],
)
def test_unsupported_patterns_have_no_keys(pattern):
    assert upstream_keys(pattern, (4, 4)) == {}


def test_a_map_is_described_by_its_general_pattern():
    parts = ShardNC(parts=(8, 4), sized=True).join([(6, 2), (6, 2)])
    keys = upstream_keys(Mapped(parts, generalise(parts)), (12, 2))
    assert keys.keys() == {"sub_param_shape"}


INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 13,
    "vocabulary_parameter_patterns": ["embed"],
    "tp_replicated_parameter_patterns": ["norm"],
    "parameter_to_average_patterns": ["mean"],
    "parameter_with_row_parallelism_patterns": ["row"],
    "parameter_with_2_sub_params_cat_dim_0": ["gate"],
    "parameter_with_sub_params": [
        {"patterns": ["qkv"], "shape": ((8, 4, 4), -1), "partition_dim": 0},
        {"patterns": ["fused"], "shape": (3, -1), "partition_dim": 0},
    ],
}
LOCAL = {
    "embed": (8, 2),
    "norm": (4,),
    "mean": (4,),
    "row": (3, 4),
    "gate": (8, 2),
    "qkv": (8, 2),
    "fused": (6, 2),
    "other": (4, 2),
}


@pytest.mark.parametrize("name", LOCAL)
def test_upstreams_loader_reads_our_files_like_upstreams_converters(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards = [draw(*LOCAL[name]) + (0 if name == "norm" else 100 * rank) for rank in range(2)]
    theirs, ours = tmp_path / "theirs" / name, tmp_path / "ours"
    ours.mkdir()
    for rank, shard in enumerate(shards):
        (tmp_path / "slices" / name / str(rank)).mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save(shard.flatten(), tmp_path / "slices" / name / str(rank) / f"{state}.00")
    merge_tp_slices(INFO, str(tmp_path / "theirs"), str(tmp_path / "slices"), 2, (name, [s.shape for s in shards]))
    merged = torch.load(theirs / "fp32.pt", weights_only=False)

    rules = [from_universal_info(INFO)]
    local = {name: tuple(tuple(shard.shape) for shard in shards)}
    pattern = ShardV() if name == "other" else settle([name], local, None, rules).patterns[name]
    shape = pattern.join(local[name]).shape
    stored = torch.nn.functional.pad(merged["param"], (0, 0, 0, shape[0] - 13)) if name == "embed" else merged["param"]
    write_param(ours, stored.reshape(shape), upstream_keys(pattern, shape), rows=13 if name == "embed" else None)
    wanted = torch.load(ours / "fp32.pt", weights_only=False)["param"]
    assert wanted.shape == merged["param"].shape
    for tp in (1, 2, 4):
        whole = name in ("norm", "mean")
        dim = 1 if name == "row" else 0
        target = list(shape)
        target[dim] //= 1 if whole else tp
        for rank in range(tp):
            found = [load_upstream(folder, tuple(target), rank, tp) for folder in (ours, theirs)]
            assert torch.equal(*found)


def test_the_pickled_class_is_upstreams_class(tmp_path):
    write_param(tmp_path, draw(24, 2), upstream_keys(ShardNC(parts=(4, 1, 1)), (24, 2), "layers.0.qkv"))
    pickled = torch.load(tmp_path / "fp32.pt", weights_only=False)["sub_param_shape"]
    assert pickled == SubparamShape(patterns=[r"layers\.0\.qkv"], shape=((16, 4, 4), 2), partition_dim=0)
