"""Rules that cut rows out of parameters and join them: fused projections, held against numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.atoms import AtomicIndex, GroupInfo, ParamKey
from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.patterns import from_config
from deepspeed_ucp.plan.predicted import predict_renames
from deepspeed_ucp.plan.renames import RemappedIndex, apply_renames
from tests.plan.test_recast import STATES, carry_out, lay_shards, make_index, read
from tests.support.reshard import examples

FUSED = {"blocks": "args.groups", "parts": ["args.heads // args.groups", 1, 1]}
SPLIT = [{"from": "qkv", "to": name, "part": {**FUSED, "number": n}} for n, name in enumerate("qkv", 1)]
JOIN = [{"from": name, "to": "qkv", "into": {**FUSED, "number": n}} for n, name in enumerate("qkv", 1)]
THIRDS = {"parts": ["args.heads", "args.groups", "args.groups"]}
"""[q; k; v], as a rank of Megatron-DeepSpeed keeps them."""
TURN = [
    {"from": "qkv", "to": "query_key_value", "part": {**FUSED, "number": n}, "into": {**THIRDS, "number": n}}
    for n in (1, 2, 3)
]
BACK = [{"from": each["to"], "to": each["from"], "part": each["into"], "into": each["part"]} for each in TURN]


def turn(
    index: AtomicIndex, rename: Sequence[Any], live: Mapping[str, tuple[int, ...]], patterns: Any = None
) -> RemappedIndex:
    """The rules carried out; a forecast says the same."""
    rules = from_config({"rename": rename, **(patterns or {})})
    made = apply_renames(index, {name: (shape,) for name, shape in live.items()}, rules)
    foreseen = predict_renames(index, rules)
    assert (foreseen.made, foreseen.renamed) == (made.made, made.renamed)
    assert dict(foreseen.index.stored.atoms) == dict(made.index.stored.atoms)
    return made


@examples(60)
@given(
    groups=st.integers(1, 4), each=st.integers(1, 3), head=st.integers(1, 3), width=st.sampled_from([0, 1, 3]),
    tp=st.sampled_from([1, 2]), cut=st.integers(1, 9),
)  # fmt: skip
def test_fused_attention_is_split_and_joined(groups: int, each: int, head: int, width: int, tp: int, cut: int) -> None:
    """Of any heads, weights and biases: as numpy has it, and there and back again; also of tensor-parallel ranks."""
    tp = tp if groups % tp == 0 else 1
    args, rest = {"heads": groups * each, "groups": groups}, (width,) * (width > 0)
    sizes = {"q": groups * each * head, "k": groups * head, "v": groups * head}
    whole = (sum(sizes.values()), *rest)
    index, data = make_index({"qkv": (whole[0] // tp, *rest), "other": (2,)}, cut=cut, tp=tp, hints={"args": args})
    cuts = {"rules": [{"match": "qkv", "pattern": "shard-v"}, {"match": "[qkv]|query_key_value", "pattern": "shard-v"}]}
    before = {s: np.concatenate([read(index, data, "qkv", s, rank) for rank in range(tp)]) for s in STATES}
    split = turn(index, SPLIT, {**{name: (rows, *rest) for name, rows in sizes.items()}, "other": (2,)}, cuts).index
    for state in STATES:
        blocks = before[state].reshape(groups, each + 2, head, *rest)
        wanted = {"q": blocks[:, :each], "k": blocks[:, each : each + 1], "v": blocks[:, each + 1 :]}
        for name, tensor in wanted.items():
            assert np.array_equal(read(split, data, name, state), tensor.reshape(-1, *rest)), name
    live = {"qkv": whole, "other": (2,)}
    thirds = turn(index, TURN, {"query_key_value": whole, "other": (2,)}, cuts).index
    for back in (turn(split, JOIN, live).index, turn(thirds, BACK, live).index):
        assert all(np.array_equal(read(back, data, "qkv", state), before[state]) for state in STATES)
    for state in STATES:
        found = read(thirds, data, "query_key_value", state)
        assert np.array_equal(found, np.concatenate([read(split, data, name, state) for name in "qkv"]))


GATED = [{"from": "fc1", "to": name, "part": f"{n}/2"} for n, name in enumerate(("gate", "up"), 1)]
UNGATED = [{"from": name, "to": "fc1", "into": f"{n}/2"} for n, name in enumerate(("gate", "up"), 1)]


def test_gate_and_up_of_ranks_that_hold_a_share_of_each() -> None:
    """[gate_r; up_r]: the ranks' rows are put in order, whatever the cut of what they feed."""
    whole = np.arange(40).reshape(10, 4)
    shares = [{"fc1": np.concatenate([whole[3 * r : 3 * r + 3 - r], whole[5 + 3 * r : 8 + 2 * r]])} for r in (0, 1)]
    index, data = lay_shards(shares)
    sized = [{"match": "fc1", "pattern": "shard-nc", "parts": [1, 1]}]
    made = turn(index, GATED, {"gate": (5, 4), "up": (5, 4)}, {"rules": sized}).index
    assert np.array_equal(np.concatenate([read(made, data, name) for name in ("gate", "up")]), whole)
    with pytest.raises(MismatchError, match=r"How tensor parallelism cuts the following is not known .* fc1"):
        turn(index, GATED, {"gate": (5, 4), "up": (5, 4)})
    odd = {"rules": [{"match": "fc1", "pattern": "shard-h"}]}
    index, _ = lay_shards([{"fc1": whole[:, 2 * r : 2 * r + 2]} for r in (0, 1)])
    with pytest.raises(
        MismatchError, match=r"fc1 \(10, 2\): tensor parallelism has cut it otherwise than by whole rows"
    ):
        turn(index, GATED, {"gate": (5, 4), "up": (5, 4)}, odd)


