"""The benchmark of thousands of ranks: messages grow no faster than ranks, and each byte is read once."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.formats.open import open_checkpoint
from deepspeed_ucp.model import count


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmark."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    names = ("collectives", "grid", "jobs", "sample", "scale_plan", "synthetic", "whole")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def make_job(bench: Any, kind: str, times: int) -> Any:
    """Make a job with `times` as many ranks and files."""
    jobs, sizes = bench.jobs, bench.jobs.QUICK_MOE
    if kind == "moe":
        return jobs.make_moe("moe", jobs.MoeSource(sizes, 64 * times, 16), 48 * times)
    source = bench.synthetic.Source(jobs.QUICK_DENSE, 4, 4, 4 * times)
    return jobs.make_dense("dense", source, bench.grid.Grid(jobs.QUICK_DENSE, 4, 4, 3 * times, 1))


def hear(bench: Any, job: Any) -> dict[str, int]:
    """Return the bytes that a rank receives in each step, without those of the model."""
    script = bench.scale_plan.make_script(job, [5])
    steps = bench.scale_plan.Planner(job, script, 5).plan().steps
    return {name: step["received"] for name, step in steps.items() if name not in ("rounds", "copies")}


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.exhaustive), "moe"])
def test_messages_to_a_rank_grow_no_faster_than_the_ranks(bench: Any, kind: str) -> None:
    once, twice = (hear(bench, make_job(bench, kind, times)) for times in (1, 2))
    assert once.keys() == twice.keys()
    assert all(twice[step] <= 2.2 * nbytes for step, nbytes in once.items())


@pytest.mark.parametrize("name", ["dense1-quick", "moe-quick"])
def test_all_ranks_read_every_byte_once(bench: Any, name: str) -> None:
    job = bench.jobs.JOBS[name]()
    headers = {header.name: header for header in job.source.headers()}
    planning = bench.scale_plan
    with planning.stand_in({n: header.size for n, header in headers.items()}, headers.__getitem__):
        index = open_checkpoint(planning.FOLDER, bench.collectives.AllRanks(0, job.ranks))
    plans = bench.whole.plan_all(index, bench.sample.JobTarget(index, job), planning.SIZES, print)
    reads = sorted(read for plan in plans for read in plan.reads)
    assert all(one[0] != two[0] or one[1] + one[2] <= two[1] for one, two in pairwise(reads))
    states = [each for each in index.stored.atoms.values() if each.state != "copy"]
    touched = {f.record for atom in states for shard in atom.shards for f in shard.list_fragments(atom.state)}
    assert sum(read[2] for read in reads) == sum(index.stored.records[record].nbytes for record in touched)


@pytest.mark.parametrize("name", ["dense1-quick", "dense3-quick", "moe-quick"])
def test_a_rank_gets_the_claims_of_its_peers(bench: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, made = bench.jobs.JOBS[name](), {}

    take = bench.scale_plan.Planner._take_tables

    def keep(planner: Any, tables: list[Any]) -> Any:
        made[planner.rank] = tables
        return take(planner, tables)

    monkeypatch.setattr(bench.scale_plan.Planner, "_take_tables", keep)
    ranks = (0, 5, job.ranks - 1)
    script = bench.scale_plan.make_script(job, ranks)
    planned = [bench.scale_plan.Planner(job, script, rank).plan() for rank in ranks]
    for rank in ranks:
        for peer in ranks:
            np.testing.assert_array_equal(script.tables[rank][peer], made[peer][rank])
    assert sum(len(made[peer][rank]) for peer in ranks for rank in ranks)
    for each in planned:
        assert each.read_bytes > 0
        assert each.headers <= each.most_headers + 4, "those that tell which files there are, and a share of the others"


def test_the_models_have_a_trillion_parameters(bench: Any) -> None:
    dense, experts = bench.jobs.JOBS["dense1-1k"](), bench.jobs.JOBS["moe-1k"]()
    assert 1.00e12 < dense.parameters < 1.02e12
    assert 1.00e12 < experts.parameters < 1.04e12
    sizes = dense.source.sizes
    held = [parameter for stage in sizes.stages(dense.source.pp) for parameter in stage]
    tied = sum(count(parameter.shape) for parameter in held if parameter.layer < 0)
    assert sum(count(parameter.shape) for parameter in held) == sizes.parameters + tied // 2
