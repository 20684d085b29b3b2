"""Saves and loads of DeepSpeed's curriculum sampler: samples, clusters and random states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp import rng
from deepspeed_ucp.engine.coverage import has_drawn
from deepspeed_ucp.engine.finish import restore_helpers
from deepspeed_ucp.engine.parallel import Place
from deepspeed_ucp.engine_state import KEY, collect, hand_out
from deepspeed_ucp.load.client import read_objects
from tests.support.curriculum import SIZES, draw, make_engine, make_sampler, make_trained


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "find_place", lambda engine: Place(0, 1, 0, 1, 0, 1))


def read_numpy() -> Any:
    """The state of numpy's global generator."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[1].tolist()


def restore(engine: Any, saved: dict[str, Any]) -> None:
    """Restore a state file as a load does."""
    restore_helpers(engine, saved, with_scheduler=True)
    hand_out(engine, saved)


def test_a_resumed_sampler_draws_what_the_uninterrupted_run_would(tmp_path: Path) -> None:
    """Beyond the end of a cluster, which is then shuffled."""
    sampler, path = make_trained(tmp_path), str(tmp_path / "states.pt")
    engine = make_engine(sampler)
    rng.follow(engine)
    torch.save({**collect(engine, {}), "data_sampler": sampler.state_dict(), "global_steps": 1}, path)
    clusters = {each: each.read_bytes() for each in tmp_path.glob("cluster_*")}
    expected = [draw(sampler) for _ in range(4)]
    for each, data in clusters.items():
        each.write_bytes(data)
    resumed = make_sampler(tmp_path)
    engine = make_engine(resumed)
    rng.follow(engine)
    restore(engine, read_objects(path, trust_pickle=False))
    assert [draw(resumed) for _ in range(4)] == expected


def test_random_states_without_the_samplers_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As from earlier releases; each resume draws the same, but not as at the begin of the run."""
    plain, drawn = make_engine(None), list[float]()
    rng.follow(plain)
    saved = collect(plain, {})
    for _ in range(2):
        engine = make_engine(make_sampler(tmp_path))
        rng.follow(engine)
        assert not caplog.text
        hand_out(engine, dict(saved))
        assert "curriculum sampler was not saved" in caplog.text
        caplog.clear()
        drawn.append(engine.training_dataloader.data_sampler.np_rng.random())
    assert drawn[0] == drawn[1] != make_sampler(tmp_path).np_rng.random()
    assert "data_sampler" not in saved[KEY]["random_states"]["states"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_leaves_no_clusters_of_before_and_numpys_generator_alone(rank: int, tmp_path: Path) -> None:
    saved = {"data_sampler": copy.deepcopy(make_trained(tmp_path).state_dict()), "global_steps": 1}
    sampler, before = make_sampler(tmp_path, rank), np.random.get_state()  # noqa: NPY002
    np.random.seed(8405)  # noqa: NPY002
    try:
        for _ in range(2):
            expected = read_numpy()
            restore(make_engine(sampler), copy.deepcopy(saved))
            assert read_numpy() == expected
            assert sampler.data_cluster_current_position == saved["data_sampler"]["data_cluster_current_position"]
            assert getattr(sampler, "data_cluster_sizes", None) == (None if rank else list(SIZES))
            assert len(getattr(sampler, "data_clusters", ())) == (0 if rank else len(SIZES))
            np.random.rand()  # noqa: NPY002
    finally:
        np.random.set_state(before)  # noqa: NPY002


def test_deepspeeds_load_would_add_clusters(tmp_path: Path) -> None:
    trained = make_trained(tmp_path)
    assert has_drawn(make_engine(trained))
    for sampler in (make_sampler(tmp_path), make_sampler(tmp_path, 1), None):
        assert not has_drawn(make_engine(sampler))
    saved = copy.deepcopy(trained.state_dict())
    trained.load_state_dict(saved)
    assert trained.data_cluster_sizes == [*SIZES, *SIZES], "DeepSpeed has fixed it: remove the warning"
