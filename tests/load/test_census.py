"""Messages between ranks before a load: renames in both directions, groups of several stages, differing ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from deepspeed_ucp.engine.parallel import Place
from deepspeed_ucp.extensions.rename import Renames, apply_renames
from deepspeed_ucp.extensions.resize import ResizedRows
from deepspeed_ucp.model.view import EngineView
from deepspeed_ucp.plan.match import Adaptation
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.plan.matching import make_index
from tests.support.ranks import run_ranks
from tests.support.reshard import FakeTarget, groups_of
from tests.synth import Model, Param, Topology

BOTH_WAYS = {
    "rename": [
        {"from": r"(?P<n>\d+)\.(?P<rest>\w+)", "to": "encoder.{n-2}.{rest}"},
        {"from": r"encoder\.(?P<n>\d+)\.(?P<rest>\w+)", "to": "{n+2}.{rest}"},
    ]
}


@pytest.mark.parametrize(
    ("saved", "live", "renamed"),
    [
        (["2.w", "3.w"], ["encoder.0.w", "encoder.1.w"], {"encoder.0.w": "2.w", "encoder.1.w": "3.w"}),
        (["encoder.0.w"], ["2.w"], {"2.w": "encoder.0.w"}),
        (["2.w", "4.w"], ["2.w", "4.w", "encoder.0.w"], {}),
        (["2.w"], ["encoder.7.w"], {}),
    ],
    ids=["forth", "back", "the same name", "not in the engine"],
)
def test_rename_rules_apply_in_both_directions(saved: list[str], live: list[str], renamed: dict[str, str]) -> None:
    """A rule renames a saved name only to a name of the engine, and never renames a name that the engine has."""
    index = make_index(dict.fromkeys(saved, (2,)), instances={saved[0]: 2})
    assert apply_renames(index, dict.fromkeys(live, ((2,),)), from_config(BOTH_WAYS)) == renamed


def test_rules_without_a_match_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    resize = [{"match": "v"}, {"match": "w"}]
    rules = from_config({"rename": [{"from": "nothing", "to": "something"}], "resize": resize})
    index = make_index({"w": (2,)})
    with caplog.at_level(logging.INFO, logger="deepspeed_ucp"):
        adaptation = Adaptation(index, EngineView(), rules, None, True, index, set())
        for extension in (Renames(), ResizedRows()):
            extension.adapt(adaptation)
    assert "'nothing' matches no parameter" in caplog.text
    assert "patterns: resize: 'v' matches no parameter\n" in caplog.text and "'w' matches" not in caplog.text


def make_stage(pp_rank: int, *groups: list[str], decay: Sequence[float] = (0.1, 0.1)) -> FakeTarget:
    """Make a rank of one of two stages, with parameters of equal shape; the first has a second name, `tied`."""
    params = [Param(name, (2,), number) for number, names in enumerate(groups) for name in names]
    tied = Param("tied", (2,), alias_of=groups[0][0])
    place = Place(0, 1, pp_rank, 2, 0, 1)
    target = FakeTarget(Model((*params, tied)), Topology(1, 2), 0, place=place)
    for group, value in zip(target.wrapped.param_groups, decay, strict=False):
        group.update(weight_decay=value, lr=0.1 + pp_rank)
    return target


def test_param_groups_join_across_stages_if_one_stage_lacks_the_first() -> None:
    stages = [make_stage(0, ["0.w"], ["0.b"], decay=(0.1, 0.0)), make_stage(1, ["1.b"], decay=(0.0,))]
    for joined, hyper, order in run_ranks(2, lambda rank, comm: groups_of(stages[rank], comm)):
        assert list(order.values()) == ["0.w", "0.b", "1.b", "1.b"] and order["tied"] == "1.b"
        assert joined == [[("0.w", True)], [("0.b", True), ("1.b", True)]]
        assert [fields["weight_decay"] for fields in hyper] == [0.1, 0.0]


def test_a_joined_param_group_has_the_experts_of_all_ranks() -> None:
    ranks = [make_stage(0, ["dense"], ["e.0"]), make_stage(0, ["dense"], ["e.1"])]
    for joined, hyper, _ in run_ranks(2, lambda rank, comm: groups_of(ranks[rank], comm)):
        assert joined == [[("dense", True)], [("e.0", True), ("e.1", True)]]
        assert len(hyper) == 2


def test_a_joined_param_group_names_a_parameter_of_two_stages_once() -> None:
    stages = [make_stage(0, ["t", "0.w"]), make_stage(1, ["t", "1.w"])]
    joined, *_ = run_ranks(2, lambda rank, comm: groups_of(stages[rank], comm))[0]
    assert [name for name, _ in joined[0]] == ["t", "0.w", "1.w"]
