"""Figures and times: arithmetic on what was planned."""

from __future__ import annotations

import pytest

from deepspeed_ucp.forecast.estimate import (
    MEASURED,
    Bandwidths,
    LoadTotals,
    RankFigures,
    estimate_times,
    measure_exchange,
    measure_plan,
    measure_scratch,
    spread,
)
from deepspeed_ucp.plan import Claim, LoadPlan, Part, Request, Round, Send


def make_figures(rank: int, **told: int) -> RankFigures:
    return RankFigures(rank, 0, rank, 0, **{**dict.fromkeys(MEASURED, 0), **told})


def make_read(record: int, nbytes: int) -> Request:
    return Request(record, 0, nbytes, (Part(nbytes, 0, 0),))


def make_send(nbytes: int) -> Send:
    return Send(0, nbytes, nbytes, 1)


def make_claim(nbytes: int) -> Claim:
    return Claim(0, 0, nbytes, nbytes, 1, ())


TOTALS = LoadTotals(14_000, 10, 12_000, 12_600, 12_000, 0, 0, 3)
RANKS = [make_figures(0, read=4_200, received=500), make_figures(1, read=8_400, sent=900)]


def test_least_mean_and_most_of_a_figure() -> None:
    assert spread(RANKS, "read") == {"least": 4_200, "mean": 6_300, "most": 8_400}
    assert TOTALS.ratio == 1.05


def test_times_at_the_storages_bandwidth() -> None:
    times = estimate_times(TOTALS, RANKS, 2, Bandwidths(1e-6))  # 1000 bytes a second
    assert (times.checkpoint, times.aggregate, times.exchange) == (14.0, 12.6, None)
    assert times.slowest == pytest.approx(16.8)
    assert times.load == times.aggregate


def test_one_ranks_bandwidth_can_be_the_limit() -> None:
    times = estimate_times(TOTALS, RANKS, 2, Bandwidths(1e-6, rank=2e-7, net=1e-7))
    assert times.slowest == pytest.approx(42.0)
    assert times.exchange == pytest.approx(9.0)
    assert times.load == pytest.approx(51.0)


def test_the_textbook_case() -> None:
    totals = LoadTotals(13_800_000_000_000, 1024, 1, 1, 1, 0, 0, 1)
    assert estimate_times(totals, RANKS, 512, Bandwidths(273)).checkpoint == pytest.approx(50.5, abs=0.1)


def test_scratch_is_of_the_largest_read_per_thread() -> None:
    assert measure_scratch([make_read(0, 10), make_read(1, 30), make_read(2, 20)], 2) == 60
    assert measure_scratch([make_read(0, 10)], 16) == 10
    assert measure_scratch([], 16) == 0


def test_a_step_of_exchange_takes_what_is_packed_and_received_in_it() -> None:
    sends = [[make_send(5)], [make_send(7)], [make_send(11)]]
    receives = [[make_claim(5)], [make_claim(13)], []]
    assert measure_exchange(LoadPlan([], [Round(sends, receives, staged=100)]), 0) == 200 + 5 + 7 + 11 + 5 + 13
    # Distances 0 and 1 fall to the first of two steps: rank 0 sends to 0 and 1, and receives from 0 and 2;
    # in the second it sends to 2, and receives from 1.
    assert measure_exchange(LoadPlan([], [Round(sends, receives, staged=100, steps=2)]), 0) == 200 + 11 + 13


def test_a_plans_figures_leave_out_what_a_rank_sends_itself() -> None:
    sends = [[make_send(5)], [make_send(7)]]
    receives = [[make_claim(5)], [make_claim(13)]]
    rounds = [Round(sends, receives, [make_read(2, 10)], staged=10)]
    plan = LoadPlan([make_read(0, 40), make_read(1, 50)], rounds)
    assert measure_plan(plan, 0, [0, 0, 1], 1) == {
        "read": 100,
        "requests": 3,
        "files": 2,
        "received": 13,
        "sent": 7,
        "rounds": 1,
        "peak": max(50, 10 + 5 + 7 + 5 + 13),
    }
