"""Random states in another topology, and of the curriculum sampler."""

from __future__ import annotations

import copy
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp import rng
from deepspeed_ucp.engine.coverage import has_drawn
from deepspeed_ucp.engine.finish import restore_helpers
from deepspeed_ucp.engine.parallel import ParallelState
from deepspeed_ucp.engine_state import KEY, collect, load_carried
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.load.client import read_objects
from tests.support.curriculum import SIZES, draw, make_engine, make_sampler, make_trained


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "find_parallel_state", lambda engine: ParallelState(0, 1, 0, 1, 0, 1))


Degrees = tuple[int, int, int]
DEGREES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
AXES = st.sets(st.integers(0, 2)).map(lambda axes: tuple(sorted(axes)))


def list_ranks(degrees: Degrees) -> list[ParallelState]:
    pp, tp, dp = degrees
    return [ParallelState(t, tp, p, pp, d, dp) for p, t, d in product(range(pp), range(tp), range(dp))]


def make_states(degrees: Degrees, axes: tuple[int, ...]) -> dict[rng.Coords, rng.State]:
    """Make a state for each rank; states differ along these axes."""
    return {coords: (str(rng.project(coords, axes)),) for coords in map(rng.find_coords, list_ranks(degrees))}


def read_file(states: dict[rng.Coords, rng.State], saved: Degrees, parallel: ParallelState) -> dict[str, Any]:
    """Make the file that a rank reads: its file at the saved model-parallel degrees, else rank 0's file.

    The first data-parallel rank of a model-parallel rank writes it.
    """
    file = (parallel.pp_rank, parallel.tp_rank) if (parallel.pp, parallel.tp) == saved[:2] else (0, 0)
    known = [(coords, {"torch": state}) for coords, state in states.items() if coords[:2] == file]
    return rng.make_record(known, {"torch": rng.find_axes(states)}, 11, 5)


@given(DEGREES, AXES)
def test_each_rank_of_an_unchanged_topology_restores_its_random_states(degrees: Degrees, axes: tuple[int, ...]) -> None:
    states = make_states(degrees, axes)
    for parallel in list_ranks(degrees):
        assert (
            rng.find_state(read_file(states, degrees, parallel), "torch", parallel) == states[rng.find_coords(parallel)]
        )


@given(DEGREES, DEGREES, AXES)
def test_random_states_that_differed_between_ranks_differ_in_another_topology(
    saved: Degrees, live: Degrees, axes: tuple[int, ...]
) -> None:
    """Ranks keep the states in the file that they read."""
    states, found = make_states(saved, axes), dict[rng.Coords, rng.State | int]()
    kept = rng.find_axes(states)
    for parallel in list_ranks(live):
        record, coords = read_file(states, saved, parallel), rng.find_coords(parallel)
        found[coords] = state = rng.find_state(record, "torch", parallel)
        at = rng.project(coords, kept)
        assert state == states[at] if at in record["states"]["torch"] else isinstance(state, int)
    for one, other in product(found, repeat=2):
        assert (found[one] == found[other]) is (rng.project(one, kept) == rng.project(other, kept))


@pytest.mark.parametrize("known", [True, False])
def test_tracker_states_of_one_tensor_parallel_rank_are_made_different_on_several(known: bool) -> None:
    """Tracker states are known to differ only along this axis. Other states are shared."""
    held = {"tracker:a": ("a",), "torch": ("t",)}
    record = rng.make_record([((0, 0, 0), held)], dict.fromkeys(held, ()), 11, 5)
    record |= {"degrees": (1, 1, 1)} if known else {}
    for name, state in held.items():
        found = [rng.find_state(record, name, parallel) for parallel in list_ranks((1, 2, 2))]
        assert found[:2] == [state, state]
        assert (found[2:] == [state, state]) is not (known and name == "tracker:a")
        assert found[2] == found[3]


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_restoring_a_generator_continues_its_sequence(name: str) -> None:
    draws = {"python": lambda: random.gauss(0, 1), "numpy": np.random.randn, "torch": lambda: torch.randn(1).item()}
    generator = rng.list_generators()[name]
    generator.seed(3)
    draws[name]()  # the state includes the second of a pair of normal numbers
    state = generator.read()
    first = [draws[name]() for _ in range(700)]
    generator.seed(4)
    generator.write(*state)
    assert [draws[name]() for _ in range(700)] == first


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """A CPU generator as that of a GPU, behind the functions of `torch.cuda` and DeepSpeed's accelerator."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.random, "_lazy_call", lambda call, **_: call())
    monkeypatch.setattr(torch.cuda.random, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(rng, "get_accelerator", CUDA_Accelerator)
    monkeypatch.setattr(get_cuda_rng_tracker(), "states_", {"mp": torch.Generator().manual_seed(9).get_state()})
    return generator


def test_a_gpus_generators_go_on(cuda: torch.Generator) -> None:
    """Also that of a tracker; a rank that the saved run had not gets a new state, and another tracker."""
    saver, states = make_engine(None), get_cuda_rng_tracker().states_
    rng.follow(saver)
    cuda.manual_seed(3)
    torch.rand(5, generator=cuda)
    client, before, tracked = collect(saver, {}), cuda.get_state(), states["mp"].clone()
    assert {"accelerator", "tracker:mp"} <= client[KEY]["random_states"]["states"].keys()
    expected = torch.rand(700, generator=cuda)
    cuda.manual_seed(4)
    states["mp"] = cuda.get_state()
    loader = make_engine(None)
    rng.follow(loader)
    load_carried(loader, copy.deepcopy(client))
    assert cuda.get_state().equal(before) and states["mp"].equal(tracked)
    assert torch.rand(700, generator=cuda).equal(expected)
    parallel, known = ParallelState(1, 2, 0, 1, 0, 1), rng.list_generators()
    saved = {**client[KEY]["random_states"], "axes": dict.fromkeys(known, (1,))}
    assert {"accelerator", "tracker:mp"} <= set(rng.restore_generators(saved, parallel, known))
    seeds = [rng.find_state(saved, name, parallel) for name in ("accelerator", "tracker:mp")]
    for seed, state in zip(seeds, (cuda.get_state(), states["mp"]), strict=True):
        assert isinstance(seed, int) and state.equal(torch.Generator().manual_seed(seed).get_state())


@pytest.mark.parametrize("position", [-1, 625, 2**31 - 1])
def test_a_numpy_state_with_an_invalid_position_is_refused(position: int) -> None:
    generator, parallel = rng.list_generators()["numpy"], ParallelState(0, 1, 0, 1, 0, 1)
    kind, words, _, *rest = before = generator.read()
    saved = rng.make_record(
        [(rng.find_coords(parallel), {"numpy": (kind, words, position, *rest)})], {"numpy": ()}, 1, 2
    )
    with pytest.raises(CheckpointError, match=f"numpy cannot be restored.*position {position}"):
        rng.restore_generators(saved, parallel, {"numpy": generator})
    assert generator.read() == before


def record_here(**more: rng.State) -> dict[str, Any]:
    """Make the record of a single rank with this process's states and others."""
    states = more | {name: each.read() for name, each in rng.list_generators().items()}
    return rng.make_record([((0, 0, 0), states)], dict.fromkeys(states, ()), 1, 2)


