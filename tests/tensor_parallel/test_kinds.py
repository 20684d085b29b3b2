"""Every pattern, degree and width: union(cut(x)) == x with each element once; wrong shapes are refused; records."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from deepspeed_ucp.tensor_parallel.layout import Layout, find_faults, whole
from deepspeed_ucp.tensor_parallel.metadata import Mapped, Viewed, generalise
from deepspeed_ucp.tensor_parallel.recorded import from_recorded, read_pattern, record_pattern
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.reshard import examples

from .shards import check_reshard, cut_array, draw_widths, settle

small = st.integers(1, 4)


def split(array, widths, dim):
    return np.split(array, np.cumsum(widths)[:-1], axis=dim)


@st.composite
def plain_cuts(draw):
    """Draw (pattern, array, numpy's shards) for Unique, Replicate, Partial, Shard-V, Shard-H."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape)).reshape(shape)
    ranks = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["unique", "replicate", "partial", "v", "h"]))
    if kind == "unique":
        return Unique(), array, [array]
    if kind in ("replicate", "partial"):
        return (Replicate() if kind == "replicate" else Partial()), array, [array] * ranks
    dim = 0 if kind == "v" else draw(st.integers(0, len(shape) - 1))
    pattern = ShardV() if kind == "v" else ShardH(dim=dim)
    return pattern, array, split(array, draw_widths(draw, shape[dim], ranks), dim)


@st.composite
def hybrid_cuts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)))
    grid = tuple(draw(st.integers(1, 3)) for _ in range(draw(st.integers(2, len(shape)))))
    array = np.arange(np.prod(shape)).reshape(shape)
    shards = [array]
    for dim, ranks in enumerate(grid):
        widths = draw_widths(draw, shape[dim], ranks)
        shards = [piece for shard in shards for piece in split(shard, widths, dim)]
    return ShardHy(grid=grid), array, shards


@st.composite
def block_cuts(draw):
    """Draw [blocks × parts, …] along a dimension; ranks cut every part in proportion or with separate widths."""
    ranks, blocks, others = draw(small), draw(small), tuple(draw(st.lists(small, max_size=2)))
    dim = draw(st.integers(0, len(others)))
    shares = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    given_widths = draw(st.booleans())
    base = [draw(st.integers(0, 3)) for _ in range(ranks)]
    base[0] += 1
    widths = [
        draw_widths(draw, share * sum(base), ranks) if given_widths else [share * b for b in base] for share in shares
    ]
    sizes = [sum(part) for part in widths]
    shape = (*others[:dim], blocks * sum(sizes), *others[dim:])
    array = np.arange(np.prod(shape)).reshape(shape)
    shards = [[] for _ in range(ranks)]
    for block in np.split(array, blocks, axis=dim):
        for part, part_widths in zip(split(block, sizes, dim), widths, strict=True):
            for rank, piece in enumerate(split(part, part_widths, dim)):
                shards[rank].append(piece)
    pattern = ShardNC(
        parts=tuple(sizes) if given_widths or draw(st.booleans()) else tuple(shares),
        dim=dim,
        blocks=blocks,
        widths=tuple(map(tuple, widths)) if given_widths else None,
    )
    return pattern, array, [np.concatenate(pieces, axis=dim) for pieces in shards]


cuts = st.one_of(plain_cuts(), hybrid_cuts(), block_cuts())


@given(cuts)
@examples(1000)
def test_the_shards_of_every_pattern_join_to_the_whole(case):
    pattern, array, shards = case
    layout = pattern.join([shard.shape for shard in shards])
    assert layout.shape == array.shape
    assert find_faults(layout) == []
    for got, expected in zip(cut_array(layout, array), shards, strict=True):
        np.testing.assert_array_equal(got, expected.reshape(-1))
    check_reshard(layout, shards, whole(array.shape), [array])
    check_reshard(whole(array.shape), [array], layout, shards)


def test_recorded_widths_apply_only_to_their_degree():
    """Three key/value heads on two ranks, [2, 1]; on three ranks the widths follow the shapes."""
    pattern = ShardNC(parts=(6, 3), sized=True, widths=((4, 2), (2, 1)))
    assert pattern.join([(6,), (3,)]).shards[1][0] == ((4, 6), (8, 9))
    assert pattern.join([(3,)] * 3).shards[1][0] == ((2, 4), (7, 8))
    with pytest.raises(MismatchError, match="do not sum to the shards' widths"):
        pattern.join([(5,), (4,)])


def test_uneven_parts_are_refused_if_they_may_be_whole_heads():
    """Ten query and five key/value heads of 4 rows on three ranks: [4, 3, 3] and [2, 2, 1] heads, or equal cuts."""
    shapes = [(32,), (28,), (20,)]
    with pytest.raises(MismatchError, match=r"in two ways .*\[\[16, 14, 10\], .*or \[\[16, 12, 12\], \[8, 8, 4\]"):
        ShardNC(parts=(40, 20, 20), sized=True).join(shapes)
    for widths, second in (
        (((16, 14, 10), (8, 7, 5), (8, 7, 5)), ((16, 30), (48, 55), (68, 75))),
        (((16, 12, 12), (8, 8, 4), (8, 8, 4)), ((16, 28), (48, 56), (68, 76))),
    ):
        assert ShardNC(parts=(40, 20, 20), sized=True, widths=widths).join(shapes).shards[1][0] == second
    with pytest.raises(MismatchError, match="not whole units of 4"):
        ShardNC(parts=(40, 20, 20), sized=True, unit=4).join(shapes)
    pairs = ShardNC(parts=(40, 20, 20), sized=True, unit=4).join([(32,), (32,), (16,)])  # whole groups of heads
    assert pairs.shards[2][0] == ((32, 40), (56, 60), (76, 80))
    assert ShardNC(parts=(10, 5, 5)).join([(8,), (8,), (4,)]).shards[2][0] == ((8, 10), (14, 15), (19, 20))


