"""Local shapes at a degree that no live model tells of."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.patterns import (
    Partial,
    Replicate,
    RuleSet,
    ShardH,
    ShardHy,
    ShardNC,
    ShardV,
    Unique,
    from_config,
    from_universal_info,
)
from deepspeed_ucp.patterns.metadata import Viewed
from deepspeed_ucp.patterns.spread import spread_shapes
from tests.patterns.settling import settle


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
    ],
)
def test_equal_parts_follow_from_the_pattern(pattern, shape, degree, local) -> None:  # type: ignore[no-untyped-def]
    assert spread_shapes(pattern, shape, degree) == (local,) * degree


def test_megatron_pads_the_vocabulary_for_the_degree() -> None:
    assert spread_shapes(ShardV(vocab=50257), (50304, 8), 4, 128) == ((12672, 8),) * 4


@pytest.mark.parametrize(
    ("pattern", "shape", "told"),
    [
        (ShardV(), (10, 5), "dimension 0 of shape (10, 5) has no 4 equal parts"),
        (ShardNC(blocks=3), (18, 5), "of each of 3 blocks"),
        (ShardHy((2, 1)), (4, 6), "grid [2, 1] does not cut"),
        (Unique(), (8, 8), "unique"),
    ],
)
def test_parameters_without_equal_parts_are_told(pattern, shape, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MismatchError) as error:
        spread_shapes(pattern, shape, 4)
    assert told in str(error.value)


def test_sub_parameters_of_a_view_are_cut_where_they_fit() -> None:
    pattern = Viewed((-1, 6), 0, (8, 4, 4))
    assert spread_shapes(pattern, (16, 6), 4) == ((4, 6),) * 4


def settle_for(degree: int, source: dict[str, tuple[tuple[int, ...], ...]], *sets: RuleSet, **hints: Any) -> Any:
    return settle(sorted(source), source, None, sets, hints, degree=degree)


def test_a_target_of_which_only_the_degree_is_known_gets_its_shapes_from_the_rules() -> None:
    rules = from_config([{"match": "a", "pattern": "shard-h"}, {"match": "n", "pattern": "replicate"}])
    for source in ({"a": ((4, 12),), "n": ((5,),)}, {"a": ((4, 4),) * 3, "n": ((5,),) * 3}):
        have, want = settle_for(2, source, *rules).layouts["a"]
        assert (have.shape, want.local_shapes) == ((4, 12), ((4, 6), (4, 6)))
        assert settle_for(2, source, *rules).layouts["n"][1].local_shapes == ((5,), (5,))


def test_the_same_degree_needs_no_rules() -> None:
    found = settle_for(2, {"a": ((4, 4), (4, 3))})
    assert found.layouts["a"][1].local_shapes == ((4, 4), (4, 3))


def test_the_checkpoints_own_metadata_counts() -> None:
    info = {"original_vocab_size": 11, "vocabulary_parameter_patterns": ["word"]}
    source = {"word": ((6, 4), (6, 4))}
    found = settle_for(3, source, from_universal_info(info, 2), args={"make_vocab_size_divisible_by": 4})
    assert found.layouts["word"][1].local_shapes == ((4, 4),) * 3


def test_what_nothing_settles_is_listed_with_rules_to_paste() -> None:
    with pytest.raises(MismatchError) as error:
        settle_for(2, {"h.0.w": ((4, 4),), "h.1.w": ((4, 4),)})
    assert "not known (2 parameters): h.{0-1}.w: (4, 4) on 1 rank in the checkpoint" in str(error.value)
    assert '"match": "h\\\\.\\\\d+\\\\.w"' in str(error.value)
