"""Rules of users: valid forms, matching, the precedence of rule sets, and rules for another number of rows."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.tensor_parallel import settle as settling
from deepspeed_ucp.tensor_parallel.kinds import Partial, Replicate, SameShards, ShardH, ShardHy, ShardNC, ShardV, Unique
from deepspeed_ucp.tensor_parallel.layout import Layout, Run, copy_runs, whole
from deepspeed_ucp.tensor_parallel.metadata import Mapped, from_universal_info, generalise
from deepspeed_ucp.tensor_parallel.recorded import from_recorded, record_pattern
from deepspeed_ucp.tensor_parallel.rename import find_idle, parse_renames, rename_names
from deepspeed_ucp.tensor_parallel.resize import Resize, Resized, advise_resize
from deepspeed_ucp.tensor_parallel.rules import from_attributes, from_config, load_family

from . import models
from .shards import settle

SOURCE = {"1.a.weight": ((4, 6), (4, 6)), "2.a.weight": ((4, 6), (4, 6)), "norm.weight": ((6,), (6,))}
TARGET = {"1.a.weight": ((8, 6),), "2.a.weight": ((8, 6),), "norm.weight": ((6,),)}
V = {"match": r"\d+\.a\.weight", "pattern": "shard-v"}
N = {"match": r"norm\.weight", "pattern": "replicate"}


def run(*sets, source=SOURCE, target=TARGET, hints=None):
    return settle(list(source), source, target, [rule_set for each in sets for rule_set in each], hints)


@pytest.mark.parametrize("value", [[V, N], {"rules": [V, N]}, "rules.yaml", "rules.yml", "rules.json"])
def test_rules_are_read_from_the_configuration_or_a_file(tmp_path, value):
    origin = "the user's rules"
    if isinstance(value, str):
        (tmp_path / value).write_text(json.dumps({"rules": [V, N]}))
        value = str(tmp_path / value)
        origin = f"the rules in {value}"
    settled = run(from_config(value))
    assert settled.patterns == {"1.a.weight": ShardV(), "2.a.weight": ShardV(), "norm.weight": Replicate()}
    assert set(settled.origin.values()) == {origin}
    assert settled.layouts["1.a.weight"][1].shape == (8, 6)


@pytest.mark.parametrize(
    ("spec", "shapes", "pattern"),
    [
        ({"pattern": "partial"}, [(6,), (6,)], Partial()),
        ({"pattern": "shard-h"}, [(2, 3), (2, 3)], ShardH(dim=1)),
        ({"pattern": "shard-h", "dim": 0}, [(2, 3), (2, 3)], ShardV()),
        ({"pattern": "shard-h", "dim": 2}, [(2, 3, 1), (2, 3, 2)], ShardH(dim=2)),
        ({"pattern": "shard-v", "unit": 2}, [(2, 3), (4, 3)], ShardV(unit=2)),
        ({"pattern": "shard-hy", "grid": [2, 2]}, [(2, 3)] * 4, ShardHy(grid=(2, 2))),
        ({"pattern": "shard-nc", "parts": [1, 1]}, [(4,), (2,)], ShardNC(parts=(1, 1))),
        ({"pattern": "shard-nc", "parts": [4, "rest", "rest"]}, [(4,), (4,)], ShardNC(parts=(4, 2, 2), sized=True)),
        ({"pattern": "shard-nc", "parts": ["n", "2 * n"]}, [(6,), (6,)], ShardNC(parts=(4, 8), sized=True)),
        ({"pattern": "shard-nc", "blocks": "n", "dim": 1}, [(1, 8), (1, 4)], ShardNC(blocks=4, dim=1)),
        (
            {"pattern": "shard-nc", "parts": [4, 2], "widths": [[3, 1], [1, 1]]},
            [(4,), (2,)],
            ShardNC(parts=(4, 2), sized=True, widths=((3, 1), (1, 1))),
        ),
    ],
    ids=str,
)
def test_a_rule_can_specify_every_pattern(spec, shapes, pattern):
    rules = from_config({"rules": [{"match": "w", **spec}], "variables": {"n": 4}})
    assert settle(["w"], {"w": tuple(shapes)}, None, rules).patterns["w"] == pattern


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "A family, a path, a list of rules"),
        ("missing.yaml", "missing.yaml cannot be read"),
        ("megatron", "there is no family 'megatron'. Did you mean 'megatron-gpt'"),
        ("mine", "there is no family 'mine'. Families: bloom"),
        ({"rule": []}, r"rule: unknown key\. Did you mean 'rules'"),
        ({"polygon": []}, r"polygon: unknown key\. .*family.*rename.*rules"),
        ({"rules": {}}, "rules: Input should be a valid tuple"),
        ({"variables": 3}, "variables: Input should be a valid dictionary"),
        ({"original_vocab_size": "many"}, "original_vocab_size is a positive integer"),
        ({"original_vocab_size": 0}, "original_vocab_size is a positive integer"),
        ({"original_vocab_size": True}, "original_vocab_size is a positive integer"),
        ([{"match": "a", "pattern": "unique", "polygon": 3}], "rules.0.polygon: unknown key"),
        ([{"match": "a", "patern": "unique"}], "rules.0.patern: .*Did you mean 'pattern'"),
        ([{"match": "a", "pattern": "shard_v"}], "'shard_v'.*Did you mean 'shard-v'"),
        ({"refuse": [{"when": "1"}]}, "refuse is a list of objects with when and reason"),
        ([{"match": "a"}], "rules.0.pattern: Field required"),
        ([{"match": "a", "pattern": "shard-nc", "parts": 3}], "rules.0.parts: Input should be a valid tuple"),
        ([{"match": "a", "pattern": "shard-h", "dim": "rows"}], "rules.0.dim: Input should be a valid integer"),
        ([{"match": "a", "pattern": "rows"}], "rules.0.pattern: Input should be 'unique', 'replicate', .*'rows'"),
        ([{"match": "a", "pattern": "shard-v", "dim": 1}], "shard-v has no 'dim'. Did you mean 'dims'"),
        ([{"match": "a", "pattern": "shard-v", "grid": [2]}], "shard-v has no 'grid'. Valid: dims, match"),
        ([{"match": "(", "pattern": "shard-v"}], "is not a regular expression"),
        ([{"match": "a", "pattern": "shard-hy"}], "needs a grid"),
        ({"resize": [{"match": "("}]}, "is not a regular expression"),
        ({"resize": [{"match": "w", "dim": 1}]}, "resize.0.dim: unknown key"),
        ({"resize": [{"match": "w", "keep": 0}]}, "keep is a number of rows from 1 on"),
        ({"resize": [{"match": "w", "new": "random"}]}, "resize.0.new: .*live"),
        ({"rename": 5}, "rename: a list"),
        ({"rename": [{"from": "a"}]}, 'rename: {"from": REGEX, "to": NAME} is needed'),
    ],
    ids=str,
)
def test_invalid_rules_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        from_config(value)


def test_a_rules_file_that_is_not_yaml_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("rules: [")
    with pytest.raises(ConfigError, match="a.yaml is not YAML"):
        from_config(str(tmp_path / "a.yaml"))


def use(expression, key="blocks", pattern="shard-nc"):
    """Make a rule for norm.weight with an expression."""
    return [V, {"match": r"norm\.weight", "pattern": pattern, key: expression}]


CUT_NORM = {**TARGET, "norm.weight": ((12,),)}
FROM_1, FROM_0 = "a size is an integer from 1 on", "a size is an integer from 0 on"


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        (use("1 +"), ConfigError, "is not an expression"),
        (use("__import__('os')"), ConfigError, "unknown function '__import__'"),
        (use("(1, 2)[0]"), ConfigError, "is not supported"),
        (use("own.shape"), ConfigError, "is not supported"),
        (use("[2][3]"), MismatchError, "has 1 items and no item 3; the first is item 0"),
        (use("own('rows')"), ConfigError, "own in .* has arguments of a wrong type"),
        (use("shape(1, 0)"), ConfigError, "shape in .* has arguments of a wrong type"),
        (use(["args.q", "rest"], "parts"), MismatchError, "norm.weight: the rule .* needs args.q, .*; write n"),
        (use(0), MismatchError, f"norm.weight: the rule .*: 0 is 0, {FROM_1}"),
        (use("args.impl"), MismatchError, f"'args.impl' is 'local', {FROM_1}"),
        (use([-1, 1], "grid", "shard-hy"), MismatchError, f"-1 is -1, {FROM_1}"),
        (use([-1, "rest"], "parts"), MismatchError, f"-1 is -1, {FROM_0}"),
        (use([[3, 3], [3, 3]], "widths"), MismatchError, r"widths .* are not those of parts \[1\]:"),
        (use([[6, 6], [0]], "widths"), MismatchError, "are not those of parts"),
        (use([], "widths"), MismatchError, "are not those of parts"),
        (
            [V, {**N, "pattern": "shard-nc", "parts": [1, 1], "widths": [[4, 4], [2, 2]]}],
            MismatchError,
            r"widths .* are not those of parts \[1, 1\]",
        ),
        (use("args.impl * 2"), MismatchError, r"'args.impl \* 2' with 'local' and 2: text is no number"),
        (use(0, "unit", "shard-v"), MismatchError, f"0 is 0, {FROM_1}"),
    ],
)
def test_expressions_without_a_usable_value_are_refused(rules, error, words):
    with pytest.raises(error, match=words):
        run(from_config(rules), target=CUT_NORM, hints={"args": {"impl": "local"}})


A1, A2, NORM, EMBED, DENSE = "1.a.weight", "2.a.weight", "norm.weight", "embed.weight", "2.self_attention.dense.weight"
TABLE = {"rules": [{"match": r"embed\.weight", "pattern": "shard-v", "vocab": True}]}
INLINE = {"family": "megatron-gpt", "rules": [{"match": ".*dense.*", "pattern": "shard-v"}]}
NAMES = ("w", "7.w", "7.8.w")
V_W = [{"match": "w", "pattern": "shard-v"}]
MARKED_LIVE = [from_universal_info({"vocabulary_parameter_patterns": ["w"]}, source="target")]

SETTLED = {
    "a prefix is optional": (
        [from_config({"prefix": r"(?:\d+\.)*", "rules": [{"match": "w", "pattern": "shard-v"}]})],
        dict.fromkeys(NAMES, ((4,), (4,))),
        dict.fromkeys(NAMES, ((8,),)),
        dict.fromkeys(NAMES, (ShardV(), "the user's rules")),
    ),
    "rules before their family": (
        [from_config(INLINE)],
        {DENSE: ((8, 4), (8, 4))},
        {DENSE: ((16, 4),)},
        {DENSE: (ShardV(), "the user's rules")},
    ),
    "two rules that agree": (
        [from_config([V, {"match": r"1\..*", "pattern": "shard-v"}, N])],
        SOURCE,
        TARGET,
        {A1: (ShardV(), "the user's rules")},
    ),
    "shapes prove a replica": ([from_config([V])], SOURCE, TARGET, {NORM: (Replicate(), "the shapes")}),
    "the same shards": ([], SOURCE, SOURCE, {A1: (SameShards(), "the same shards")}),
    "the same shards of different dimensions": (
        [MARKED_LIVE],
        {"w": ((4, 1), (4,))},
        {"w": ((4, 1), (4,))},
        {"w": (SameShards(), "the same shards")},
    ),
    "the same tensors": ([], TARGET, TARGET, {A1: (Unique(), "the same shards")}),
    "another padding without tensor parallelism": (
        [from_config({**TABLE, "original_vocab_size": 10})],
        {EMBED: ((12, 2),)},
        {EMBED: ((16, 2),)},
        {EMBED: (Unique(vocab=10), "the user's rules")},
    ),
}


@pytest.mark.parametrize("case", SETTLED)
def test_rules_give_all_parameters_a_pattern(case):
    sets, source, target, expected = SETTLED[case]
    settled = run(*sets, source=source, target=target)
    assert {name: (settled.patterns[name], settled.origin[name]) for name in expected} == expected


@pytest.mark.parametrize(
    ("rules", "source", "target", "words"),
    [
        ([{**V, "match": r"\d\.a"}], SOURCE, TARGET, "is not known"),
        ([{**V, "match": r"a\.weight"}], SOURCE, TARGET, "is not known"),
        ([{**V, "match": r"1\.a\.weigh"}], SOURCE, TARGET, "is not known"),
        ([V, {**N, "match": r"1\..*"}, N], SOURCE, TARGET, "two rules of the user's rules .*ShardV.*Replicate"),
        ([{**V, "pattern": "shard-h"}, N], SOURCE, TARGET, r"\{1-2\}.a.weight: logical shape \(4, 12\) in the"),
        ([], TARGET, {**TARGET, NORM: ((7,),)}, r"norm.weight: shape \(6,\) in the checkpoint, \(7,\) in the model\."),
        (V_W, {"w": ((4, 1), (4,))}, {"w": ((8, 1),)}, "w: the ranks' shapes have different numbers of dimensions"),
        (
            V_W,
            {"w": ((6, 4),) * 2},
            {"w": ((6, 4),) * 3},
            r"\(12, 4\) in the checkpoint, \(18, 4\) in .*original_vocab_size",
        ),
        ([], {EMBED: ((128, 2),)}, {EMBED: ((128, 2), (128, 2))}, "embed.weight"),  # padding may make shapes equal
        (TABLE, {EMBED: ((12, 2),)}, {EMBED: ((16, 2),)}, r'\(12, 2\).*"vocab": true, and original_vocab_size'),
    ],
)
def test_rules_that_contradict_or_omit_a_parameter_are_refused(rules, source, target, words):
    with pytest.raises(MismatchError, match=words):
        run(from_config(rules), source=source, target=target)


def test_rules_without_a_match_are_reported():
    idle = {"match": r"b\.weight", "pattern": "shard-v"}
    assert run(from_config([V, N, idle])).unused == [r"the user's rules: 'b\\.weight' matches no parameter"]
    other = from_config({"rules": [V, N], "family": "bloom"})
    assert run(other).unused == ["family bloom: no rule matches any parameter"]


def test_parameters_without_a_pattern_are_listed_with_example_rules():
    shapes = {
        "embed.weight": ((4, 2), (8, 2)),
        "1.qkv.weight": ((6, 2), (12, 2)),
        "1.mlp.dense_h_to_4h.weight": ((8, 2), (16, 2)),
        "1.out.weight": ((3, 4), (3, 8)),
    }
    source = {**SOURCE, **{name: (local,) * 2 for name, (local, _) in shapes.items()}, "1.odd": ((2, 2, 2), (3, 2, 2))}
    target = {**TARGET, **{name: (full,) for name, (_, full) in shapes.items()}, "1.odd": ((20,),)}
    with pytest.raises(MismatchError) as caught:
        run(from_config([]), source=source, target=target)
    text = str(caught.value)
    assert "How tensor parallelism cuts the following is not known (7 parameters)" in text
    assert "{1-2}.a.weight: (4, 6) on 2 ranks in the checkpoint, (8, 6) on 1 rank in the model" in text
    assert "1.odd: (2, 2, 2) and (3, 2, 2) on 2 ranks in the checkpoint" in text
    assert "norm.weight" not in text
    rules = text.partition("Rules to check and paste: ")[2]
    suggested = {rule["match"]: rule for rule in json.loads(rules)}
    assert suggested[r"\d+\.a\.weight"] == V
    assert suggested[r"embed\.weight"] == {"match": r"embed\.weight", "pattern": "shard-v", "vocab": True}
    assert suggested[r"\d+\.out\.weight"] == {"match": r"\d+\.out\.weight", "pattern": "shard-h", "dim": 1}
    for open_choice in (r"\d+\.qkv\.weight", r"\d+\.mlp\.dense_h_to_4h\.weight", r"\d+\.odd"):
        assert suggested[open_choice]["pattern"].startswith("<")


GATES, EXPERTS = "whether gate and up are fused", "whether it joins experts that are cut one by one"
ATTENTION = "per-rank [q; k; v] and interleaved per head group have the same shapes"
QKV = "1.self_attention.query_key_value.weight"
PLAIN = ("up_proj.weight", "gate_proj.weight", "w1.weight", "experts.0.w1.weight", "shared_experts.w1.weight")


@pytest.mark.parametrize(
    ("name", "marks", "dims", "expected"),
    [
        ("w", {"tensor_model_parallel": False, "partition_dim": -1}, 2, Replicate()),
        ("w", {"partition_dim": 0, "partition_stride": 1}, 2, ShardV()),
        ("w", {"partition_dim": 1, "partition_stride": 1}, 2, ShardH(dim=1)),
        ("w", {"partition_dim": 0, "partition_stride": 2}, 2, ShardNC(parts=(1, 1))),
        ("w", {"partition_dim": 0, "partition_sizes": [4, 1, 1]}, 2, ShardNC(parts=(4, 1, 1))),
        ("w", {"partition_dim": -1}, 2, ""),
        ("w", {"tensor_model_parallel": None}, 2, ""),
        ("1.mlp.gate_up_proj.weight", {"partition_dim": 0}, 2, GATES),
        ("1.mlp.gate_up_proj.weight", {"partition_dim": 0, "partition_stride": 2}, 2, ShardNC(parts=(1, 1))),
        ("1.mlp.w13", {"partition_dim": 0}, 2, GATES),
        ("1.experts.gate_up", {"partition_dim": 1}, 2, GATES),
        ("1.mlp.experts.weight1", {"partition_dim": 0}, 2, EXPERTS),
        ("1.mlp.experts.weight1", {"partition_dim": 0, "partition_stride": 3}, 2, ShardNC(parts=(1, 1, 1))),
        ("1.mlp.experts.weight1", {"partition_dim": 1}, 2, EXPERTS),  # [in, experts × out]
        ("1.mlp.experts.mlp.w1", {"partition_dim": 0}, 2, EXPERTS),
        ("1.mlp.experts.weight2", {"partition_dim": 0}, 2, EXPERTS),
        ("1.mlp.experts.weight2", {"partition_dim": 1}, 2, ShardH(dim=1)),  # [experts × in, out]
        ("1.mlp.experts.w1", {"partition_dim": 1}, 3, ShardH(dim=1)),
        (QKV, {"partition_dim": 0}, 2, ATTENTION),
        (QKV, {"partition_dim": 0, "partition_stride": 3}, 2, ShardNC(parts=(1, 1, 1))),
        ("aggregate_update", {"partition_dim": 0}, 2, ShardV()),
        *((f"1.mlp.{name}", {"partition_dim": 0}, 2, ShardV()) for name in PLAIN),
        *((f"1.mlp.{name}", {"partition_dim": 1}, 2, ShardH(dim=1)) for name in PLAIN),
    ],
    ids=str,
)
def test_attributes_of_parameters_give_patterns_or_a_hint(name, marks, dims, expected):
    rules = from_attributes({name: {"tensor_model_parallel": True, **marks}})
    settled = settling.settle([name], {name: ((6,) * dims,) * 2}, None, [rules])
    if isinstance(expected, str):
        assert expected in settled.open[name].text and not settled.patterns
    else:
        assert (settled.patterns, settled.open) == ({name: expected}, {})


def test_attributes_give_no_pattern_to_fused_gates():
    """Megatron's stride is 1 for fused and for plain first matrices."""
    first, second = (f"1.mlp.{name}.weight" for name in ("dense_h_to_4h", "dense_4h_to_h"))
    rules = from_attributes({first: {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}})
    target = {first: ((8, 2),)}
    plain = {first: ((4, 2), (4, 2)), second: ((2, 4), (2, 4))}
    assert settle([first], plain, target, [rules]).patterns[first] == ShardV()
    gated = {**plain, second: ((2, 2), (2, 2))}
    with pytest.raises(MismatchError, match="whether gate and up are fused"):
        settle([first], gated, target, [rules])
    settled = settle([first], gated, target, [rules, load_family("megatron-gpt")])
    assert settled.patterns[first] == ShardNC(parts=(1, 1))


