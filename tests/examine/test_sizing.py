"""Sizes and times of a run, compared with files, textbooks and a simulation of failures."""

from __future__ import annotations

import math
import random
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.examine.degrees import Degrees, parse_degrees
from deepspeed_ucp.examine.sizing import (
    SaveWay,
    choose_interval,
    count_state,
    estimate_run,
    judge_interval,
    list_ways,
    measure_save,
)
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

HOUR = 3600.0
MODEL = Model((Param("wte", (1000, 300)), Param("h.0", (400, 500))))
NUMEL = 500_000


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_estimated_bytes_equal_file_sizes(stage: int, precision: str, tmp_path: Path) -> None:
    state = random_state(MODEL, 1, precision=precision)
    folder = write_checkpoint(tmp_path, MODEL, state, Topology(stage, 4, precision))
    index = open_checkpoint(str(folder), Comm(), Naming(groups="module"))
    degrees = parse_degrees(f"dp=4,zero={stage},precision={precision}", index.topology)
    saved = count_state(index, degrees)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    first = [size for name, size in sizes.items() if "pp_rank_2" not in name and "pp_rank_3" not in name]
    assert sum(saved) == pytest.approx(sum(sizes.values()), rel=0.01)
    assert measure_save(*saved, degrees, 2) == (pytest.approx(sum(first), rel=0.01), 2)
    run = estimate_run(NUMEL, degrees, 2)
    width, shards = (4 if precision == "fp32" else 2), (4 if stage else 1)
    memory = {
        "weights": width * (NUMEL // 4 if stage == 3 else NUMEL) * (stage > 0 or precision != "fp32"),
        "gradients": width * (NUMEL // 4 if stage > 1 else NUMEL),
        "masters": 4 * NUMEL // shards,
        "states": 8 * NUMEL // shards,
    }
    disk = {"restored": 12 * NUMEL, "checkpoint": sum(saved), "files": len(sizes)}
    assert run == {**memory, "total": sum(memory.values()), **disk}


@pytest.mark.parametrize(
    ("degrees", "per_node", "node"),
    [
        (Degrees(dp=8, zero=3, wrapper="zero3"), 2, 140 // 4),
        (Degrees(dp=8, zero=1, wrapper="zero12"), 2, 120 // 4 + 20),
        (Degrees(dp=4, tp=2, zero=1, wrapper="zero12"), 4, 120 // 2 + 20),
        (Degrees(dp=2, tp=2, pp=2, zero=1, wrapper="zero12"), 2, 120 // 4 + 20 // 2),  # one node has a stage's writers
        (Degrees(dp=2, tp=2, pp=2, zero=1, wrapper="zero12"), 1, 120 // 8 + 20 // 4),
        (Degrees(dp=4), 2, 140),
        (Degrees(dp=3, zero=3, wrapper="zero3"), 2, 2 * 140 // 3),  # a node that is not full
    ],
)
def test_first_data_parallel_ranks_write_whole_tensors(degrees: Degrees, per_node: int, node: int) -> None:
    assert measure_save(120, 20, degrees, per_node) == (node, -(-degrees.world // per_node))


def make_way(stall: float, safe: float, restart: float, least: float = 0.0) -> SaveWay:
    return SaveWay("", "", stall, safe, restart, least)


def test_shares_of_lost_time_equal_textbook_formulas() -> None:
    young = math.sqrt(2 * 50 * 4 * HOUR)
    assert choose_interval(make_way(50, 50, 300), 4 * HOUR) == pytest.approx(young - 50, rel=0.02)
    assert choose_interval(make_way(2 * HOUR, 2 * HOUR, 300), HOUR) == HOUR  # a save outlasts the time to a failure
    # T = M e^(R/M) (e^((t + C)/M) - 1) T_s / t (Daly 2006, the complete model)
    t, mtbf = 1000.0, 4 * HOUR
    expected = t / (mtbf * math.exp(300 / mtbf) * (math.exp(1050 / mtbf) - 1))
    assert judge_interval(make_way(50, 50, 300), t, mtbf)[0] == pytest.approx(expected, rel=1e-12)
    assert choose_interval(make_way(1, 601, 60, least=599), HOUR) == 599 > choose_interval(make_way(1, 601, 60), HOUR)


WAYS = st.builds(
    lambda stall, later, restart: make_way(stall, stall + later, restart),
    st.floats(1e-3, 0.05), st.floats(0, 0.1), st.floats(0, 0.2),
)  # fmt: skip
"""Share of lost time at one failure per unit of time."""


@given(WAYS, st.floats(0.01, 3))
def test_a_rare_failure_costs_half_a_period_restart_and_unsafe_time(way: SaveWay, seconds: float) -> None:
    """Shares of lost time do not depend on the unit."""
    trains, lost = judge_interval(way, seconds, 1.0)
    assert trains + trains * way.stall / seconds + lost == pytest.approx(1)
    assert 0 < trains < 1
    hours = make_way(*(HOUR * each for each in (way.stall, way.safe, way.restart)))
    assert judge_interval(hours, HOUR * seconds, HOUR)[0] == pytest.approx(trains)
    _, lost = judge_interval(way, 1.0, 1e5)
    assert lost == pytest.approx((1 + way.stall) / 2 + way.restart + way.safe - way.stall, rel=1e-3)


@given(WAYS)
def test_the_recommended_interval_loses_least(way: SaveWay) -> None:
    seconds = choose_interval(way, 1.0)
    tried = [judge_interval(way, seconds * 1.02**step, 1.0)[0] for step in range(-150, 150)]
    assert judge_interval(way, seconds, 1.0)[0] >= max(tried) * (1 - 1e-4)


def simulate(way: SaveWay, seconds: float, mtbf: float, failures: int, seed: int) -> tuple[float, float]:
    """Simulate saves and failures; return the share of training time and its standard error."""
    draw, runs = random.Random(seed), []
    for _ in range(failures):
        end = draw.expovariate(1 / mtbf)
        now, kept, done = way.restart, 0.0, 0.0
        while now < end:
            now, done = now + seconds, done + seconds
            if now + way.safe <= end:
                kept = done
            now += way.stall
        runs.append((end, kept))
    share = sum(kept for _, kept in runs) / sum(end for end, _ in runs)
    squares = sum((kept - share * end) ** 2 for end, kept in runs)
    return share, math.sqrt(squares) / sum(end for end, _ in runs)


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        (make_way(50, 50, 170), 4 * HOUR),
        (make_way(50, 50, 170), 1200),
        (make_way(4, 55, 170), 350),
        (make_way(4, 900, 170), 900),
    ],
    ids=["direct-4h", "direct-best", "memory", "slow-storage"],
)
def test_a_simulation_of_failures_agrees_within_its_error(way: SaveWay, seconds: float) -> None:
    share, error = simulate(way, seconds, 4 * HOUR, 20_000, seed=7)
    assert error < 0.005
    assert abs(share - judge_interval(way, seconds, 4 * HOUR)[0]) < 3 * error


def list_times(network: float | None, stall: float | None, write: float, read: float = 8) -> list[tuple[float, ...]]:
    """List stall, safe, restart and least of each method for a save of 1000 bytes, with 100 bytes on one node."""
    speeds = {"memory": 50, "write": write, "read": read, "network": network, "stall": stall, "restart": 60}
    return [astuple(way)[2:] for way in list_ways(1000, 100, **speeds)]  # type: ignore[arg-type]


def test_times_of_save_methods_follow_from_speeds() -> None:
    direct, stored, neighbour, memory = list_times(20, None, 4)
    assert direct == (250, 250, 60 + 125, 0)
    assert stored == (2, 252, 185, 248)
    assert neighbour == (2, 2 + 5, 60 + 2 + 5, 248)
    assert memory == (2, 2, 62, 248)
    direct, stored, memory = list_times(None, 7, 4)  # no neighbour, a measured stall
    assert (stored[:2], memory[2]) == ((7, 257), 62)
    direct, stored, memory = list_times(None, 0.1, 400)  # training continues during the copy
    assert (memory[0], memory[1], memory[3], stored[1]) == (0.1, 2, 2.5 - 0.1, 4.5)
    direct, *_ = list_times(20, None, 400, 800)  # the network of the node with the largest part
    assert direct[:3] == (5, 5, 65)
