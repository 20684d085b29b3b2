"""The benchmark of thousands of ranks: messages grow no faster than ranks, and each rank gets its peers' claims."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.model.storage import count


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmark."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in ("dense", "jobs", "moe", "scale_plan")})


def make_job(bench: Any, kind: str, times: int) -> Any:
    """Make a job with `times` as many ranks and files."""
    jobs = bench.jobs
    if kind == "moe":
        source, target = (bench.moe.MoeRanks(jobs.QUICK_MOE, ranks * times, 16) for ranks in (64, 48))
        return jobs.make_moe(source, target)
    source, target = (bench.dense.DenseRanks(jobs.QUICK_DENSE, 4, 4, dp * times) for dp in (4, 3))
    return jobs.make_dense(source, target)


def count_received(bench: Any, job: Any) -> dict[str, int]:
    """Return the bytes that a rank receives in each step."""
    script = bench.scale_plan.make_script(job, [5])
    planned = bench.scale_plan.Planner(job, script, 5).plan()
    return planned.received | {f"after the plan: {name}": size for name, size in planned.received_later.items()}


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.exhaustive), "moe"])
def test_messages_to_a_rank_grow_no_faster_than_the_ranks(bench: Any, kind: str) -> None:
    once, twice = (count_received(bench, make_job(bench, kind, times)) for times in (1, 2))
    assert once.keys() == twice.keys()
    assert all(twice[step] <= 2.2 * nbytes for step, nbytes in once.items())


@pytest.mark.parametrize("name", ["dense1-quick", "dense3-quick", "moe-quick"])
def test_a_rank_gets_the_claims_of_its_peers(bench: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, sent = bench.jobs.QUICK_JOBS[name], {}

    take = bench.scale_plan.Planner._take_tables

    def record(planner: Any, tables: list[Any]) -> Any:
        sent[planner.rank] = tables
        return take(planner, tables)

    monkeypatch.setattr(bench.scale_plan.Planner, "_take_tables", record)
    ranks = (0, 5, job.ranks - 1)
    script = bench.scale_plan.make_script(job, ranks)
    planned = [bench.scale_plan.Planner(job, script, rank).plan() for rank in ranks]
    for rank in ranks:
        for peer in ranks:
            np.testing.assert_array_equal(script.tables[rank][peer], sent[peer][rank])
    assert sum(len(sent[peer][rank]) for peer in ranks for rank in ranks)
    for each in planned:
        assert each.requests > 0
        assert each.headers <= each.most_headers + 4, "more than four and a share of the rest"


def test_the_models_have_a_trillion_parameters(bench: Any) -> None:
    dense, experts = bench.jobs.JOBS["dense1-10k"].source, bench.jobs.JOBS["moe-10k"].source
    assert 1.00e12 < dense.sizes.parameters < 1.02e12
    assert 1.00e12 < experts.sizes.parameters < 1.04e12
    parameters = [parameter for stage in dense.sizes.list_stages(dense.pp) for parameter in stage]
    tied = sum(count(parameter.shape) for parameter in parameters if parameter.layer < 0)
    assert sum(count(parameter.shape) for parameter in parameters) == dense.sizes.parameters + tied // 2
