"""Virtual targets: what is asked for, stages, flat buffers, and who holds which elements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.patterns import Partial, Replicate, ShardH, ShardHy, ShardNC, ShardV, Unique
from deepspeed_ucp.patterns.spread import spread_shapes
from deepspeed_ucp.plan.degrees import Degrees, parse_degrees
from deepspeed_ucp.plan.geometry import accumulate_offsets, part_numel
from deepspeed_ucp.plan.split import balance, find_layer, split_stages
from deepspeed_ucp.plan.virtual import VirtualFlat, cut_sub_groups
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
        ("dp", "'dp'"),
        ("dp=0", "dp is a positive integer, found '0'"),
        ("dp=2,zero=4", "zero is 0 to 3, found '4'"),
        ("tp=2", "dp is missing"),
        ("dp=2,precision=int8", "precision 'int8' is unknown"),
        ("dp=2,wrapper=apex", "wrapper 'apex' is unknown"),
        ("dp=2,zero=2,wrapper=zero3", "wrapper zero3 is for ZeRO 3"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_degrees(text, SOURCE)
    assert told in str(error.value)


def test_the_number_of_ranks_tells_dp() -> None:
    assert parse_degrees("tp=2,pp=3,zero=1", SOURCE, world=48).dp == 8
    with pytest.raises(ConfigError, match="50 ranks are not tp=2 × pp=3 × sp=1 × a whole dp"):
        parse_degrees("tp=2,pp=3", SOURCE, world=50)
    with pytest.raises(ConfigError, match="48 ranks are not dp=4 × tp=2"):
        parse_degrees("dp=4,tp=2", SOURCE, world=48)


@pytest.mark.parametrize(
    ("text", "told"),
    [("dp=1,pp=2,zero=2", "incompatible with pipeline"), ("dp=2,ep=2", "expert parallelism"), ("dp=2,cp=2", "context")],
)
def test_what_deepspeed_or_this_package_does_not_do_is_refused(text: str, told: str) -> None:
    (refused,) = parse_degrees(text, SOURCE).refused
    assert told in refused


def test_sequence_parallel_ranks_are_partitioned_over_too() -> None:
    degrees = parse_degrees("dp=2,sp=4,zero=3", SOURCE)
    assert (degrees.world, degrees.shards, degrees.topology(SOURCE).dp) == (8, 8, 8)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("12.mlp.weight", 12), ("model.layers.3.w1", 3), ("h.0.1.x", 0), ("wte.weight", None), ("block7.w", None)],
)
def test_layers_are_told_by_the_first_number(name: str, layer: int | None) -> None:
    assert find_layer(name) == layer


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_stages_are_runs_of_which_the_largest_is_as_small_as_can_be(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    found = balance(sizes, parts)
    assert found == sorted(found)
    assert set(found) == set(range(parts))
    largest = max(sum(size for size, part in zip(sizes, found, strict=True) if part == each) for each in range(parts))
    assert largest == _best(tuple(sizes), parts)


def _best(sizes: tuple[int, ...], parts: int) -> int:
    if parts == 1:
        return sum(sizes)
    return min(max(sum(sizes[:at]), _best(sizes[at:], parts - 1)) for at in range(1, len(sizes) - parts + 2))


def test_tied_modules_are_at_both_ends_and_what_has_no_number_goes_to_the_nearer_one() -> None:
    names = ["tied_modules.embed.w", "first", "0.a", "1.a", "2.a", "last"]
    stages = split_stages(names, dict.fromkeys(names, 10), 3)
    assert stages == {names[0]: (0, 2), "first": (0,), "0.a": (0,), "1.a": (1,), "2.a": (2,), "last": (2,)}
    with pytest.raises(MismatchError, match="4 pipeline stages, but the parameters' names tell of 3 layers"):
        split_stages(names, dict.fromkeys(names, 10), 4)


FLATS = st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 7), st.booleans())


@given(FLATS)
def test_holders_of_elements_are_the_ranks_whose_cuts_have_them(drawn: tuple[list[int], int, bool]) -> None:
    numels, dp, by_parameter = drawn
    names = tuple(f"p{number}" for number in range(len(numels)))
    if by_parameter:
        parts = [part_numel(numel, dp) for numel in numels]
        flat = VirtualFlat(0, names, tuple(numels), tuple(accumulate_offsets(parts)), sum(parts), dp, True)
    else:
        partition = -(-sum(numels) // dp)
        flat = VirtualFlat(0, names, tuple(numels), tuple(accumulate_offsets(numels)), partition, dp)
    held = {
        (cut.name, cut.start + at): rank for rank in range(dp) for cut in flat.cuts(rank) for at in range(cut.numel)
    }
    assert len(held) == sum(numels)
    for place, numel in enumerate(numels):
        for rank, low, high in flat.find_holders(place, numel // 3, numel):
            assert all(held[names[place], element] == rank for element in range(low, high))
        covered = sum(high - low for _, low, high in flat.find_holders(place, numel // 3, numel))
        assert covered == numel - numel // 3


@pytest.mark.parametrize(
    ("size", "expected"), [(100, [(0, 4)]), (6, [(0, 2), (2, 4)]), (1, [(0, 1), (1, 2), (2, 3), (3, 4)])]
)
def test_sub_groups_end_with_the_parameter_that_reaches_their_size(size: int, expected: list[tuple[int, int]]) -> None:
    assert [(some.start, some.stop) for some in cut_sub_groups((7, 5, 8, 2), 2, size)] == expected


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
