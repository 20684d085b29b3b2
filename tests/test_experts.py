"""What experts are called, and which ranks hold them."""

from __future__ import annotations

import pytest

from deepspeed_ucp.experts import (
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
def test_an_experts_parameter_is_known_by_its_name(name: str, found: tuple[str, int] | None) -> None:
    assert find_expert(name) == found


def test_numbers_are_those_of_the_whole_layer() -> None:
    assert count_experts([f"{LAYER}0.w", f"{LAYER}2.w", "dense"]) == {LAYER: 3}
    assert name_experts(f"{LAYER}1.fc.w", (3, 2), {LAYER: range(6, 9)}) == {f"{LAYER}7.fc.w": (3, 2)}
    assert name_experts(f"{LAYER}1.fc.w", (3, 2), {"another.": (6,)}) == {f"{LAYER}1.fc.w": (3, 2)}
    assert name_experts("dense", (3, 2), {LAYER: (6,)}) == {"dense": (3, 2)}


def test_experts_that_lie_in_one_parameter() -> None:
    """AutoEP's: in the rank's own order."""
    held = {"m.0.mlp.experts.": (3, 1)}
    parts = {"m.0.mlp.experts.w1.3": (5, 6), "m.0.mlp.experts.w1.1": (5, 6)}
    assert name_experts("m.0.mlp.experts.w1", (2, 5, 6), held) == parts
    assert list(name_experts("m.0.mlp.experts.w1", (2, 5, 6), held)) == list(parts)
    assert name_experts("m.1.mlp.experts.w1", (2, 5, 6), held) == {"m.1.mlp.experts.w1": (2, 5, 6)}
    assert find_layer("m.0.mlp.experts.w1", held) == "m.0.mlp.experts."
    assert find_layer("m.0.mlp.router.gate.weight", held) is None
    assert all(map(is_expert, [*parts, "experts.w3.0", f"{LAYER}1.fc.w"]))
    assert not any(map(is_expert, ["m.experts.w1", "m.experts.w4.0", "m.experts.w1.0.bias", "myexperts.w1.0"]))


def test_ranks_of_both_orders() -> None:
    """As utils/groups.py deals them, for 8 ranks and 4 expert-parallel ones."""
    assert list(map(list, place_experts(8, 4, data_first=False))) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list(map(list, place_experts(8, 4, data_first=True))) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert place_experts(3, 1, data_first=False) == [range(3)]


def test_data_parallel_ranks_among_all_of_a_stage() -> None:
    assert list(map(list, place_experts(4, 2, 3, 2, data_first=False))) == [[2, 8], [5, 11]]
    assert list(map(list, place_experts(4, 2, 3, 2, data_first=True))) == [[2, 5], [8, 11]]
    assert list(map(list, place_experts(2, 2, 2, data_first=False))) == [[0, 2], [1, 3]]


def test_an_experts_name_without_its_number() -> None:
    assert cut_number(f"{LAYER}3.fc.w") == cut_number(f"{LAYER}0.fc.w") == (LAYER, ".fc.w")
    assert cut_number("dense") == ("dense", "")


@pytest.mark.parametrize("live", [1, 2, 4])
@pytest.mark.parametrize("saved", [1, 2, 4])
def test_a_ranks_names_in_its_modules_order(live: int, saved: int) -> None:
    own = 4 // live
    names = [name for rank in range(live) for name in name_all(2, range(rank * own, rank * own + own))]
    held = 4 // saved
    dealt = [name_all(2, range(rank * held, rank * held + held)) for rank in range(saved)]
    assert deal_experts(names, saved) == dealt


@pytest.mark.parametrize("live", [1, 2, 4])
@pytest.mark.parametrize("saved", [1, 2, 4])
def test_experts_are_dealt_among_other_parameters(live: int, saved: int) -> None:
    """A group of all of the model's parameters, as the module has them."""

    def mix(held: range) -> list[str]:
        first, second = (name_all(2, held)[number * 2 * len(held) :][: 2 * len(held)] for number in (0, 1))
        return ["in", "0.gate", *first, "0.norm", "1.gate", *second, "out"]

    held = [[range(rank * 4 // degree, (rank + 1) * 4 // degree) for rank in range(degree)] for degree in (live, saved)]
    names = list(dict.fromkeys(name for own in held[0] for name in mix(own)))
    assert deal_experts(names, saved) == [mix(own) for own in held[1]]
    backwards = list(dict.fromkeys(name for own in held[0] for name in mix(own)[::-1]))
    if live == saved:
        assert deal_experts(backwards, saved, live) == [mix(own)[::-1] for own in held[1]]
    elif live < 4:  # of one expert a rank nothing is seen of the experts' order
        with pytest.raises(ValueError, match=f"another order than the module, and {live} .*, where .* had {saved}"):
            deal_experts(backwards, saved, live)


def test_names_that_cannot_be_dealt() -> None:
    by_expert = [name for expert in range(4) for layer in (0, 1) for name in name_all(2, range(expert, expert + 1))]
    with pytest.raises(ValueError, match="another order"):
        deal_experts([*reversed(name_all(2, range(4)))], 2)
    with pytest.raises(ValueError, match="another order"):
        deal_experts(sorted(set(by_expert), key=by_expert.index)[1:], 2)
    with pytest.raises(ValueError, match="3 expert-parallel ranks do not fit"):
        deal_experts(name_all(1, range(4)), 3)
    assert deal_experts(["dense", "other"], 3) == [["dense", "other"]] * 3


def test_what_names_process_groups_is_no_hyper_parameter() -> None:
    assert drop_fixed({"lr": 1, "name": "ep_size_2", "moe": True}) == {"lr": 1}
    assert drop_fixed({"lr": 1, "name": "mine"}) == {"lr": 1, "name": "mine"}