def test_a_saved_tracker_that_the_script_lacks_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """For example, the script may load before it seeds its tensor-parallel ranks."""
    for name in ("python", "accelerator", "tracker:mp"):
        rng.restore(None, record_here(**{name: (b"",)}))
        assert ("tracker:mp" in caplog.text) is (name == "tracker:mp")


@pytest.mark.parametrize(
    ("degrees", "dp", "logs"), [((1, 1, 1), 2, True), ((1, 1, 2), 2, False), ((1, 1, 1), 1, False), (3, 2, False)]
)
def test_a_random_state_that_all_live_ranks_share_is_logged(
    degrees: Any, dp: int, logs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "deepspeed_ucp")
    monkeypatch.setattr(rng, "find_parallel_state", lambda engine: ParallelState(0, 1, 0, 1, 0, dp))
    rng.restore(None, {**record_here(), "degrees": degrees})
    assert (f"with which all {dp} continue" in caplog.text) is logs


@pytest.mark.parametrize(
    "saved",
    [
        *({}, [], {"version": 1}, {"version": 1, "axes": {"python": (7,)}, "states": {"python": 3}}),
        {"version": 9, "seed": 1, "step": 2, "axes": {}, "states": {}},
    ],
)
def test_random_states_of_an_unknown_form_are_refused(saved: Any) -> None:
    with pytest.raises(CheckpointError, match="random state"):
        rng.restore(None, saved)


# -- the curriculum sampler --------------------------------------------------------------------------------------------


def restore(engine: Any, saved: dict[str, Any]) -> None:
    restore_helpers(engine, saved, with_scheduler=True)
    load_carried(engine, saved)


def test_a_resumed_curriculum_sampler_draws_the_samples_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """It draws beyond the end of a cluster, which is then shuffled."""
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


def test_a_missing_random_state_of_the_sampler_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For example a save of an earlier release: all resumes draw equal samples, but not those of the first run."""
    plain, drawn = make_engine(None), list[float]()
    rng.follow(plain)
    saved = collect(plain, {})
    for _ in range(2):
        engine = make_engine(make_sampler(tmp_path))
        rng.follow(engine)
        assert not caplog.text
        load_carried(engine, dict(saved))
        assert "curriculum sampler was not saved" in caplog.text
        caplog.clear()
        drawn.append(engine.training_dataloader.data_sampler.np_rng.random())
    assert drawn[0] == drawn[1] != make_sampler(tmp_path).np_rng.random()
    assert "data_sampler" not in saved[KEY]["random_states"]["states"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_replaces_clusters_and_keeps_numpys_generator(rank: int, tmp_path: Path) -> None:
    saved = {"data_sampler": copy.deepcopy(make_trained(tmp_path).state_dict()), "global_steps": 1}
    sampler, before = make_sampler(tmp_path, rank), np.random.get_state()  # noqa: NPY002
    np.random.seed(8405)  # noqa: NPY002
    try:
        for _ in range(2):
            expected = repr(np.random.get_state())  # noqa: NPY002
            restore(make_engine(sampler), copy.deepcopy(saved))
            assert repr(np.random.get_state()) == expected  # noqa: NPY002
            assert sampler.data_cluster_current_position == saved["data_sampler"]["data_cluster_current_position"]
            assert getattr(sampler, "data_cluster_sizes", None) == (None if rank else list(SIZES))
            assert len(getattr(sampler, "data_clusters", ())) == (0 if rank else len(SIZES))
            np.random.rand()  # noqa: NPY002
    finally:
        np.random.set_state(before)  # noqa: NPY002


def test_deepspeeds_load_of_a_sampler_appends_clusters(tmp_path: Path) -> None:
    trained = make_trained(tmp_path)
    assert has_drawn(make_engine(trained))
    for sampler in (make_sampler(tmp_path), make_sampler(tmp_path, 1), None):
        assert not has_drawn(make_engine(sampler))
    saved = copy.deepcopy(trained.state_dict())
    trained.load_state_dict(saved)
    assert trained.data_cluster_sizes == [*SIZES, *SIZES], "DeepSpeed has fixed it: remove the warning"
