"""`deepspeed_ucp.testing`: the differences that it finds, and failures of its worlds."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_ucp.testing import (
    Launch,
    ResumeReport,
    World,
    WorldFailure,
    WorldPool,
    WorldTimeout,
    assert_resume_equivalent,
)
from deepspeed_ucp.testing.capture import CapturedEngine, CapturedParameter
from deepspeed_ucp.testing.compare import compare
from tests.support.engines.cases import Case, make_engine, train_engine
from tests.support.until import wait_until

SOURCE, TARGET = (Launch(case.world, case.ds_config) for case in (Case(1, 2), Case(3, 1)))


def train(ds_config: dict[str, Any], model: str = "plain", **options: Any) -> Generator[Any, None, None]:
    engine = make_engine(ds_config, model, **options)
    yield engine
    yield from train_engine(engine)


@pytest.mark.releases
@pytest.mark.engine_smoke
def test_the_resume_equivalence_fixture_reports_no_difference(resume_equivalence: Callable[..., ResumeReport]) -> None:
    report = resume_equivalence(train, source=SOURCE, target=TARGET, steps=(2, 2))
    assert (report.parameters, report.states, report.direct) == (4, 16, True)
    assert len(report.reference_losses) == len(report.resumed_losses) == 2
    assert 0 <= report.max_loss_gap < 1e-5


def test_a_launch_may_be_a_dict_with_a_folder(ucp_worlds: WorldPool) -> None:
    source, target = map(vars, (SOURCE, TARGET))
    report = assert_resume_equivalent(train, source=source, target=target, worlds=ucp_worlds)
    assert report.direct


def spoiled(ds_config: dict[str, Any], spoil: str) -> Generator[Any, None, None]:
    """Train with an engine that a load does not restore."""
    steps = train(ds_config, model="mixed", scheduler=True)
    engine = next(steps)
    load = engine.load_checkpoint

    def load_and_spoil(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        SPOILS[spoil][0](engine)
        return loaded

    engine.load_checkpoint = load_and_spoil
    yield engine
    for loss in steps:
        yield loss + (0.1 if spoil == "loss" and ds_config["zero_optimization"]["stage"] == 3 else 0.0)


def spoil_weight(engine: Any) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    parameter = dict(engine.module.named_parameters())["last.weight"]
    value = safe_get_full_fp32_param(parameter)
    value[0, 3] += 1e-7
    safe_set_full_fp32_param(parameter, value)


SPOILS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "weight": (spoil_weight, ("last.weight", "fp32", "1 of 5 elements", "(0, 3)")),
    "moment": (
        lambda engine: [state["exp_avg_sq"].mul_(1.0000002) for state in engine.optimizer.optimizer.state.values()],
        ("first.weight", "exp_avg_sq"),
    ),
    "buffer": (
        lambda engine: engine.module.mask[2].logical_not_(),
        ("buffer mask", "1 of 3 elements", "(2,)", "True", "False"),
    ),
    "steps": (
        lambda engine: setattr(engine, "global_steps", engine.global_steps + 1),
        ("global_steps", "saved 2, loaded 3"),
    ),
    "rate": (lambda engine: engine.optimizer.param_groups[1].update(lr=0.5), ("first.bias", "lr", "0.5")),
    "loss": (id, ("step 1 after the resume", "relative gap")),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_resume_equivalence_finds_spoiled_state(spoil: str, resume_equivalence: Callable[..., ResumeReport]) -> None:
    with pytest.raises(AssertionError) as caught:
        resume_equivalence(partial(spoiled, spoil=spoil), source=SOURCE, target=TARGET, steps=(2, 1))
    for word in SPOILS[spoil][1]:
        assert word in str(caught.value)


def rank() -> int:
    return int(os.environ["RANK"])


def gather_ranks() -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, rank())
    return found


def fail_on(which: int, how: str = "raise", here: str = "") -> int:
    """Raise, exit or hang on one rank; others return, or wait for it."""
    if rank() == which:
        if how == "exit":
            os._exit(3)
        if how == "hang":
            Path(here).touch()
            time.sleep(600)
        raise ValueError(f"rank {which} cannot go on")
    if how == "others-wait":
        dist.barrier()
    return rank()


def test_several_calls_on_one_world_and_its_end() -> None:
    """Ranks are stopped between calls. A closed world leaves no processes or files."""
    with World(2) as world:
        pids, folder = world.run(os.getpid), world._folder
        assert world.run(gather_ranks) == [[0, 1], [0, 1]]
        wait_until(lambda: [state_of(pid) for pid in pids] == ["T", "T"])
        assert world.run(os.getpid) == pids
        assert len({*pids, os.getpid()}) == 3
        buffers = set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
    with pytest.raises(RuntimeError, match="closed"):
        world.run(os.getpid)
    assert not folder.exists()
    assert not [pid for pid in pids if state_of(pid) not in ("", "Z", "X")]
    assert not [left for left in buffers if str(world._port) in left.name]


def state_of(pid: int) -> str:
    """Return the state of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.parametrize("how", ["others-return", "others-wait"])
