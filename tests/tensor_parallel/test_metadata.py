"""``universal_checkpoint_info`` of every version, compared with DeepSpeed's code on the same data."""

from __future__ import annotations

import re

import numpy as np
import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.tensor_parallel import settle as settling
from deepspeed_ucp.tensor_parallel.facts import Facts
from deepspeed_ucp.tensor_parallel.kinds import Partial, Replicate, SameShards, ShardH, ShardNC, ShardV
from deepspeed_ucp.tensor_parallel.layout import copy_runs, find_faults, whole
from deepspeed_ucp.tensor_parallel.metadata import Mapped, from_universal_info, read_map
from deepspeed_ucp.tensor_parallel.rules import from_config

from . import models
from .shards import check_reshard, cut_array, settle

MEGATRON = {
    # Written by Megatron-DeepSpeed's GPTModelPipe at TP 2.
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 50257,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
    "tp_replicated_parameter_patterns": [
        r"tied_modules.embed.position_embeddings.weight",
        r"\d+.input_layernorm.weight",
        r"\d+.input_layernorm.bias",
        r"\d+.post_attention_layernorm.weight",
        r"\d+.post_attention_layernorm.bias",
        r"\d+.self_attention.dense.bias",
        r"\d+.mlp.dense_4h_to_h.bias",
        r"\d+.weight",
        r"\d+.bias",
    ],
    "parameter_with_row_parallelism_patterns": [r"\d+.self_attention.dense.weight", r"\d+.mlp.dense_4h_to_h.weight"],
}


def settle_one(info, shapes, target=None):
    rules = [from_universal_info(info)]
    return settle(["w"], {"w": tuple(shapes)}, None if target is None else {"w": tuple(target)}, rules)


def test_metadata_of_megatron_gives_patterns_except_for_fused_attention():
    """No list contains fused attention. The second feed-forward matrix determines the pattern of the first."""
    source, target = (models.make(models.PIPELINE, models.GPT3_MEDIUM, tp) for tp in (2, 4))
    rules = from_universal_info(MEGATRON)
    with pytest.raises(MismatchError) as caught:
        settle(list(source), source, target, [rules])
    text = str(caught.value)
    assert "(4 parameters)" in text
    assert "{2-3}.self_attention.query_key_value.weight: (1536, 1024) on 2 ranks" in text
    assert "dense_h_to_4h" not in text
    settled = settle(list(source), source, target, [rules, *from_config("megatron-gpt")])
    assert settled.patterns["2.self_attention.dense.weight"] == ShardH()
    assert settled.patterns["4.weight"] == Replicate()
    assert settled.patterns["tied_modules.embed.word_embeddings.weight"] == ShardV(vocab=50257)
    assert settled.origin["2.mlp.dense_h_to_4h.bias"] == "family megatron-gpt"
    assert settled.unused == []


def test_parameters_in_no_list_have_no_pattern():
    """Megatron-DeepSpeed writes no row-parallel patterns at TP 1; DeepSpeed would cut these weights on dimension 0."""
    info = {**MEGATRON, "parameter_with_row_parallelism_patterns": [], "tp_replicated_parameter_patterns": []}
    name = "2.self_attention.dense.weight"
    source, target = {name: ((1024, 1024),)}, {name: ((1024, 512),) * 2}
    with pytest.raises(MismatchError, match=rf"{name}: \(1024, 1024\) on 1 rank"):
        settle([name], source, target, [from_universal_info(info)])


def test_metadata_of_parameters_shared_by_pipeline_stages():
    (match,) = from_universal_info(MEGATRON).shared
    assert match("tied_modules.embed.word_embeddings.weight")
    assert not match("tied_modules.embed.position_embeddings.weight")


VOCABULARY_OF_3 = {"vocabulary_parameter_patterns": ["w"], "original_vocab_size": 3}


