"""Names of experts, and their distribution over ranks."""

from __future__ import annotations

from functools import partial

import pytest

from deepspeed_ucp.model.experts import (
    count_experts,
    cut_number,
    deal_experts,
    drop_fixed,
    find_expert,
    find_layer,
    is_expert,
    name_experts,
    place_experts,
)

LAYER = "body.3.deepspeed_moe.experts.deepspeed_experts."


def name_all(layers: int, experts: range, ends: tuple[str, ...] = ("w", "b")) -> list[str]:
    return [
        f"{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.{end}"
        for layer in range(layers)
        for expert in experts
        for end in ends
    ]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"{LAYER}12.fc.weight", (LAYER, 12)),
        ("deepspeed_moe.experts.deepspeed_experts.0.bias", ("deepspeed_moe.experts.deepspeed_experts.", 0)),
        (f"{LAYER}12fc.weight", None),
        (f"{LAYER}٣.fc.weight", None),
        (f"{LAYER}{'9' * 5000}.fc.weight", None),
        ("body.3.deepspeed_moe.gate.wg.weight", None),
        ("mydeepspeed_moe.experts.deepspeed_experts.1.w", None),
        (f"a.{LAYER}1.{LAYER}2.w", (f"a.{LAYER}1.{LAYER}", 2)),
    ],
)
def test_experts_are_found_by_name(name: str, found: tuple[str, int] | None) -> None:
    assert find_expert(name) == found


def test_numbers_in_the_whole_layer() -> None:
    assert cut_number(f"{LAYER}3.fc.w") == cut_number(f"{LAYER}0.fc.w") == (LAYER, ".fc.w")
    assert cut_number("dense") == ("dense", "")
    assert count_experts([f"{LAYER}0.w", f"{LAYER}2.w", "dense"]) == {LAYER: 3}
    assert name_experts(f"{LAYER}1.fc.w", (3, 2), {LAYER: range(6, 9)}) == {f"{LAYER}7.fc.w": (3, 2)}
    assert name_experts(f"{LAYER}1.fc.w", (3, 2), {"another.": (6,)}) == {f"{LAYER}1.fc.w": (3, 2)}
    assert name_experts("dense", (3, 2), {LAYER: (6,)}) == {"dense": (3, 2)}


def test_fused_experts() -> None:
    """AutoEP's experts, in the rank's order."""
    held = {"m.0.mlp.experts.": (3, 1)}
    parts = {"m.0.mlp.experts.w1.3": (5, 6), "m.0.mlp.experts.w1.1": (5, 6)}
    assert name_experts("m.0.mlp.experts.w1", (2, 5, 6), held) == parts
    assert list(name_experts("m.0.mlp.experts.w1", (2, 5, 6), held)) == list(parts)
    assert name_experts("m.1.mlp.experts.w1", (2, 5, 6), held) == {"m.1.mlp.experts.w1": (2, 5, 6)}
    assert find_layer("m.0.mlp.experts.w1", held) == "m.0.mlp.experts."
    assert find_layer("m.0.mlp.router.gate.weight", held) is None
    assert all(map(is_expert, [*parts, "experts.w3.0", f"{LAYER}1.fc.w"]))
    assert not any(map(is_expert, ["m.experts.w1", "m.experts.w4.0", "m.experts.w1.0.bias", "myexperts.w1.0"]))


@pytest.mark.parametrize(
    ("args", "data_first", "ranks"),
    [
        ((8, 4), False, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ((8, 4), True, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ((3, 1), False, [[0, 1, 2]]),
        ((4, 2, 3, 2), False, [[2, 8], [5, 11]]),
        ((4, 2, 3, 2), True, [[2, 5], [8, 11]]),
        ((2, 2, 2), False, [[0, 2], [1, 3]]),
    ],
)
def test_ranks_with_the_same_experts(args: tuple[int, ...], data_first: bool, ranks: list[list[int]]) -> None:
    """The order is that of DeepSpeed's utils/groups.py."""
    assert list(map(list, place_experts(*args, data_first=data_first))) == ranks


@pytest.mark.parametrize("live", [1, 2, 4])
@pytest.mark.parametrize("saved", [1, 2, 4])
def test_experts_are_distributed_in_the_modules_order(live: int, saved: int) -> None:
    """For groups of experts only, and for groups of all parameters of the module."""

    def mix(experts: range) -> list[str]:
        size = 2 * len(experts)
        names = name_all(2, experts)
        return ["in", "0.gate", *names[:size], "0.norm", "1.gate", *names[size:], "out"]

    ranks = [
        [range(rank * 4 // degree, (rank + 1) * 4 // degree) for rank in range(degree)] for degree in (live, saved)
    ]
    for make in (partial(name_all, 2), mix):
        names = list(dict.fromkeys(name for experts in ranks[0] for name in make(experts)))
        assert deal_experts(names, saved) == [make(experts) for experts in ranks[1]]
    backwards = list(dict.fromkeys(name for experts in ranks[0] for name in mix(experts)[::-1]))
    if live == saved:
        assert deal_experts(backwards, saved, live) == [mix(experts)[::-1] for experts in ranks[1]]
    elif live < 4:  # the order of a single expert per rank is unknown
        with pytest.raises(ValueError, match=f"another order than the module, and {live} .*, where .* had {saved}"):
            deal_experts(backwards, saved, live)


def test_names_that_cannot_be_distributed() -> None:
    by_expert = [name for expert in range(4) for layer in (0, 1) for name in name_all(2, range(expert, expert + 1))]
    with pytest.raises(ValueError, match="another order"):
        deal_experts([*reversed(name_all(2, range(4)))], 2)
    with pytest.raises(ValueError, match="another order"):
        deal_experts(sorted(set(by_expert), key=by_expert.index)[1:], 2)
    with pytest.raises(ValueError, match="3 expert-parallel ranks do not fit"):
        deal_experts(name_all(1, range(4)), 3)
    assert deal_experts(["dense", "other"], 3) == [["dense", "other"]] * 3


def test_names_of_process_groups_are_not_hyper_parameters() -> None:
    assert drop_fixed({"lr": 1, "name": "ep_size_2", "moe": True}) == {"lr": 1}
    assert drop_fixed({"lr": 1, "name": "mine"}) == {"lr": 1, "name": "mine"}