@pytest.mark.parametrize(
    ("pattern", "method", "args", "message"),
    [
        (Unique(), "join", [[(2,), (2,)]], "unique, but 2"),
        (Replicate(), "join", [[(2,), (3,)]], "shapes differ"),
        (Partial(), "join", [[(2,), (3,)]], "shapes differ"),
        (ShardH(dim=1), "join", [[(2, 4), (3, 4)]], "shard along dimension 1, but the shapes differ in 0"),
        (ShardV(), "join", [[(2, 4), (2, 5)]], "shard along dimension 0, but the shapes differ in 1"),
        (ShardH(dim=1), "join", [[(4,), (4,)]], "has 1 dimension$"),
        (ShardV(), "join", [[(4,), (4, 1)]], "different numbers of dimensions"),
        (ShardV(), "join", [[(), ()]], "has 0 dimensions"),
        (ShardV(unit=3), "join", [[(4,), (2,)]], "not whole units of 3"),
        (ShardV(vocab=9), "join", [[(4, 2), (4, 2)]], "fewer rows than the vocabulary"),
        (ShardHy(grid=(2, 2)), "join", [[(2, 2)] * 3], "does not fit 3 ranks"),
        (ShardHy(grid=(2, 2)), "join", [[(2, 2), (2, 2), (2, 2), (2, 3)]], "differ there"),
        (ShardNC(parts=(1, 1)), "join", [[(3,), (3,)]], "shares are not whole"),
        (ShardNC(parts=(4, 4), sized=True), "join", [[(3,), (3,)]], "sum to 8, dimension 0 has blocks of 6"),
        (ShardNC(blocks=4), "join", [[(6,), (6,)]], "does not divide into 4 blocks"),
        (ShardNC(parts=(2, 1), unit=2), "join", [[(3,), (3,)]], "not whole units of 2"),
        (ShardV(), "join", [[]], "no shards"),
        (ShardV(), "spread", [(10, 5), 4], "dimension 0: 10 does not divide into 4 equal parts"),
        (ShardNC(blocks=3), "spread", [(18, 5), 4], "dimension 0: 6 does not divide into 4 equal parts"),
        (ShardHy((2, 1)), "spread", [(4, 6), 4], r"grid \[2, 1\] does not fit 4 ranks"),
        (Unique(), "spread", [(8, 8), 4], "unique"),
    ],
)
def test_shapes_that_contradict_the_pattern_are_refused(pattern, method, args, message):
    with pytest.raises(MismatchError, match=message):
        getattr(pattern, method)(*args)


def test_a_partial_pattern_is_a_mean_only_of_several_ranks():
    assert Partial().join([(2,), (2,)]).mean and not Partial().join([(2,)]).mean


@pytest.mark.parametrize(
    ("pattern", "shape", "degree", "local"),
    [
        (ShardV(), (12, 5), 4, (3, 5)),
        (ShardH(), (5, 12), 3, (5, 4)),
        (ShardH(dim=2), (2, 3, 8), 2, (2, 3, 4)),
        (ShardHy((2, 2)), (4, 6), 4, (2, 3)),
        (ShardNC(parts=(1, 1), blocks=3), (36, 2), 2, (18, 2)),
        (Replicate(), (7,), 3, (7,)),
        (Partial(), (7,), 3, (7,)),
        (ShardV(vocab=11), (12, 4), 5, (3, 4)),
        (ShardV(vocab=11), (12, 4), 1, (12, 4)),
        (Viewed((-1, 6), 0, (8, 4, 4)), (16, 6), 4, (4, 6)),
    ],
)
def test_equal_parts_follow_from_the_pattern(pattern, shape, degree, local):
    assert pattern.spread(shape, degree) == (local,) * degree


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
    again = read_pattern(json.loads(json.dumps(record_pattern(pattern))))
    assert (again, hash(again)) == (pattern, hash(pattern))


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
    ids=str,
)
def test_malformed_recorded_patterns_are_refused(recorded: dict[str, object]) -> None:
    with pytest.raises(MismatchError, match="recorded pattern"):
        read_pattern(recorded)


def test_a_recorded_vocabulary_pattern_allows_another_padding() -> None:
    """This holds even if neither side is cut, and for the user's rule of a vocabulary without a size."""
    recorded = from_recorded({"word": record_pattern(ShardV(vocab=11))})
    rule = from_config([{"match": "word", "pattern": "shard-v", "vocab": True}])
    for shapes, rules in product((((12, 4),), ((8, 4), (8, 4))), ([recorded], [*rule, recorded])):
        settled = settle(["word"], {"word": ((18, 4),)}, {"word": shapes}, rules)
        have, want = settled.layouts["word"]
        assert (have.shape[0], want.shape[0]) == (18, sum(shape[0] for shape in shapes))


def test_whole_tensors_record_no_rules_and_unused_rules_are_not_reported() -> None:
    """A model may have fewer layers than the checkpoint in a lenient load."""
    rules = from_recorded({"w": record_pattern(Unique()), "v": record_pattern(SameShards())})
    assert not rules.literal
    with pytest.raises(MismatchError, match=r"How tensor parallelism cuts .* w: \(4, 4\) on 1 rank"):
        settle(["w"], {"w": ((4, 4),)}, {"w": ((2, 4), (2, 4))}, [rules])
    assert from_recorded({"w": record_pattern(ShardV())}).find_unused(["other"]) == []
