"""The topology that is asked for: reading it, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_ucp.errors import ConfigError
from deepspeed_ucp.forecast.degrees import Degrees, parse_degrees
from deepspeed_ucp.topology import Topology

SOURCE = Topology(1, "bf16", "bfloat16", dp=4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp=3", Degrees(3, zero=1, wrapper="bf16", precision="bfloat16")),
        ("dp=3,tp=2,pp=1,zero=3", Degrees(3, 2, zero=3, wrapper="zero3", precision="bfloat16")),
        (" dp=2, sp = 4,zero=2 ", Degrees(2, sp=4, zero=2, wrapper="zero12", precision="bfloat16")),
        ("dp=2,zero=0,pp=2", Degrees(2, pp=2, wrapper="bf16", precision="bfloat16")),
        ("dp=2,zero=0,precision=fp32", Degrees(2)),
        ("dp=2,zero=0,precision=fp16", Degrees(2, wrapper="fp16_fused", precision="float16")),
        ("dp=2,zero=1,wrapper=zero12", Degrees(2, zero=1, wrapper="zero12", precision="bfloat16")),
        ("dp=4,ep=2,data_first=1", Degrees(4, zero=1, wrapper="bf16", precision="bfloat16", ep=(2,), data_first=True)),
        ("dp=4,ep=2.4,max_group=9", Degrees(4, zero=1, wrapper="bf16", precision="bfloat16", ep=(2, 4), max_group=9)),
        ("dp=2,zero=3,sub_group=5,ep=1", Degrees(2, zero=3, wrapper="zero3", precision="bfloat16", sub_group=5)),
    ],
)
def test_degrees_are_read_from_a_line(text: str, expected: Degrees) -> None:
    assert parse_degrees(text, SOURCE) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dp=3,xp=2", "'xp=2'"),
        ("dp=3,dp=2", "each once"),
        ("dp=3,presicion=bf16", "Did you mean 'precision'?"),
        ("dp=2,wrapper=zero-3", "Did you mean 'zero3'?"),
        ("dp", "'dp'"),
        ("dp=0", "dp is a positive integer, found '0'"),
        ("dp=2,ep=2.", "ep is a positive integer, found ''"),
        ("dp=2,data_first=yes", "data_first is 0 or 1, found 'yes'"),
        ("dp=2,zero=4", "zero is 0 to 3, found '4'"),
        ("tp=2", "dp is missing"),
        ("dp=2,precision=int8", "precision 'int8' cannot be planned"),
        ("dp=99999999999", "at most 1,048,576 ranks, found 99,999,999,999"),
        ("dp=1024,tp=1024,pp=2", "at most 1,048,576 ranks"),
        ("dp=2,wrapper=apex", "wrapper 'apex' is unknown"),
        ("dp=2,zero=2,wrapper=zero3", "wrapper zero3 is for ZeRO 3"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_degrees(text, SOURCE)
    assert told in str(error.value)


def test_a_checkpoint_in_a_precision_that_is_not_planned_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the checkpoint's precision 'float64' cannot be planned"):
        parse_degrees("dp=2", replace(SOURCE, precision="float64"))
    assert parse_degrees("dp=2,precision=fp32", replace(SOURCE, precision="float64")).precision == "float32"


def test_the_number_of_ranks_tells_dp() -> None:
    assert parse_degrees("tp=2,pp=3,zero=1", SOURCE, world=48).dp == 8
    with pytest.raises(ConfigError, match="50 ranks are not tp=2 × pp=3 × sp=1 × a whole dp"):
        parse_degrees("tp=2,pp=3", SOURCE, world=50)
    with pytest.raises(ConfigError, match="48 ranks are not dp=4 × tp=2"):
        parse_degrees("dp=4,tp=2", SOURCE, world=48)


@pytest.mark.parametrize(
    ("text", "told"),
    [("dp=1,pp=2,zero=2", "incompatible with pipeline"), ("dp=2,edp=2", "expert data"), ("dp=2,cp=2", "context")],
)
def test_what_deepspeed_or_this_package_does_not_do_is_refused(text: str, told: str) -> None:
    (refused,) = parse_degrees(text, SOURCE).refused
    assert told in refused


def test_sequence_parallel_ranks_are_partitioned_over_too() -> None:
    degrees = parse_degrees("dp=2,sp=4,zero=3", SOURCE)
    assert (degrees.world, degrees.shards, degrees.topology(SOURCE).dp) == (8, 8, 8)