def test_an_error_of_a_rank_is_raised_in_the_caller(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_ucp.testing.world._GRACE", 1.0)
    with pytest.raises(ValueError, match="rank 1 cannot go on") as caught, World(2) as world:
        world.run(fail_on, 1, how)
    assert isinstance(caught.value.__cause__, WorldFailure)
    assert "fail_on" in caught.value.__cause__.errors[1]


def make_tensors() -> list[Any]:
    strided = torch.arange(12, dtype=torch.int16).view(3, 4)
    return [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        strided.t(),
        strided[0, ::2],
        strided.to(torch.bfloat16),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([[0.0, 1.0]]).to_sparse(),
    ]


def test_tensors_returned_by_ranks_are_unchanged(ucp_worlds: WorldPool) -> None:
    for wanted, tensor in zip(make_tensors(), ucp_worlds.get(1).run(make_tensors)[0], strict=True):
        assert type(tensor) is type(wanted)
        assert tensor.requires_grad is wanted.requires_grad
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)


def test_a_hung_rank_is_an_error_with_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for `wait` expires after the rank hangs and the other one has answered."""
    here, timeouts = tmp_path / "here", list[float]()

    def wait(connections: list[Any], seconds: float) -> list[Any]:
        timeouts.append(seconds)
        if len(connections) == 2:
            return list(multiprocessing.connection.wait(connections))
        wait_until(here.exists)
        return []

    monkeypatch.setattr("deepspeed_ucp.testing.world.wait", wait)
    with World(2) as world, pytest.raises(WorldTimeout) as caught:
        world.run(fail_on, 1, "hang", str(here), timeout=500)
    assert 500 >= timeouts[0] > timeouts[1] >= 0
    assert list(caught.value.errors) == [1]
    assert "fail_on" in caught.value.errors[1]  # the stack of the rank


@pytest.mark.parametrize(("which", "code"), [(1, 3), (0, -9)], ids=["in a call", "between two calls"])
def test_the_death_of_a_rank_is_an_error(which: int, code: int) -> None:
    with World(2) as world:
        pids = world.run(os.getpid)
        if code < 0:
            os.kill(pids[which], -code)
        with pytest.raises(WorldFailure) as caught:
            world.run(fail_on, -1 if code < 0 else which, "exit")
    assert f"exit code {code}" in caught.value.errors[which]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_pool_replaces_a_broken_world() -> None:
    with WorldPool() as worlds:
        pids = worlds.get(1).run(os.getpid)
        with pytest.raises(ValueError, match="rank 0"):
            worlds.get(1).run(fail_on, 0)
        assert worlds.get(1).run(os.getpid) != pids


@pytest.mark.parametrize("world_size", [0, -1])
def test_world_size_is_positive(world_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        World(world_size)


def test_schedulers_are_compared_except_for_fields_that_another_torch_release_lacks() -> None:
    rows = [
        ({"last_epoch": 3}, {"last_epoch": 3, "_is_initial": 0, "verbose": 0}, 0),
        ({"last_epoch": 3}, {"last_epoch": 4}, 1),
        ({"gamma": 1, "verbose": 0}, {"verbose": 0}, 1),
        *(({}, None, 1), (None, {}, 1), (None, None, 0)),
    ]
    for saved, loaded, count in rows:
        states = (CapturedEngine({}, {}, {}, scheduler, None) for scheduler in (saved, loaded))
        assert len(compare(*states)[1]) == count


def test_a_step_count_that_was_not_loaded_is_a_difference() -> None:
    """It is no difference if the optimizer keeps it in the group or has no states yet."""
    ones = torch.ones(2)
    for scalars, hyper, tensors, count in (
        ({"step": 3.0}, {}, {"exp_avg": ones}, 0),
        ({}, {"step": 3}, {"exp_avg": ones}, 0),
        ({}, {}, {"exp_avg": ones}, 1),
        ({"step": 2.0}, {}, {"exp_avg": ones}, 1),
        ({}, {}, {}, 1),
    ):
        saved = CapturedParameter(ones, ones, {"exp_avg": ones}, {"step": 3.0})
        loaded = CapturedParameter(ones, ones, tensors, scalars, hyper)
        engines = (CapturedEngine({"w": each}, {}, {}, None, None) for each in (saved, loaded))
        assert len(compare(*engines)[1]) == count
