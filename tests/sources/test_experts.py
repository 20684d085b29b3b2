"""The assignment of experts to ranks by a save's files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.sources.headers import FileHeader, OptimHeader
from deepspeed_ucp.sources.pieces import count_filed
from deepspeed_ucp.sources.save import align_groups
from deepspeed_ucp.sources.zero import GroupShare, deal_parameters

LAYER = "body.deepspeed_moe.experts.deepspeed_experts."


def make_save(
    counts: tuple[int, ...],
    groups: list[list[str]],
    experts: int = 0,
    placements: dict[str, Any] | None = None,
    tp: int = 1,
    folded: bool = False,
) -> Any:
    """A save of four data-parallel ranks; the first one's model states name its parameters."""
    shard = SimpleNamespace(name="first", optim=SimpleNamespace(partition_count=counts))
    shapes = [[(name, (2, 3)) for name in group] for group in groups]
    model = SimpleNamespace(param_shapes=shapes, placements=placements or {})
    return SimpleNamespace(
        shards=[[shard] * 4] * tp,
        models=[[shard] * 4] * tp,
        path=lambda header: "model states",
        main=SimpleNamespace(config={}),
        experts={(0, e, 0): SimpleNamespace(layer={f"{LAYER}{e}.w": None}) for e in range(experts)},
        model=lambda mp: model,
        tp=tp,
        dp=4,
        experts_over_tp=folded,
    )


def deal(save: Any, mp: int) -> list[list[GroupShare]]:
    return deal_parameters(save, mp, count_filed(save.experts.values()))


@pytest.mark.parametrize("own", ["0", "1"])
def test_experts_are_counted_by_their_files_where_some_are_frozen(own: str) -> None:
    """Of the two experts that each of two expert-parallel ranks holds, one is in the optimizer."""
    _, dealt = deal(make_save((4, 2), [["dense"], [f"{LAYER}{own}.w"]], 4), 0)
    assert [list(part.shapes) for part in dealt] == [[f"{LAYER}{own}.w"], [f"{LAYER}{int(own) + 2}.w"]]
    assert [list(part.ranks) for part in dealt] == [[0, 2], [1, 3]]


def test_experts_that_are_spread_over_the_tensor_parallel_ranks_too() -> None:
    """Of eight ranks in a stage two hold each of four experts; dense parameters differ between lanes."""
    save = make_save((4, 2), [["dense"], [f"{LAYER}0.w"]], 4, tp=2, folded=True)
    (dense,), experts = deal(save, 1)
    assert list(dense.ranks) == [1, 3, 5, 7] and not dense.named
    assert [list(part.shapes) for part in experts] == [[f"{LAYER}{number}.w"] for number in range(4)]
    assert [list(part.ranks) for part in experts] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert all(part.over_tp and part.named for part in experts)


def test_experts_that_tensor_parallelism_cuts_are_a_lanes_own() -> None:
    save = make_save((4, 2), [["dense"], [f"{LAYER}0.w", f"{LAYER}1.w"]], 4, tp=2)
    _, experts = deal(save, 1)
    assert [list(part.shapes) for part in experts] == [[f"{LAYER}{2 * e}.w", f"{LAYER}{2 * e + 1}.w"] for e in (0, 1)]
    assert [list(part.ranks) for part in experts] == [[1, 5], [3, 7]]
    assert not any(part.over_tp for part in experts)


@pytest.mark.parametrize("count", [0, 3, 16])
def test_a_number_of_partitions_that_ranks_cannot_hold(count: int) -> None:
    save = make_save((4, count), [["dense"], [f"{LAYER}0.w"]], 4, tp=2, folded=True)
    with pytest.raises(CheckpointError, match=f"in {count} partitions"):
        deal(save, 0)


@pytest.mark.parametrize("experts", [1, 3])
def test_files_of_another_number_of_experts(experts: int) -> None:
    with pytest.raises(CheckpointError, match=f"but {experts} experts of the layer have files"):
        deal(make_save((4, 2), [["dense"], [f"{LAYER}0.w"]], experts), 0)


def test_without_such_files_a_name_alone_makes_no_expert() -> None:
    (dealt,) = deal(make_save((4,), [[f"{LAYER}0.w"]], 0), 0)
    assert [list(part.ranks) for part in dealt] == [[0, 1, 2, 3]]


def test_experts_that_lie_in_one_parameter_are_taken_apart() -> None:
    placements = {"m.experts.": ((3, 0), (1, 2))}
    (dense,), experts = deal(make_save((4, 2), [["dense"], ["m.experts.w1"]], placements=placements), 0)
    assert [part.shapes for part in experts] == [
        {"m.experts.w1.3": (3,), "m.experts.w1.0": (3,)},
        {"m.experts.w1.1": (3,), "m.experts.w1.2": (3,)},
    ]
    assert [list(part.ranks) for part in experts] == [[0, 2], [1, 3]]
    assert list(dense.ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("counts", "ranks"), [((4, 4), ((0, 1), (2, 3))), ((4, 1), ((0, 1), (2, 3))), ((4, 2), ((0, 1, 2), (3,)))]
)
def test_a_placement_that_does_not_fit_the_files(counts: tuple[int, ...], ranks: Any) -> None:
    save = make_save(counts, [["dense"], ["m.experts.w1"]], placements={"m.experts.": ranks})
    with pytest.raises(CheckpointError, match="m.experts.w1 of shape .2, 3. is spread over"):
        deal(save, 0)


def make_shard(counts: tuple[int, ...], names: str) -> FileHeader:
    masters: Any = tuple(names)
    groups = tuple({"name": name} for name in names)
    slices = tuple(((name, 0, 1),) for name in names)
    optim = OptimHeader(
        "zero12", 1, masters, (), (0, 1, 2, 3), groups, slices, counts, (1, 2, 3, 4), ((1,), (2,), (3,), (4,))
    )
    return FileHeader("shard", 1, optim=optim)


def test_groups_are_put_into_the_first_ranks_order() -> None:
    """Two dense groups, and groups of two degrees in another order on each rank."""
    first, other = make_shard((4, 4, 2, 1), "abcd"), make_shard((4, 4, 1, 2), "abdc")
    found = align_groups(other, first.optim).optim
    assert found is not None and first.optim is not None
    assert (found.masters, found.groups, found.slices) == (first.optim.masters, first.optim.groups, first.optim.slices)
    assert (found.partition_count, found.paddings) == ((4, 4, 2, 1), (1, 2, 4, 3))
    assert found.alignment == ((1,), (2,), (4,), (3,)) and found.tensors == ()


@pytest.mark.parametrize("counts", [(4, 4, 2, 1), (4, 2, 1)])
def test_groups_in_the_same_order_or_of_another_number_stay(counts: tuple[int, ...]) -> None:
    first, other = make_shard((4, 4, 2, 1), "abcd"), make_shard(counts, "abcd")
    assert align_groups(other, first.optim) is other