def test_replicas_are_compared_after_all() -> None:
    index, data = lay_shards([{"fc1": np.arange(8).reshape(4, 2)} for _ in (0, 1)])
    whole = {"rules": [{"match": "fc1", "pattern": "replicate"}]}
    made = turn(index, GATED, {"gate": (2, 2), "up": (2, 2)}, whole).index
    assert np.array_equal(read(made, data, "up"), [[4, 5], [6, 7]])
    ((key, parts),) = [item for item in made.stored.repeated.items() if item[0].name == "up"]
    assert [(at, each.start, each.numel, each.offset) for at, each in parts] == [(0, 0, 4, 4 * 12)], key


def test_a_run_that_has_the_names_already_goes_on() -> None:
    made, (before, after) = carry_out({"gate": (2, 3), "up": (2, 3)}, {"gate": (2, 3), "up": (2, 3)}, GATED + UNGATED)
    assert not made.made and all(np.array_equal(after[key], before[key]) for key in before)


def test_groups_steps_and_biases_move_along() -> None:
    members = (ParamKey("a"), ParamKey("fc1"))
    made, _ = carry_out(
        {"a": (2,), "fc1": (4,)}, {"a": (2,), "gate": (2,), "up": (2,)}, GATED,
        groups=(GroupInfo(members, {"lr": 1.0}),), scalars={key: {"step": 4} for key in members},
    )  # fmt: skip
    assert made.index.run.groups[0].names == ("a", "gate", "up")
    assert set(made.index.run.scalars) == {ParamKey("a"), ParamKey("gate"), ParamKey("up")}
    apart = tuple(GroupInfo((each,), {"lr": 1.0}) for each in members)
    made, _ = carry_out({"a": (2,), "fc1": (4,)}, {"a": (2,), "gate": (2,), "up": (2,)}, GATED, groups=apart)
    assert [group.names for group in made.index.run.groups] == [("a",), ("gate", "up")]


QKV = {"qkv": (8, 2)}
NAMED = [{**each, "part": {"number": 1, "parts": [1], "blocks": "groups"}} for each in SPLIT]
GATES = {"gate": (2, 2), "up": (2, 2)}
LIVE = {"q": (4, 2), "k": (2, 2), "v": (2, 2)}


@pytest.mark.parametrize(
    ("saved", "live", "rules", "args", "words"),
    [
        (QKV, LIVE, SPLIT, {}, r"needs args.heads and args.groups, which .* not tell; write numbers"),
        (QKV, LIVE, NAMED, {}, r'needs groups, which .* tell; set "patterns": {"variables": {"groups": <number>}'),
        (QKV, LIVE, SPLIT, {"heads": 6, "groups": 3}, r"8 rows are not 3 blocks of parts \[2, 1, 1\]"),
        (QKV, LIVE, SPLIT, {"heads": 6, "groups": 1}, r"q \(4, 2\) cannot be made of qkv .* makes \(6, 2\)"),
        (QKV, {"q": (4, 2), "k": (2, 2)}, SPLIT, {"heads": 4, "groups": 2}, r"rows \[3, 4\) of qkv .* feed nothing"),
        (LIVE, QKV, JOIN, {"heads": 3, "groups": 1}, r"1 blocks of parts \[3, 1, 1\], and .* feed them \[4, 2, 2\]"),
        ({"q": (4, 2), "k": (2, 2)}, QKV, JOIN, {"heads": 4, "groups": 2}, "not each of its 3 parts is fed"),
        (GATES, {"fc1": (4, 2)}, [*UNGATED, {**UNGATED[0], "from": "up"}], {}, "both feed part 1"),
        (GATES, {"fc1": (4, 3)}, UNGATED, {}, r"fc1 \(4, 3\) cannot be made"),
        ({"fc1": (0, 2)}, {"gate": (0, 2), "up": (0, 2)}, GATED, {}, "0 rows are not 1 blocks"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit(
    saved: Mapping[str, Any], live: Mapping[str, Any], rules: list[Any], args: Mapping[str, int], words: str
) -> None:
    with pytest.raises(MismatchError, match=words):
        carry_out(saved, live, rules, hints={"args": args})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"from": "a", "to": "b", "part": {"number": 4, "parts": [1, 1, 1]}}, '"part" is such as'),
        ({"from": "a", "to": "b", "into": {"number": 1}}, '"into" is such as'),
        ({"from": "a", "to": "b", "into": {"number": 1, "parts": [1], "block": 2}}, '"into" is such as'),
        ({"from": "a", "to": None, "part": "1/2"}, 'need "from" and "to"'),
        ({"from": "a", "to": "b.{e}", "part": {"number": 1, "parts": [2, 1]}}, "of an expert"),
        ({"from": "a", "to": "b.{e}", "into": "1/2"}, "of an expert"),
    ],
)
def test_rules_that_are_none(rule: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_config({"rename": [rule]})


@pytest.mark.parametrize("blocks", ["0", "heads - 9", "1 == 1"])
def test_numbers_that_are_none(blocks: str) -> None:
    rule = {"from": "a", "to": "b", "part": {"number": 1, "parts": [1, 1], "blocks": blocks}}
    rules = from_config({"rename": [rule], "variables": {"heads": 4}})
    index, _ = make_index({"a": (4,)})
    with pytest.raises(ConfigError, match="parts and blocks are positive integers"):
        apply_renames(index, {"b": ((2,),)}, rules)


def test_templates_may_ask_for_variables() -> None:
    rules = from_config({"rename": {r"(?P<n>\d+)\.w": "{n + first}.w"}, "variables": {"first": 3}})
    assert apply_renames(make_index({"2.w": (3,)})[0], {"5.w": ((3,),)}, rules).renamed == {"5.w": "2.w"}