def test_a_family_gives_patterns_that_attributes_lack():
    rules = [
        from_attributes({QKV: {"tensor_model_parallel": True, "partition_dim": 0}}),
        load_family("megatron-gpt-interleaved"),
    ]
    hints = {"args": {"hidden_size": 4, "num_attention_heads": 2}}
    assert settle([QKV], {QKV: ((6, 2), (6, 2))}, None, rules, hints).patterns[QKV] == ShardV(unit=6)


ROWS = from_universal_info({"original_vocab_size": 11, "vocabulary_parameter_patterns": ["w"]})
TO_DEGREE = [
    ([{"match": "w", "pattern": "shard-h"}], ((4, 12),), 2, ((4, 6), (4, 6))),
    ([{"match": "w", "pattern": "shard-h"}], ((4, 4),) * 3, 2, ((4, 6), (4, 6))),
    ([{"match": "w", "pattern": "replicate"}], ((5,),) * 3, 2, ((5,), (5,))),
    (None, ((4, 4), (4, 3)), 2, ((4, 4), (4, 3))),  # an unchanged degree needs no rules
    (ROWS, ((6, 4), (6, 4)), 3, ((4, 4),) * 3),
]


@pytest.mark.parametrize(("rules", "source", "degree", "expected"), TO_DEGREE)
def test_rules_determine_the_shapes_of_a_target_degree(rules, source, degree, expected):
    sets, hints = [rules] if rules is ROWS else from_config(rules), {"args": {"make_vocab_size_divisible_by": 4}}
    assert settle(["w"], {"w": source}, None, sets, hints, degree=degree).layouts["w"][1].local_shapes == expected


