"""Names of a pipeline and of a plain module."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.tensor_parallel import find_idle, from_config, parse_renames, rename_names

from . import models

TO_PLAIN = [
    {"from": r"tied_modules\.embed\.(?P<rest>.*)", "to": "language_model.embedding.{rest}"},
    {"from": r"(?P<n>\d+)\.(?P<rest>\w+\..*)", "to": "language_model.encoder.layers.{n-2}.{rest}"},
    {"from": r"\d+\.(?P<rest>weight|bias)", "to": "language_model.encoder.final_layernorm.{rest}"},
]
TO_PIPELINE = [
    {"from": r"language_model\.embedding\.(?P<rest>.*)", "to": "tied_modules.embed.{rest}"},
    {"from": r"language_model\.encoder\.layers\.(?P<n>\d+)\.(?P<rest>.*)", "to": "{n+2}.{rest}"},
    {"from": r"language_model\.encoder\.final_layernorm\.(?P<rest>.*)", "to": "4.{rest}"},
]


def test_pipeline_and_plain_names():
    pipeline, plain = (make(models.GPT3_MEDIUM, 1) for make in (models.megatron_pipeline, models.megatron_plain))
    there = rename_names(pipeline, parse_renames(TO_PLAIN))
    assert sorted(there.values()) == sorted(plain)
    assert {name: pipeline[name] for name in pipeline} == {name: plain[new] for name, new in there.items()}
    back = rename_names(plain, parse_renames(TO_PIPELINE))
    assert {new: name for name, new in there.items()} == back


def test_rules_that_match_nothing_are_reported():
    rules = parse_renames({"a": "b", r"x\.(?P<y>.*)": "{y}"})
    assert rename_names(["x.1", "c"], rules) == {"x.1": "1", "c": "c"}
    assert find_idle(["x.1", "c"], rules) == ["rename: 'a' matches no parameter"]


def test_renames_come_with_the_rules():
    (rules,) = from_config({"rename": TO_PLAIN})
    assert rules.renames == parse_renames(TO_PLAIN)
    assert parse_renames(TO_PLAIN[0]) == rules.renames[:1]


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ([{"from": r"\d\.w", "to": "w"}], MismatchError, "1.w and 2.w become w"),
        ([{"from": r"\d\.w", "to": "{n}.w"}], ConfigError, "asks for n"),
        ([{"from": r"(?P<n>\d)\.w", "to": "{n-2}.w"}], ConfigError, "'1', from 1.w: not a layer number"),
        ([{"from": r"\d\.(?P<n>w)", "to": "{n+2}"}], ConfigError, "'w', from 1.w: not a layer number"),
        ([{"from": "(", "to": "a"}], ConfigError, "is not a regular expression"),
    ],
)
def test_invalid_renames(rules, error, message):
    with pytest.raises(error, match=message):
        rename_names(["1.w", "2.w"], parse_renames(rules))


@pytest.mark.parametrize(
    "rule",
    [
        {"from": "w", "to": ["a", "b"]},
        {"from": "w", "to": None},
        {"from": None, "to": "a"},
        {"from": "w", "to": "a", "part": "1/2"},
        {"from": "w", "to": "a", "into": "1/2"},
        {"from": r"w\.{e // 2}", "to": "w.{e}"},
        {"from": r"h\.{[0, 1, 3][n]}\..*", "to": "h.{n}"},
    ],
    ids=str,
)
def test_rules_that_cut_join_copy_or_leave_out_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="It does not cut, join, copy or leave out"):
        parse_renames([rule])


def test_rules_that_yield_no_live_name_are_skipped() -> None:
    rules = parse_renames([{"from": "norm", "to": "6"}, {"from": "norm", "to": "14"}])
    assert rename_names(["norm"], rules) == {"norm": "6"}
    assert rename_names(["norm"], rules, {"14", "norm_of_another"}) == {"norm": "14"}
    assert rename_names(["norm"], rules, {"7"}) == {"norm": "norm"}
