"""Which of some nodes fail, by figures that are made up."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from deepspeed_ucp.supervise.preflight.judging import MEASURES, Figure, Report, judge, merge

NODES = ("a", "b", "c", "d")


def make(
    product: float = 100.0,
    *,
    bits: str = "0",
    kind: str = "x",
    faults: tuple[str, ...] = (),
    cut: str = "",
    devices: int = 0,
) -> Report:
    """A report of four nodes that try links to all others; those to ``cut`` fail."""
    links = {peer: "refused" if peer in cut else None for peer in NODES}
    return Report((Figure("product", product, kind, bits=bits), Figure("network", 1000.0)), faults, links, devices)


def fail(**reports: Report | str) -> dict[str, list[str]]:
    return dict(judge(reports, {}).faults)


def test_nodes_that_differ_little_pass() -> None:
    verdict = judge({"a": make(90), "b": make(150), "c": make(60), "d": make()}, {})
    assert (verdict.faults, verdict.notes) == ({}, [])


def test_a_slow_node_fails_against_the_median() -> None:
    assert fail(a=make(90), b=make(20), c=make(100)) == {"b": ["product 20 GFLOP/s; the median of 3 is 90"]}


def test_figures_of_another_kind_are_not_compared() -> None:
    """Two of a kind are no majority."""
    assert fail(a=make(90), b=make(20, kind="y", bits="1"), c=make(20, kind="y", bits="1"), d=make(100)) == {}


def test_wrong_bits_fail_against_most_of_a_kind() -> None:
    assert fail(a=make(), b=make(), c=make(bits="1")) == {"c": ["product: other bits than 2 of 3 of its kind have"]}


@pytest.mark.parametrize("bits", ["01", "0011", "012"])
def test_where_no_result_is_that_of_most_nobody_fails_and_it_is_noted(bits: str) -> None:
    reports = {node: make(bits=each) for node, each in zip(NODES, bits, strict=False)}
    verdict = judge(reports, {})
    assert verdict.faults == {}
    assert verdict.notes == [f"product: bits differ among {', '.join(reports)}, and no result is that of most of them"]


def test_devices_are_held_against_their_neighbours() -> None:
    devices = tuple(Figure("device product", 100 - 60 * (at == 3), "h", f"cuda:{at}", str(at == 2)) for at in range(8))
    assert fail(a=Report(devices)) == {
        "a": [
            "cuda:2: device product: other bits than 7 of 8 of its kind have",
            "cuda:3: device product 40 GFLOP/s; the median of 8 is 100",
        ]
    }


def test_what_is_wrong_whatever_the_others_have_needs_no_majority() -> None:
    assert fail(a=make(faults=("disk: full",)), b="no report: no answer within 60 s") == {
        "a": ["disk: full"],
        "b": ["no report: no answer within 60 s"],
    }


def test_one_or_two_nodes_are_held_against_their_own_first_figures() -> None:
    former = {"a": make(100), "b": make(100)}
    assert dict(judge({"a": make(80), "b": make(20)}, {}, former).faults) == {
        "b": ["product 20 GFLOP/s; at first it had 100"]
    }
    assert fail(a=make(80), b=make(20)) == {}


@pytest.mark.parametrize("what", ["disk write", "free memory", "network"])
def test_what_others_may_have_taken_is_not_held_against_earlier_figures(what: str) -> None:
    before, now = (Report((Figure(what, value, "x"),)) for value in (1000.0, 1.0))
    assert judge({"a": now}, {}, {"a": before}).faults == {}


@pytest.mark.parametrize(
    ("devices", "failing"), [((2, 2), ""), ((2, 1), "b"), ((2, 0), "b"), ((0, 0), ""), ((1, 1), "")]
)
def test_a_node_lacks_accelerators_where_others_have_enough(devices: tuple[int, int], failing: str) -> None:
    first, second = devices
    verdict = judge({"a": make(devices=first), "b": make(devices=second)}, {"a": 2, "b": 2})
    assert "".join(verdict.faults) == failing


@pytest.mark.parametrize(
    ("cut", "failing"),
    [
        ({"a": "c", "b": "c", "c": "abd", "d": "c"}, "c"),
        ({"a": "c"}, "c"),  # of two that are equally at fault the later one
        ({"a": "cd", "b": "cd", "c": "ab", "d": "ab"}, ""),  # the halves see each other no more
        (dict.fromkeys(NODES, "abcd"), ""),
    ],
    ids=["alone", "one-link", "halves", "none"],
)
def test_who_is_cut_off_fails_where_most_are_left(cut: dict[str, str], failing: str) -> None:
    verdict = judge({node: make(cut=cut.get(node, "").replace(node, "")) for node in NODES}, {})
    assert "".join(verdict.faults) == failing
    assert bool(verdict.notes) == (not failing)
    if len(cut) == 4 and failing:
        assert verdict.faults["c"] == ["network: no way between it and 3 of 3 others: a: refused"]


def test_two_that_cannot_reach_each_other_are_noted() -> None:
    verdict = judge({"a": make(cut="b"), "b": make(cut="a")}, {})
    assert verdict.faults == {}
    assert verdict.notes == ["network: no way between 1 pair of nodes, and no larger part is whole: a and b: refused"]


def test_of_two_tests_the_better_figures_count_and_all_faults() -> None:
    first, second = make(20, cut="b"), replace(make(100, bits="1", cut="c"), seconds=3.0)
    merged = merge(first, second)
    assert [figure.value for figure in merged.figures] == [100, 1000]
    assert merged.faults == ("product: other bits the second time",)
    assert merged.links == dict.fromkeys(NODES)
    assert merge(make(faults=("x",)), make(faults=("x",))).faults == ("x",)


def test_reports_are_what_was_told() -> None:
    report = make(faults=("x",), cut="a", devices=8)
    assert Report.parse(asdict(report)) == report
    with pytest.raises(ValueError, match="unknown figures: speed"):
        Report.parse(asdict(Report((Figure("speed", 1.0),))))
    assert all(measure.slow is None or measure.slow > 1 for measure in MEASURES.values())