def test_parameters_without_a_pattern_at_a_degree_are_listed_with_example_rules():
    words = r'not known \(2 parameters\): h.\{0-1\}.w: \(4, 4\) on 1 rank in the checkpoint.*"match": "h\\\\.\\\\d\+'
    with pytest.raises(MismatchError, match=words):
        settle(["h.0.w", "h.1.w"], {"h.0.w": ((4, 4),), "h.1.w": ((4, 4),)}, None, [], degree=2)


TO_PLAIN = [
    {"from": r"tied_modules\.embed\.(?P<rest>.*)", "to": "language_model.embedding.{rest}"},
    {"from": r"(?P<n>\d+)\.(?P<rest>\w+\..*)", "to": "language_model.encoder.layers.{n-2}.{rest}"},
    {"from": r"\d+\.(?P<rest>weight|bias)", "to": "language_model.encoder.final_layernorm.{rest}"},
]


def test_rename_rules_map_pipeline_names_to_plain_names():
    pipeline, plain = (models.make(names, models.GPT3_MEDIUM, 1) for names in (models.PIPELINE, models.PLAIN))
    there = rename_names(pipeline, parse_renames(TO_PLAIN))
    assert {new: pipeline[name] for name, new in there.items()} == plain


def test_rename_rules_without_a_match_are_reported():
    rules = parse_renames({"a": "b", r"x\.(?P<y>.*)": "{y}"})
    assert rename_names(["x.1", "c"], rules) == {"x.1": "1", "c": "c"}
    assert find_idle(["x.1", "c"], rules) == ["rename: 'a' matches no parameter"]


