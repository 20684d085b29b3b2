"""The planning benchmark: a tiny model's plan, and whether the claims that it works out for peers are the real ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.atoms import count
from deepspeed_ucp.load.job import make_job
from deepspeed_ucp.load.negotiate import BLOCK
from deepspeed_ucp.plan import address_claims, locate, make_claims

RANK = 5


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmark, which is a folder of scripts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    return pytest.importorskip("plan")


@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_peers_claims_are_those_that_they_would_make(bench: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BLOCK", 4096)  # many blocks of a tiny model
    source, grid = bench.choose_case(case, True)
    script = bench.make_script(source, grid, RANK)
    make_target = bench.list_targets(grid)
    planner = bench.Planner(grid, RANK)
    index = planner.build(source.headers())
    told = [lambda _: [pickle.loads(blob) for blob in script.returns]]
    match, layouts = planner.relate(index, make_target(RANK), bench.ScriptedComm(RANK, grid.ranks, told))
    peers = bench.Peers(index, match, layouts, grid, RANK, script.mask)
    for rank in (0, 1, RANK, grid.ranks - 1):
        target = make_target(rank)
        job = make_job(index, target, peers.match_for(target), [], layouts, with_states=True)
        pieces = [piece for want in job.wants for piece in locate(want)]
        claims = make_claims(pieces, lambda buffer, job=job: job.sinks[buffer].fresh, 4096)
        expected = address_claims(claims, peers.blocks)[0][RANK]
        assert len(expected)
        np.testing.assert_array_equal(script.tables[rank], expected)


@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_a_rank_wants_its_part_of_the_state_and_plans_to_read_about_that(bench: Any, case: str) -> None:
    source, grid = bench.choose_case(case, True)
    planned = bench.plan_one(bench.make_script(source, grid, RANK))
    held = bench.list_targets(grid)(RANK)
    assert planned.wanted_bytes == 3 * 4 * sum(cut.numel for flat in held.flats for cut in flat.cuts)
    blocks = -(-12 * source.sizes.parameters // grid.ranks) + 3 * BLOCK
    assert 0 < planned.read_bytes <= planned.wanted_bytes + blocks
    assert planned.most_headers == -(-(planned.headers - 2) // grid.ranks)


def test_the_paper_s_model_has_a_trillion_parameters(bench: Any) -> None:
    source, grid = bench.choose_case("zero1", False)
    assert 1.00e12 < source.sizes.parameters < 1.02e12
    assert (source.ranks, grid.ranks) == (1024, 768)
    held = [parameter for stage in source.sizes.stages(source.pp) for parameter in stage]
    tied = sum(count(parameter.shape) for parameter in held if parameter.layer < 0)
    assert sum(count(parameter.shape) for parameter in held) == source.sizes.parameters + tied // 2
