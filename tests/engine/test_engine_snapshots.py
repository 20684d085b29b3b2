"""Snapshots: saves that no script asks for, and what a run that was killed goes on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.compare import compare
from tests.support.engines import snapshots as engine_snapshots
from tests.support.engines.cases import Case
from tests.support.engines.parallel import Launch, training


def saving(case: Case, memory: Path, **options: Any) -> dict[str, Any]:
    return case.but(config={"checkpoint": section(memory, **options)}).ds_config


def section(memory: Path, **options: Any) -> dict[str, Any]:
    return {"universal": {"save": {"memory": str(memory), "wait_s": 60, **options}}}


@pytest.mark.parametrize(("source", "target"), [(Case(1, 2), Case(1, 2)), (Case(3, 2), Case(2, 3))], ids=str)
def test_a_run_goes_on_from_the_last_one(source: Case, target: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """With its samples and random numbers; where the script saves to the folder it makes none, whatever the steps."""
    folder, elsewhere = str(tmp_path / "saved"), str(tmp_path / "elsewhere")
    options: dict[str, Any] = {"every": 2, "saves": {2: folder, 6: elsewhere}}
    config = saving(source, tmp_path / "memory")
    whole = ucp_worlds.get(2).run(engine_snapshots.go_on, config, folder, 7, seed=1, **options)
    assert [each.taken for each in whole] == [[4, 6]] * 2
    assert [path.name for path in (tmp_path / "saved").glob("*_step*")] == ["global_step2"]
    assert (tmp_path / "elsewhere" / "latest").read_text() == "global_step6"
    ranks, config = target.dp, saving(target, tmp_path / "memory")
    rest = ucp_worlds.get(ranks).run(engine_snapshots.go_on, config, folder, 1, seed=2, every=5, saves={})
    for rank, each in enumerate(rest):
        assert each.found == (6, {"ended": 6}) and each.taken == []
        assert compare(whole[0].states[6], each.begun)[1] == []
        if ranks == 2:
            assert each.draws[6] == whole[rank].draws[6]
            assert compare(whole[rank].states[7], each.states[7])[1] == []
    shutil.rmtree(tmp_path / "memory")
    without = ucp_worlds.get(ranks).run(engine_snapshots.go_on, config, folder, 0, seed=3, every=5, saves={})
    assert [each.found for each in without] == [(2, {"saved": 2})] * ranks


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({0: 1.0}, [5, 10, 15]),
        ({0: 0.1, 10: 2.1}, [12, 14, 16]),  # at ten steps a second it would have been step 50
    ],
)
def test_all_ranks_go_by_one_clock(
    seconds: dict[int, float], taken: list[int], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    config = saving(Case(1, 2), tmp_path / "memory")
    arguments: tuple[Any, ...] = (config, str(tmp_path / "saved"), seconds)
    told = ucp_worlds.get(2).run(engine_snapshots.by_the_clock, *arguments, taken[-1] + 1)
    assert told == [taken] * 2


def test_a_job_that_is_told_to_go_saves_once(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    config = saving(Case(1, 2), tmp_path / "memory")
    told = ucp_worlds.get(2).run(engine_snapshots.be_told, config, str(tmp_path / "saved"))
    assert told == [[2, 6]] * 2
    assert (tmp_path / "saved" / "latest").read_text() == "global_step4"


def test_without_calls_of_the_engine_they_are_taken_where_a_step_ends(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    config = saving(Case(1, 2), tmp_path / "memory")
    assert ucp_worlds.get(2).run(engine_snapshots.call_the_module, config, str(tmp_path)) == [[3, 5]] * 2


def test_one_that_fails_stops_no_training(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The folder gets nothing in its place; a warning is given once."""
    config = saving(Case(1, 2), tmp_path / "memory")
    (taken, told), (_, others) = ucp_worlds.get(2).run(engine_snapshots.fail, config, str(tmp_path / "saved"))
    assert taken == [2, 4, 6] and others == []
    assert len(told) == 2 and "no snapshot of step 2" in told[0] and "MiB are free" in told[0]
    assert "no snapshot of step 8" in told[1] and "the client's" in told[1]
    assert not (tmp_path / "saved").exists()


def test_a_pipelines_stages_take_them_together(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    launch = Launch(1, 2, method="uniform", world=2)
    trained = training("EBBH", launch, section(tmp_path / "memory"))
    folder = str(tmp_path / "saved")
    told = ucp_worlds.get(2).run(engine_snapshots.pipeline, trained, folder)
    again = ucp_worlds.get(2).run(engine_snapshots.load, trained, folder)
    for (taken, states), (step, state) in zip(told, again, strict=True):
        assert (taken, step) == ([4], 4) and compare(states[4], state)[1] == []
