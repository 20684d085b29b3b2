"""Patterns recorded as plain data are restored unchanged and apply to other topologies."""

from __future__ import annotations

import json

import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.tensor_parallel.kinds import (
    Partial,
    Pattern,
    Replicate,
    SameShards,
    ShardH,
    ShardHy,
    ShardNC,
    ShardV,
    Unique,
)
from deepspeed_ucp.tensor_parallel.layout import Layout
from deepspeed_ucp.tensor_parallel.metadata import Mapped, Viewed, generalise
from deepspeed_ucp.tensor_parallel.recorded import from_recorded, read_pattern, record_pattern
from tests.tensor_parallel.shards import settle

LAYOUT = ShardNC(parts=(4, 2), sized=True).join([(3, 5), (3, 5)])
OVERLAPPING = Layout((4,), (4,), ((((0, 3),),), (((2, 4),),)), ((3,), (2,)), claims=((((0, 3),),), (((3, 4),),)))

PATTERNS: list[Pattern] = [
    Unique(),
    Unique(vocab=7),
    Replicate(),
    Replicate(vocab=7),
    Partial(),
    ShardV(),
    ShardV(unit=4, vocab=11),
    ShardH(),
    ShardH(dim=2, unit=3),
    ShardHy(grid=(2, 2)),
    ShardNC(),
    ShardNC(parts=(24, 12, 12), sized=True, unit=4),
    ShardNC(parts=(1, 1), dim=1, blocks=3, vocab=5),
    ShardNC(parts=(10, 5), sized=True, widths=((6, 4), (3, 2))),
    SameShards(),
    Viewed((1, -1), 0, (8, 4), ((4, 4), (2, 2))),
    Viewed((3, -1, 4), 1, 3),
    Mapped(LAYOUT, generalise(LAYOUT)),
    Mapped(OVERLAPPING, vocab=3),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: str(pattern)[:60])
def test_every_recorded_pattern_is_restored_unchanged(pattern: Pattern) -> None:
    """JSON turns tuples into lists."""
    recorded = record_pattern(pattern)
    assert read_pattern(recorded) == pattern
    again = read_pattern(json.loads(json.dumps(recorded)))
    assert again == pattern
    assert hash(again) == hash(pattern)


@pytest.mark.parametrize(
    "recorded",
    [
        {},
        {"kind": "spiral"},
        {"kind": "shard-h", "angle": 3},
        {"kind": "mapped", "layout": {"shape": [1]}},
        {"kind": "shard-h", "dim": "rows"},
        {"kind": "shard-nc", "parts": 3},
        {"kind": "mapped", "layout": [], "general": {"kind": "spiral"}},
    ],
    ids=["nothing", "unknown", "field", "layout", "text", "number", "general"],
)
def test_malformed_recorded_patterns_are_refused(recorded: dict[str, object]) -> None:
    with pytest.raises(MismatchError, match="recorded pattern"):
        read_pattern(recorded)


def test_recorded_patterns_cut_whole_tensors() -> None:
    recorded = {
        "qkv": record_pattern(ShardNC(parts=(24, 12, 12), sized=True)),
        "row": record_pattern(ShardH()),
        "norm": record_pattern(Replicate()),
        "mean": record_pattern(Partial()),
        "grid": record_pattern(Viewed((2, -1), 1, 1)),
    }
    source = {"qkv": ((48, 5),), "row": ((5, 12),), "norm": ((7,),), "mean": ((7,),), "grid": ((2, 8),)}
    target = {
        "qkv": ((12, 5),) * 4,
        "row": ((5, 3),) * 4,
        "norm": ((7,),) * 4,
        "mean": ((7,),) * 4,
        "grid": ((2, 2),) * 4,
    }
    settled = settle(sorted(source), source, target, [from_recorded(recorded)])
    assert settled.origin == dict.fromkeys(source, "the atomic checkpoint's manifest")
    have, want = settled.layouts["qkv"]
    assert have.shape == want.shape == (48, 5)
    assert want.shards[1][0] == ((6, 12), (27, 30), (39, 42))
    assert settled.layouts["norm"][1].replicated
    assert not settled.layouts["mean"][0].mean


def test_a_recorded_vocabulary_pattern_allows_another_padding() -> None:
    """This holds even if neither side is cut."""
    recorded = {"word": record_pattern(ShardV(vocab=11))}
    for shapes in (((12, 4),), ((8, 4), (8, 4))):
        settled = settle(["word"], {"word": ((18, 4),)}, {"word": shapes}, [from_recorded(recorded)])
        have, want = settled.layouts["word"]
        assert (have.shape[0], want.shape[0]) == (18, sum(shape[0] for shape in shapes))


def test_whole_tensors_record_no_rules() -> None:
    rules = from_recorded({"w": record_pattern(Unique()), "v": record_pattern(SameShards())})
    assert not rules.literal
    with pytest.raises(MismatchError, match=r"How tensor parallelism cuts .* w: \(4, 4\) on 1 rank"):
        settle(["w"], {"w": ((4, 4),)}, {"w": ((2, 4), (2, 4))}, [rules])


def test_unused_recorded_patterns_are_not_reported() -> None:
    """A model may have fewer layers than the checkpoint in a lenient load."""
    assert from_recorded({"w": record_pattern(ShardV())}).find_unused(["other"]) == []
