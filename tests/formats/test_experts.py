"""Files that contradict each other about the ranks of experts; `load/test_reshard_experts.py` has those that agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats.deepspeed.headers import count_filed
from deepspeed_ucp.formats.deepspeed.zero import GroupShare, deal_parameters

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


@pytest.mark.parametrize("count", [0, 3, 16])
def test_a_number_of_partitions_that_ranks_cannot_hold(count: int) -> None:
    save = make_save((4, count), [["dense"], [f"{LAYER}0.w"]], 4, tp=2, folded=True)
    with pytest.raises(CheckpointError, match=f"in {count} partitions"):
        deal(save, 0)


@pytest.mark.parametrize("experts", [1, 3])
def test_files_of_another_number_of_experts(experts: int) -> None:
    with pytest.raises(CheckpointError, match=f"but {experts} experts of the layer have files"):
        deal(make_save((4, 2), [["dense"], [f"{LAYER}0.w"]], experts), 0)


def test_a_name_alone_does_not_make_an_expert() -> None:
    (dealt,) = deal(make_save((4,), [[f"{LAYER}0.w"]], 0), 0)
    assert [list(part.ranks) for part in dealt] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("counts", "ranks"), [((4, 4), ((0, 1), (2, 3))), ((4, 1), ((0, 1), (2, 3))), ((4, 2), ((0, 1, 2), (3,)))]
)
def test_a_placement_that_does_not_fit_the_files(counts: tuple[int, ...], ranks: Any) -> None:
    save = make_save(counts, [["dense"], ["m.experts.w1"]], placements={"m.experts.": ranks})
    with pytest.raises(CheckpointError, match="m.experts.w1 of shape .2, 3. is spread over"):
        deal(save, 0)