@pytest.mark.parametrize(
    ("info", "shapes", "pattern"),
    [
        ({"tp_replicated_parameter_patterns": ["w"]}, [(4,), (4,)], Replicate()),
        ({"parameter_to_average_patterns": ["w"]}, [(4,), (4,)], Partial()),
        ({"parameter_with_row_parallelism_patterns": ["w"]}, [(4, 1), (4, 2)], ShardH()),
        ({"parameter_with_2_sub_params_cat_dim_0": ["w"]}, [(4, 3), (4, 3)], ShardNC(parts=(1, 1))),
        ({"vocabulary_parameter_patterns": ["w"], "original_vocab_size": 7}, [(4, 3), (4, 3)], ShardV(vocab=7)),
        ({**VOCABULARY_OF_3, "tp_replicated_parameter_patterns": ["^w$"]}, [(4, 3), (4, 3)], Replicate(vocab=3)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_lists_in_metadata_give_patterns(info, shapes, pattern):
    assert settle_one(info, shapes).patterns["w"] == pattern


def test_patterns_that_match_no_parameter_are_reported():
    info = {"tp_replicated_parameter_patterns": ["w", "^v$", r"x\d"]}
    settled = settle_one(info, [(4,), (4,)])
    assert settled.unused == []
    assert sorted(settled.notes) == [
        "universal_checkpoint_info: '^v$' matches no parameter",
        r"universal_checkpoint_info: 'x\\d' matches no parameter",
    ]


def test_parameters_that_autotp_could_not_describe_are_refused():
    info = {"autotp_unsupported_parameter_patterns": {"^w$": "it interleaves blocks"}}
    with pytest.raises(MismatchError, match="w: universal_checkpoint_info: it interleaves blocks"):
        settle(["w"], {"w": ((4,), (4,))}, None, [from_universal_info(info), *from_config("megatron-gpt")])
    user = from_config([{"match": "w", "pattern": "shard-v"}])
    assert settle(["w"], {"w": ((4,), (4,))}, None, [*user, from_universal_info(info)]).patterns["w"] == ShardV()


def test_refusals_follow_renamed_parameters():
    """AutoTP's rule for all other parameters must not apply to the new name."""
    info = {"autotp_unsupported_parameter_patterns": {"^w$": "it interleaves blocks", "h.*": "odd"}}
    rules = from_universal_info(info, source="target").follow({"w": "old", "h.0": "0", "v": "v"})
    for name, why in (("old", "it interleaves blocks"), ("0", "odd")):
        with pytest.raises(MismatchError, match=f"{name}: the live engine's .*: {why}"):
            settle([name], {name: ((4,), (4,))}, {name: ((8,),)}, [rules])


def test_equal_shards_in_another_order_are_refused():
    """Both sides describe the shards of [8, 3] at degree 2: as halves, or as halves of two parts."""
    halves, parts = ({key: ["w"]} for key in ("vocabulary_parameter_patterns", "parameter_with_2_sub_params_cat_dim_0"))
    shapes = {"w": ((4, 3), (4, 3))}
    for saved, live in ((halves, parts), (parts, halves)):
        rules = [from_universal_info(saved), from_universal_info(live, source="target")]
        with pytest.raises(MismatchError, match=r"w: universal_checkpoint_info and the live .* different orders"):
            settle(["w"], shapes, shapes, rules)
        assert settle(["w"], shapes, shapes, rules[:1]).patterns == {"w": SameShards()}
        user = from_config([{"match": "w", "pattern": "shard-v"}])
        assert settle(["w"], shapes, shapes, [*user, *rules]).patterns == {"w": SameShards()}
        rules = [from_universal_info(saved), from_universal_info(saved, source="target")]
        assert settle(["w"], shapes, shapes, rules).patterns == {"w": SameShards()}


def test_metadata_of_autotp_without_maps():
    """It lists all parameters except those that are cut on dimension 0."""
    info = {
        "universal_checkpoint_version": 0.4,
        "autotp_unsupported_parameter_patterns": {},
        "parameter_with_row_parallelism_patterns": [r"^o\.weight$"],
        "tp_replicated_parameter_patterns": [r"^norm\.weight$"],
    }
    shapes = {"q.weight": ((4, 6), (2, 6)), "o.weight": ((6, 4), (6, 2)), "norm.weight": ((6,), (6,))}
    settled = settle(list(shapes), shapes, None, [from_universal_info(info)])
    assert settled.patterns == {"q.weight": ShardV(), "o.weight": ShardH(), "norm.weight": Replicate()}
    assert settled.notes == []


def parts_info(shape, dim, version=0.4, widths=None, **more):
    entry = {"patterns": ["w"], "shape": shape, "partition_dim": dim, **more}
    info = {"universal_checkpoint_version": version, "parameter_with_sub_params": [entry]}
    return info if widths is None else {**info, "sub_param_shard_widths": {"w": widths}}


def merge_upstream(shards, view, dim, widths):
    """Join shards like ``merge_tp_slices``: join each sub-parameter over ranks, then concatenate."""
    local = [list(view) for _ in shards]
    for rank, shape in enumerate(local):
        shape[dim] = sum(part[rank] for part in widths)
    views = [shard.reshape(shape) for shard, shape in zip(shards, local, strict=True)]
    offsets, merged = [0] * len(shards), []
    for part in widths:
        for rank, width in enumerate(part):
            merged.append(np.take(views[rank], range(offsets[rank], offsets[rank] + width), axis=dim))
            offsets[rank] += width
    return np.concatenate(merged, axis=dim)


GROUPED, EQUAL = [[8, 4], [4, 2], [4, 2]], [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("shape", "dim", "version", "view", "widths", "local"),
    [
        ([(12, 6, 6), 5], 0, 0.4, (24, 5), GROUPED, None),
        ([3, -1], 0, 0.3, (24, 5), [[4, 4]] * 3, None),
        ([(12, 4, 4), 5], 0, 0.3, (20, 5), [[6, 6], [2, 2], [2, 2]], None),
        ([-1, (4, 4)], 1, 0.3, (5, 8), EQUAL, None),
        ([8, 5], 0, 0.4, (8, 5), [[4, 4]], None),
        ([(4, 2, 2), 3], 0, 0.4, (8, 3), [[2, 2], [2, 0], [2, 0]], None),
        # The tensor [3 × 8, 5] viewed as [3, (4; 4), 5] and cut along the middle.
        ([3, (4, 4), 5], 1, 0.4, (3, 8, 5), EQUAL, (12, 5)),
        # The tensor [(4 + 2) × 3, 5] viewed as [(4; 2), 3, 5] and cut along heads.
        ([(4, 2), 3, 5], 0, 0.4, (6, 3, 5), [[2, 2], [1, 1]], (9, 5)),
        ([(4, 2)], 0, 0.4, (6,), [[2, 2], [1, 1]], None),
    ],
    ids=[
        "three key/value heads on two ranks",
        *("number of equal parts before 0.4", "sizes that are split evenly before 0.4", "columns"),
        *("width of the only part since 0.4", "a rank without key/value heads", "experts", "heads", "bias"),
    ],
)
def test_sub_parameters_are_joined_like_deepspeeds_merge_tp_slices(shape, dim, version, view, widths, local):
    info = parts_info(shape, dim, version, widths if version == 0.4 and len(widths) > 1 else None)
    sizes = []
    for rank in range(2):
        cut = list(view)
        cut[dim] = sum(part[rank] for part in widths)
        sizes.append(tuple(cut) if local is None else local)
    total = sum(int(np.prod(size)) for size in sizes)
    cuts = np.split(np.random.default_rng(0).permutation(total), [int(np.prod(sizes[0]))])
    layout, _ = settle_one(info, sizes).layouts["w"]
    assert find_faults(layout) == []
    to = whole((total,)) if len(view) == 1 else whole(layout.shape)
    check_reshard(layout, cuts, to, [merge_upstream(cuts, view, dim, widths)])


affine = pytest.importorskip("deepspeed.checkpoint.affine", reason="DeepSpeed before 0.19 has no affine maps")

MAPS = {
    "replicated": (lambda: affine.replicated_map((3, 4), 2), Replicate()),
    "rows": (lambda: affine.contiguous_split_map((7, 3), [3, 2, 2], 0), ShardV()),
    "columns": (lambda: affine.contiguous_split_map((3, 7), [0, 4, 3], 1), ShardH()),
    "sub": (lambda: affine.sub_param_map((8, 3), (4, 2, 2), [[2, 2], [2, 0], [2, 0]], 0), None),
    "sub-columns": (
        lambda: affine.sub_param_map((2, 9), (6, 3), [[4, 2], [2, 1]], 1),
        ShardNC(parts=(6, 3), dim=1, sized=True),
    ),
    "segmented": (lambda: affine.segmented_map((10, 3), [(6, False), (4, True)], 0, 3, [[2, 2, 2]]), None),
    "gather": (lambda: affine.block_gather_map((8, 3), {0: [0, 3], 1: [2, 1]}, 2, 0), None),
    "gather-columns": (lambda: affine.block_gather_map((3, 8), {0: [2, 0], 1: [1, 3]}, 2, 1), None),
    "vector": (lambda: affine.contiguous_split_map((7,), [4, 3], 0), ShardV()),
}
"""Name → map, and its pattern at other degrees."""


@pytest.mark.parametrize("name", sorted(MAPS))
def test_affine_maps_cut_like_deepspeeds(name):
    """Shards equal those of ``ParamAffineMap.extract`` and join to the tensor."""
    import torch

    upstream, general = MAPS[name][0](), MAPS[name][1]
    found = read_map(upstream.to_dict())
    layout = found.layout
    assert (find_faults(layout), found.general) == ([], general)
    values = torch.arange(upstream.numel).view(upstream.logical_shape)
    shards = [upstream.extract(values, rank).reshape(-1).numpy() for rank in range(len(layout.shards))]
    for got, expected in zip(cut_array(layout, values.numpy()), shards, strict=True):
        np.testing.assert_array_equal(got, expected)
    check_reshard(layout, shards, whole(upstream.logical_shape), [values.numpy()])
    check_reshard(whole(upstream.logical_shape), [values.numpy()], layout, shards)
    check_reshard(layout, shards, layout, shards)


def affine_info(upstream):
    return {"affine_map": {"version": 1, "params": {"^w$": upstream.to_dict()}}, "original_vocab_size": 3}


def test_each_sides_map_describes_its_degree():
    """AutoTP at degrees 2 and 3 with uneven heads: a side's map precedes the general pattern of the other side."""
    two = affine.sub_param_map((18, 2), (12, 6), [[8, 4], [4, 2]], 0)
    three = affine.sub_param_map((18, 2), (12, 6), [[4, 6, 2], [2, 2, 2]], 0)
    rules = [
        from_universal_info(affine_info(two)),
        from_universal_info(affine_info(three), source="target"),
    ]
    shapes = {"w": ((12, 2), (6, 2))}, {"w": ((6, 2), (8, 2), (4, 2))}
    settled = settle(["w"], *shapes, rules)
    source, target = settled.layouts["w"]
    assert source.shards[0][0] == ((0, 8), (12, 16))
    assert target.shards[1][0] == ((4, 10), (14, 16))
    assert settled.origin["w"] == "universal_checkpoint_info; the live engine's universal_checkpoint_info"
    assert settled.patterns["w"].vocab is None
    values = np.arange(36)
    check_reshard(source, cut_array(source, values), target, cut_array(target, values))


@pytest.mark.parametrize("text", [".*", "^w$"])
def test_a_map_precedes_the_lists_of_the_same_info(text):
    lists = {key: [text] for key in ("parameter_with_row_parallelism_patterns", "tp_replicated_parameter_patterns")}
    assert isinstance(from_universal_info(affine_info(MAPS["sub"][0]()) | lists).find("w", Facts()), Mapped)


@pytest.mark.parametrize("name", ["segmented", "gather"])
def test_a_map_of_only_the_saved_side_allows_only_one_live_rank(name):
    upstream = MAPS[name][0]()
    local = tuple(upstream.shard_shapes[rank] for rank in sorted(upstream.shard_shapes))
    source, target = settle_one(affine_info(upstream), local, [upstream.logical_shape]).layouts["w"]
    assert target == whole(upstream.logical_shape)
    numel = int(np.prod(upstream.logical_shape))
    runs = [run for rank in range(len(local)) for run in copy_runs(source, rank, target, 0, 0, numel)]
    assert sum(run.numel for run in runs) == numel
    with pytest.raises(MismatchError, match="its layout has no counterpart"):
        settle_one(affine_info(upstream), local, [(2, 3)] * 4)


def test_one_saved_rank_loads_into_a_live_map():
    upstream = MAPS["gather"][0]()
    rules = [from_universal_info(affine_info(upstream), source="target")]
    settled = settle(["w"], {"w": ((8, 3),)}, {"w": ((4, 3), (4, 3))}, rules)
    assert settled.layouts["w"] == (whole((8, 3)), read_map(upstream.to_dict()).layout)


def change_map(**fields):
    """Make a map of two halves of four rows, with changed fields of its first piece."""
    entry = affine.contiguous_split_map((4, 3), [2, 2], 0).to_dict()
    entry["ranks"][0]["pieces"][0].update(fields)
    return {"affine_map": {"version": 1, "params": {"^w$": entry}}}


GQA = parts_info([(12, 6, 6), 5], 0, widths=[[6, 6], [3, 3], [3, 3]])
HALVES = [(2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("info", "shapes", "message"),
    [
        *((info, [(4,), (4,)], "is not known") for info in (None, {}, "method", {"universal_checkpoint_version": 0.1})),
        (GQA, [(16, 5), (8, 5)], "do not sum"),
        (GQA, [(12, 4), (12, 4)], "do not fit"),
        (parts_info([(4, 4), 5], 0, 0.3), [(3, 5), (5, 5)], "shares are not whole|not whole units"),
        (parts_info([3, -1], 0, 0.3), [(4, 5), (4, 5)], "shares are not whole"),
        (change_map(scale=0.5), HALVES, "w: universal_checkpoint_info: .*scales a piece by 0.5"),
        (change_map(source=[0, [1, 3]]), HALVES, "not row-major blocks"),
        (change_map(source=[9, [3, 1]]), HALVES, "reach beyond"),
        (change_map(source=[3, [3, 1]]), HALVES, "not a tiling: the shards have 9 of 12 elements"),
        (change_map(dest=[3, [3, 1]]), HALVES, "reach beyond|leave gaps"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_metadata_without_a_pattern_for_a_parameter_is_refused(info, shapes, message):
    with pytest.raises(MismatchError, match=message):
        settle_one(info, shapes)


def test_thousands_of_named_parameters_are_looked_up_by_name():
    """AutoTP names every parameter by an escaped expression."""
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3000)]
    shape = affine.contiguous_split_map((4, 3), [2, 2], 0).to_dict()
    info = {"affine_map": {"version": 1, "params": {f"^{re.escape(name)}$": shape for name in names}}}
    rules = from_universal_info(info)
    assert rules.rules == ()
    shapes = dict.fromkeys(names, ((2, 3), (2, 3)))
    assert len(settle(names, shapes, None, [rules]).layouts) == 3000


@pytest.mark.parametrize("text", ["(a+)+$", "(a|a)*$", ".*a.*a.*a.*a.*a.*a.*a.*a.*a.*a$"])
def test_expressions_are_matched_in_linear_time(text):
    """Python's engine needs exponential time for these."""
    (rule,) = from_universal_info({"tp_replicated_parameter_patterns": [text]}).rules
    names = ["a" * 5000 + "b", "a" * 9 + "\ud800b", "b" * 5000]
    assert not any(rule.match(name) for name in names)
    assert rule.match("a" * 5000)


def test_expressions_match_prefixes_like_deepspeeds_converter():
    texts = [r"\d+.dense.weight", r"(.+\.)?q_proj", "^a.b$", r"^a\.b$", "a"]
    rules = [from_universal_info({"tp_replicated_parameter_patterns": [text]}) for text in texts]
    names = ("12.dense.weight", "12.dense.weight.more", "x.q_proj.weight", "a.b", "a.bc", "acb", "ba", "12dense.weight")
    for name in names:
        for text, each in zip(texts, rules, strict=True):
            found = any(rule.match(name) for rule in (*each.rules, *each.literal.get(name, ())))
            assert found == bool(re.match(text, name)), (text, name)


REPLICATED = "tp_replicated_parameter_patterns"
MALFORMED = [
    ({"parameter_with_sub_params": [{"patterns": ["w"]}]}, "malformed entry"),
    ({REPLICATED: "w"}, "tp_replicated_parameter_patterns must be a list"),
    ({"affine_map": {"version": 2, "params": {}}}, "affine_map has format 2, this release supports up to 1"),
    ({REPLICATED: ["("]}, "cannot be matched in linear time"),
    ({REPLICATED: ["(?!a)(b)*"]}, "cannot be matched in linear time"),
    ({REPLICATED: [r"(a+)\1"]}, "cannot be matched in linear time"),
    ({REPLICATED: ["((a{100}){100}){100}"]}, "cannot be matched in linear time"),
    ({REPLICATED: [7]}, "7 is not a regular expression"),
    ({"autotp_unsupported_parameter_patterns": ["w"]}, "an entry is malformed"),
    ({"affine_map": ["w"]}, "an entry is malformed"),
    ({"affine_map": {"version": "x"}}, "an entry is malformed"),
    ({"affine_map": {"params": ["w"]}}, "an entry is malformed"),
    ({"affine_map": {"params": {"w": 3}}}, "an entry is malformed"),
    ({"affine_map": {"params": {"w": {"logical_shape": [2], "ranks": {"0": None}}}}}, "an entry is malformed"),
    ({**parts_info([3, -1], 0, 0.3), "universal_checkpoint_version": "new"}, "an entry is malformed"),
    (parts_info([(4, 4), 5], 0, widths=[["x", "y"]]), "an entry is malformed"),
    (parts_info([10**9, -1], 0, 0.3), "has 1000000000 sub-parameters"),
    (parts_info([0, -1], 0, 0.3), "has 0 sub-parameters"),
    (parts_info([(4, -4), 5], 0), "has invalid sizes"),
    ({"original_vocab_size": -3}, "original_vocab_size is -3"),
]


@pytest.mark.parametrize(("info", "words"), MALFORMED)
def test_malformed_metadata_is_refused(info, words):
    with pytest.raises(MismatchError, match=f"universal_checkpoint_info: .*{words}"):
        from_universal_info(info)


@pytest.mark.parametrize(("rows", "settles"), [(8, True), (16, False)], ids=["plain", "gate and up"])
def test_the_pattern_of_the_second_matrix_determines_the_first(rows, settles):
    """Megatron-DeepSpeed has dense_h_to_4h in no list; a live model's attributes describe it."""
    first, second = "3.mlp.dense_h_to_4h.weight", "3.mlp.dense_4h_to_h.weight"
    shapes = {first: ((rows, 4),) * 2, second: ((4, 8),) * 2}
    info = {"parameter_with_row_parallelism_patterns": [r"\d+.mlp.dense_4h_to_h.weight"]}
    found = settling.settle([first, second], shapes, None, [from_universal_info(info)])
    assert found.patterns[second] == ShardH()
    assert (found.patterns.get(first) == ShardV()) == settles
    assert (first in found.open) != settles