def test_rename_rules_are_read_with_other_rules():
    (rules,) = from_config({"rename": TO_PLAIN})
    assert rules.renames == parse_renames(TO_PLAIN)
    assert parse_renames(TO_PLAIN[0]) == rules.renames[:1]


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ({"from": r"\d\.w", "to": "w"}, MismatchError, "1.w and 2.w become w"),
        ({"from": r"\d\.w", "to": "{n}.w"}, ConfigError, "asks for n"),
        ({"from": r"(?P<n>\d)\.w", "to": "{n-2}.w"}, ConfigError, "'1', from 1.w: not a layer number"),
        ({"from": r"\d\.(?P<n>w)", "to": "{n+2}"}, ConfigError, "'w', from 1.w: not a layer number"),
        ({"from": "(", "to": "a"}, ConfigError, "is not a regular expression"),
        ({"from": "w", "to": ["a", "b"]}, ConfigError, _ONE_NAME := "It does not cut, join, copy or leave out"),
        ({"from": "w", "to": None}, ConfigError, _ONE_NAME),
        ({"from": None, "to": "a"}, ConfigError, _ONE_NAME),
        ({"from": "w", "to": "a", "part": "1/2"}, ConfigError, _ONE_NAME),
        ({"from": r"w\.{e // 2}", "to": "w.{e}"}, ConfigError, _ONE_NAME),
        ({"from": r"h\.{[0, 1, 3][n]}\..*", "to": "h.{n}"}, ConfigError, _ONE_NAME),
    ],
    ids=str,
)
def test_invalid_rename_rules_are_refused(rule: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rename_names(["1.w", "2.w"], parse_renames([rule]))


def test_rename_rules_that_yield_no_live_name_are_skipped() -> None:
    rules = parse_renames([{"from": "norm", "to": "6"}, {"from": "norm", "to": "14"}])
    assert rename_names(["norm"], rules) == {"norm": "6"}
    assert rename_names(["norm"], rules, {"14", "norm_of_another"}) == {"norm": "14"}
    assert rename_names(["norm"], rules, {"7"}) == {"norm": "norm"}


# -- another number of rows, and the rules that an error message suggests ---------------------------------------------


def test_resize_rules_match_names_with_the_prefix() -> None:
    (mine,) = from_config({"prefix": r"base\.", "resize": [{"match": "w"}]})
    assert mine.resizes[0].matches("base.w") and not mine.resizes[0].matches("w")


def test_kept_rows_of_one_rank() -> None:
    saved, live = whole((4, 2)), whole((6, 2))
    layout, resized = Resize("w").fit(saved, live)
    assert layout == saved and resized == Resized(4, 6, 4, "live")
    assert Resize("w").fit(saved, live, vocab=3)[1].kept == 3
    layout, resized = Resize("w", keep=3).fit(saved, live, vocab=2)
    assert (resized.kept, layout.claims) == (3, ((((0, 3),), ((0, 2),)),))
    assert copy_runs(layout, 0, live, 0, 0, 12) == (Run(0, 0, 6),)
    layout, resized = Resize("w", shrink=True).fit(live, saved)
    assert (resized.kept, resized.saved, resized.live) == (4, 6, 4)


@pytest.mark.parametrize(
    ("rule", "saved", "live", "words"),
    [
        (Resize("w"), whole((4, 2)), (6, 3), r"changes only rows; shape \(4, 2\) in the checkpoint, \(6, 3\)"),
        (Resize("w"), whole((4,)), (4, 2), "changes only rows"),
        (Resize("w"), whole((6, 2)), (4, 2), r'model has 4 of 6 rows; "shrink": true'),
        (Resize("w", keep=5), whole((6, 2)), (4, 2), "model has 4 of 5 rows"),
        (Resize("w"), ShardNC(blocks=2).join([(2, 2), (2, 2)]), (6, 2), "cannot be resized"),
        (Resize("w"), Partial().join([(4, 2), (4, 2)]), (6, 2), "cannot be resized"),
    ],
)
def test_shapes_beyond_resize_rules_are_refused(rule: Resize, saved: Layout, live: tuple[int, ...], words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        rule.fit(saved, whole(live))


PARTS = {"patterns": ["w"], "shape": (2, -1), "partition_dim": 0}
OF_PARTS = {"universal_checkpoint_version": 0.3, "parameter_with_sub_params": [PARTS]}
BLOCKS = ShardNC(parts=(4, 4), sized=True).join([(4, 2), (4, 2)])
sides = pytest.mark.parametrize(
    ("saved", "live"), [*product((((8, 2),), ((4, 2), (4, 2))), (((12, 2),), ((6, 2), (6, 2))))], ids=str
)
FUSED = {
    "rule": from_config([{"match": "w", "pattern": "shard-nc", "parts": [1, 1]}]),
    "rule with a negative dimension": from_config([{"match": "w", "pattern": "shard-nc", "dim": -2, "parts": [1, 1]}]),
    "sub-parameters": [from_universal_info(OF_PARTS)],
    "map": [from_recorded({"w": record_pattern(Mapped(BLOCKS, generalise(BLOCKS)))})],
}


@sides
@pytest.mark.parametrize("fused", FUSED)
def test_fused_parameters_cannot_be_resized(fused: str, saved: Any, live: Any) -> None:
    """New rows at the end would belong to the last part."""
    with pytest.raises(MismatchError, match="w is fused"):
        settle(["w"], {"w": saved}, {"w": live}, [*from_config({"resize": [{"match": "w"}]}), *FUSED[fused]])


def test_fused_parameters_without_a_pattern_cannot_be_resized() -> None:
    name, rules = "mlp.gate_up.weight", from_config({"resize": [{"match": ".*"}]})
    with pytest.raises(MismatchError, match=r"gate_up\.weight is fused"):
        settle([name], {name: ((8, 2),)}, {name: ((12, 2),)}, rules)


@sides
def test_a_vocabulary_in_parts_cannot_be_padded(saved: Any, live: Any) -> None:
    rule = {"match": "w", "pattern": "shard-nc", "parts": [1, 1], "vocab": True}
    listed = {"parameter_with_2_sub_params_cat_dim_0": ["w"], "vocabulary_parameter_patterns": ["w"]}
    for rules in (
        from_config({"rules": [rule], "original_vocab_size": 7}),
        [from_universal_info({**listed, "original_vocab_size": 7})],
    ):
        with pytest.raises(MismatchError, match=r"w: (?:shape \(8, 2\)|vocabulary of 8 rows) in the checkpoint"):
            settle(["w"], {"w": saved}, {"w": live}, rules)


def test_an_averaged_vocabulary_cannot_be_padded() -> None:
    """The replicas have no rows from which the mean of the padding could be computed."""
    info = {"parameter_to_average_patterns": ["w"], "vocabulary_parameter_patterns": ["w"], "original_vocab_size": 7}
    with pytest.raises(MismatchError, match="averaged over replicas, cannot differ"):
        settle(["w"], {"w": ((8, 2),) * 2}, {"w": ((12, 2),)}, [from_universal_info(info)])


@pytest.mark.parametrize(
    ("shapes", "rules"),
    [
        ({"embed.weight": ((4, 2), (6, 2)), "head.bias": ((4,), (6,))}, [{"match": r"embed\.weight|head\.bias"}]),
        ({"embed.weight": ((4, 2), (3, 2))}, [{"match": r"embed\.weight", "shrink": True}]),
        ({f"x.{n}.o": ((2, 4), (3, 4)) for n in range(9)}, [{"match": r"x\.\d+\.o"}]),
    ],
)
def test_suggested_resize_rules_make_the_shapes_fit(shapes: Any, rules: Any) -> None:
    patterns = {"resize": rules}
    assert f'"patterns": {json.dumps(patterns)} ' in advise_resize(shapes)
    (made,) = from_config(patterns)
    for name, (saved, live) in shapes.items():
        (rule,) = [rule for rule in made.resizes if rule.matches(name)]
        assert rule.fit(whole(saved), whole(live))[1].live == live[0]


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"w": ((4, 2), (6, 3))},
        {"w": ((4, 2), (4, 2, 1))},
        {"qkv.weight": ((12, 2), (24, 2))},
        {"a": ((1,), (2,)), "b": ((1, 1), (1, 2))},
    ],
)
def test_no_resize_rules_are_suggested_for_another_model(shapes: Any) -> None:
    assert advise_resize(shapes) == ""
