"""Rules for parameters with another number of rows, and the rules that an error message suggests."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.tensor_parallel.kinds import Partial, ShardNC, ShardV
from deepspeed_ucp.tensor_parallel.layout import Layout, Run, copy_runs, whole
from deepspeed_ucp.tensor_parallel.metadata import Mapped, from_universal_info, generalise
from deepspeed_ucp.tensor_parallel.recorded import from_recorded, record_pattern
from deepspeed_ucp.tensor_parallel.resize import Resize, Resized, advise_resize
from deepspeed_ucp.tensor_parallel.rules import from_config

from .shards import settle


def test_resize_rules_match_names_with_the_prefix() -> None:
    (mine,) = from_config({"prefix": r"base\.", "resize": [{"match": "w"}]})
    assert mine.resizes[0].fits("base.w") and not mine.resizes[0].fits("w")


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
INFO = {"universal_checkpoint_version": 0.3, "parameter_with_sub_params": [PARTS]}
BLOCKS = ShardNC(parts=(4, 4), sized=True).join([(4, 2), (4, 2)])
sides = pytest.mark.parametrize(
    ("saved", "live"), [*product((((8, 2),), ((4, 2), (4, 2))), (((12, 2),), ((6, 2), (6, 2))))], ids=str
)
FUSED = {
    "rule": from_config([{"match": "w", "pattern": "shard-nc", "parts": [1, 1]}]),
    "rule with a negative dimension": from_config([{"match": "w", "pattern": "shard-nc", "dim": -2, "parts": [1, 1]}]),
    "sub-parameters": [from_universal_info(INFO)],
    "map": [from_recorded({"w": record_pattern(Mapped(BLOCKS, generalise(BLOCKS)))})],
}


@sides
@pytest.mark.parametrize("fused", FUSED)
def test_fused_parameters_cannot_be_resized(fused: str, saved: Any, live: Any) -> None:
    """New rows at the end would belong to the last part."""
    with pytest.raises(MismatchError, match="w is fused"):
        settle(["w"], {"w": saved}, {"w": live}, [*from_config({"resize": [{"match": "w"}]}), *FUSED[fused]])


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


def test_kept_rows_of_several_ranks() -> None:
    parts = ShardV().join([(2, 2), (2, 2)])
    layout, _ = Resize("w", keep=3).fit(parts, ShardV().join([(3, 2), (3, 2)]))
    assert layout.claims == ((((0, 2),), ((0, 2),)), (((2, 3),), ((0, 2),)))
    assert layout == replace(parts, claims=layout.claims)


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
        (rule,) = [rule for rule in made.resizes if rule.fits(name)]
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
