"""How often to save: bytes held against files, shares of time against textbooks and a simulation of failures."""

from __future__ import annotations

import math
import random
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.forecast.degrees import Degrees, parse_degrees
from deepspeed_ucp.forecast.interval import (
    OWN,
    SaveSize,
    Tiers,
    Way,
    choose_interval,
    count_state,
    find_daly,
    find_young,
    judge_interval,
    list_ways,
    measure_save,
)
from deepspeed_ucp.sources import open_checkpoint
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

HOUR = 3600.0
MODEL = Model((Param("wte", (1000, 300)), Param("h.0", (400, 500))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_are_those_of_files(stage: int, precision: str, tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, MODEL, random_state(MODEL, 1, precision=precision), Topology(stage, 4, precision)
    )
    index = open_checkpoint(str(folder), Comm(), groups="module")
    degrees = parse_degrees(f"dp=4,zero={stage},precision={precision}", index.run.topology)
    found = measure_save(*count_state(index, degrees), degrees, 2)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    first = [size for name, size in sizes.items() if "pp_rank_2" not in name and "pp_rank_3" not in name]
    assert (found.nodes, found.total) == (2, pytest.approx(sum(sizes.values()), rel=0.01))
    assert found.node == pytest.approx(sum(first), rel=0.01)


@pytest.mark.parametrize(
    ("degrees", "per_node", "node"),
    [
        (Degrees(dp=8, zero=3, wrapper="zero3"), 2, 140 // 4),
        (Degrees(dp=8, zero=1, wrapper="zero12"), 2, 120 // 4 + 20),
        (Degrees(dp=4, tp=2, zero=1, wrapper="zero12"), 4, 120 // 2 + 20),
        (Degrees(dp=2, tp=2, pp=2, zero=1, wrapper="zero12"), 2, 120 // 4 + 20 // 2),  # a node has a stage's writers
        (Degrees(dp=2, tp=2, pp=2, zero=1, wrapper="zero12"), 1, 120 // 8 + 20 // 4),
        (Degrees(dp=4), 2, 140),
        (Degrees(dp=3, zero=3, wrapper="zero3"), 2, 2 * 140 // 3),  # a node that is not full
    ],
)
def test_first_data_parallel_ranks_write_what_is_not_cut(degrees: Degrees, per_node: int, node: int) -> None:
    assert astuple(measure_save(120, 20, degrees, per_node)) == (140, node, -(-degrees.world // per_node))


def test_the_textbook() -> None:
    assert find_young(50, 4 * HOUR) == 1200
    assert find_daly(2 * HOUR, HOUR) == HOUR  # where a save takes longer than what is between two failures
    # T = M e^(R/M) (e^((t + C)/M) - 1) T_s / t (Daly 2006, the complete model)
    way, t, mtbf = Way("", "", 50, 50, 300), 1000.0, 4 * HOUR
    expected = t / (mtbf * math.exp(300 / mtbf) * (math.exp(1050 / mtbf) - 1))
    assert judge_interval(way, t, mtbf).trains == pytest.approx(expected, rel=1e-12)


WAYS = st.builds(
    lambda stall, later, restart, every: Way("", "", stall, stall + later, restart, every=every),
    st.floats(1e-3, 0.05), st.floats(0, 0.1), st.floats(0, 0.2), st.integers(1, 4),
)  # fmt: skip
"""With a failure in a unit of time."""


@given(WAYS, st.floats(0.01, 3))
def test_shares_are_of_all_time_whatever_its_unit(way: Way, seconds: float) -> None:
    found = judge_interval(way, seconds, 1.0)
    assert found.trains + found.stalls + found.lost == pytest.approx(1)
    assert 0 < found.trains < 1
    hours = Way("", "", *(HOUR * each for each in (way.stall, way.safe, way.restart)), every=way.every)
    assert judge_interval(hours, HOUR * seconds, HOUR).trains == pytest.approx(found.trains)


@given(WAYS)
def test_failures_that_are_rare_cost_half_a_period_the_restart_and_what_is_not_safe_yet(way: Way) -> None:
    mtbf, period = 1e5, way.every * (1.0 + way.stall)
    lost = judge_interval(way, 1.0, mtbf).lost
    assert lost == pytest.approx(period / 2 + way.restart + way.safe - way.stall, rel=1e-3)


@given(WAYS)
def test_no_interval_loses_less(way: Way) -> None:
    found = choose_interval(way, 1.0)
    tried = [judge_interval(way, found.seconds * 1.02**step, 1.0).trains for step in range(-150, 150)]
    assert found.trains >= max(tried) * (1 - 1e-4)


def test_an_interval_is_not_shorter_than_the_tiers_can_follow() -> None:
    way = Way("", "", 1, 601, 60, least=599)
    assert choose_interval(way, HOUR).seconds == 599 > find_daly(1, HOUR)


def simulate(way: Way, seconds: float, mtbf: float, failures: int, seed: int) -> tuple[float, float]:
    """The share of time that trains, and its standard error, second by second of saves that fail."""
    draw, runs = random.Random(seed), []
    for _ in range(failures):
        end = draw.expovariate(1 / mtbf)
        now, kept, done, saves = way.restart, 0.0, 0.0, 0
        while now < end:
            now, done, saves = now + seconds, done + seconds, saves + 1
            if saves % way.every == 0 and now + way.safe <= end:
                kept = done
            now += way.stall
        runs.append((end, kept))
    share = sum(kept for _, kept in runs) / sum(end for end, _ in runs)
    squares = sum((kept - share * end) ** 2 for end, kept in runs)
    return share, math.sqrt(squares) / sum(end for end, _ in runs)


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        (Way("", "", 50, 50, 170), 4 * HOUR),
        (Way("", "", 50, 50, 170), 1200),
        (Way("", "", 4, 55, 170), 350),
        (Way("", "", 4, 900, 170), 900),
        (Way("", "", 4, 300, 170, every=5), 120),
    ],
    ids=["own-4h", "own-best", "memory", "slow-storage", "every-5"],
)
def test_a_simulation_of_failures_agrees_within_its_error(way: Way, seconds: float) -> None:
    share, error = simulate(way, seconds, 4 * HOUR, 20_000, seed=7)
    assert error < 0.005
    assert abs(share - judge_interval(way, seconds, 4 * HOUR).trains) < 3 * error


def test_ways_follow_from_speeds() -> None:
    size = SaveSize(total=1000, node=100, nodes=20)
    own, stored, neighbour, memory = list_ways(size, Tiers(50, 4, 8, 20, None, 5, 60))
    assert (own.saves, own.stall, own.safe, own.restart, own.least, own.sent) == (OWN, 250, 250, 60 + 125, 0, 100)
    assert (stored.stall, stored.safe, stored.restart, stored.every) == (2, 252, 185, 5)
    assert (neighbour.stall, neighbour.safe, neighbour.restart, neighbour.every) == (2, 2 + 5, 60 + 2 + 5, 1)
    assert (memory.stall, memory.safe, memory.restart, memory.every) == (2, 2, 62, 1)
    assert {way.least for way in (stored, neighbour, memory)} == {250 / 5 - 2}
    assert {way.sent for way in (stored, neighbour, memory)} == {100 / 5 + 100}
    own, stored, memory = list_ways(size, Tiers(50, 4, 8, None, 7, 1, 60))  # no neighbour, a stall that was seen
    assert (stored.stall, stored.safe, memory.restart, memory.sent) == (7, 257, 62, 100)
    own, stored, memory = list_ways(size, Tiers(50, 400, 8, None, 0.1, 1, 60))  # the copy goes on while training does
    assert (memory.stall, memory.safe, memory.least, stored.safe) == (0.1, 2, 2.5 - 0.1, 4.5)
    own, *_ = list_ways(size, Tiers(50, 400, 800, 20, None, 1, 60))  # the network of the node with most of it
    assert (own.stall, own.restart) == (5, 65)
