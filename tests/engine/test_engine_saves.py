"""Saves through memory and snapshots: files equal to DeepSpeed's, complete before `latest` names them; loads."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_ucp import preemption, rng, snapshots
from deepspeed_ucp.data import ElasticSampler
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import ConfigError, StorageError
from deepspeed_ucp.saves.sizes import _count_saved
from deepspeed_ucp.testing import World, WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import few, params
from tests.support.engines import ranks
from tests.support.engines.cases import BATCH, FEATURES, Case, make_engine, train_engine
from tests.support.engines.parallel import pipe
from tests.support.engines.ranks import Load, Local

MIB_FREE = "deepspeed_ucp.saves.budget.count_free"


# --- on the ranks


class Save(NamedTuple):
    """Micro steps before a save, its tag, and a fault: "no room" on all ranks or "runs full" on the last one."""

    steps: int = 1
    tag: str | None = None
    fault: str = ""


def save_each(
    ds_config: dict[str, Any], folder: str, saves: Sequence[Save], *, reference: str = ""
) -> list[CapturedEngine]:
    """Save several times, in `reference` by DeepSpeed without the plugin. Return the state at each save."""
    engine, is_last = make_engine(ds_config), dist.get_rank() == dist.get_world_size() - 1
    trained, states = train_engine(engine), list[CapturedEngine]()
    failing = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for number, (steps, tag, fault) in enumerate(saves):
        train_steps(trained, steps)
        if reference:
            with ranks.uninstalled():
                engine.save_checkpoint(reference, tag, {"number": number})
        no_room = mock.patch(MIB_FREE, return_value=1000) if fault == "no room" else nullcontext()
        runs_full = fault == "runs full" and is_last
        with no_room, mock.patch("deepspeed_ucp.saves.saver.save_over", failing) if runs_full else nullcontext():
            engine.save_checkpoint(folder, tag, {"number": number})
        states.append(capture(engine))
        saver = find_state(engine).saver
        assert tag or fault or not saver.is_owner or saver.wait()  # otherwise the next save replaces it
    ranks.close(engine)
    return states


def save_weights_too(ds_config: dict[str, Any], folder: str) -> list[str]:
    """Save, then save the 16-bit weights. Return the names of weights that differ from the engine's."""
    engine = make_engine(ds_config)
    train_steps(train_engine(engine), 1)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "weights.bin")
    dist.barrier()  # rank 0 writes it
    found = torch.load(os.path.join(folder, "weights.bin"), weights_only=True)
    state = capture(engine)
    held = {name: each.value for name, each in state.parameters.items()} | state.buffers
    differing = [name for name, tensor in held.items() if name not in found or not tensor.equal(found[name])]
    ranks.close(engine)
    return differing


def forecast(ds_config: dict[str, Any], free: int) -> tuple[str, int, int]:
    """Return the messages of a new engine, and the expected bytes of a save before and after a step."""
    with (
        mock.patch("deepspeed_ucp.saves.sizes.count_free", return_value=free),
        mock.patch("deepspeed_ucp.saves.saver.logger.info") as log,
    ):
        engine = make_engine(ds_config)
    before = _count_saved(engine)
    train_steps(train_engine(engine), 1)
    after = _count_saved(engine)
    engine.destroy()
    return "".join(call.args[0] % call.args[1:] for call in log.call_args_list), before, after


# --- tests

TWICE = [Save(), Save()]


def check_files(folder: Path, count: int) -> None:
    ranks.wait_for_marks(folder / "saved")
    assert len(list((folder / "saved").glob("*/ucp_seal.json"))) == count
    differing = ranks.files_that_differ(folder / "own", folder / "saved")
    assert [name for name in differing if os.path.basename(name) != "ucp_seal.json"] == []


def check_loads(
    world: World, target: Case, folder: object, place: object, number: int, state: CapturedEngine, memory: Any = None
) -> list[Local]:
    """Load `folder` on every rank: from `place`, the save with this number, and its state.

    Args:
        memory: each rank is a node with a memory folder below this one.
    """
    work: tuple[Any, ...] = (ranks.load_each, target.training(seed=99), [Load(str(folder), steps=1)])
    answers = world.run(*work) if memory is None else world.run(ranks.on_nodes, work[0], str(memory), *work[1:])
    for (local,) in answers:
        assert local.path.startswith(str(place)) and local.client_state["number"] == number
        assert compare(state, local.state)[1] == []
    return [local for (local,) in answers]


@pytest.mark.parametrize("case", params([Case(3, 2)], [Case(1, 2, "bf16")], str))
def test_saves_at_step_0_in_a_step_and_twice_under_one_tag(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    config = {**case.saving(tmp_path / "memory").ds_config, "gradient_accumulation_steps": 2}
    saves = [Save(0), Save(1, "twice"), Save(1, "twice")]
    ucp_worlds.get(2).run(save_each, config, str(tmp_path / "saved"), saves, reference=str(tmp_path / "own"))
    check_files(tmp_path, 2)
    assert {path.name for path in (tmp_path / "saved").glob("*/")} == {"global_step0", "twice"}
    assert (tmp_path / "saved" / "latest").read_text() == "twice"


@pytest.mark.parametrize("case", params([Case(3, 2, "bf16")], [Case(1, 2, "bf16")], str))
def test_save_16bit_model_works_while_a_save_is_pending(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """It starts and commits a save of the checkpoint engine."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if case.stage == 3 else {}
    config = case.but(zero=zero).saving(tmp_path / "memory").ds_config
    assert ucp_worlds.get(2).run(save_weights_too, config, str(tmp_path / "saved")) == [[], []]
    assert (tmp_path / "saved" / "latest").read_text() == "global_step1"
    assert (tmp_path / "saved" / "global_step1" / "ucp_seal.json").exists()


def test_a_save_that_does_not_fit_into_memory_is_written_by_deepspeed(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """No rank waits for one that exhausts memory. The next save uses memory again."""
    config, saved = Case(1, 2).saving(tmp_path / "memory").ds_config, tmp_path / "saved"
    saves = [Save(fault="no room"), Save(), Save(fault="runs full"), Save()]
    ucp_worlds.get(2).run(save_each, config, str(saved), saves)
    sealed = {path.name: (path / "ucp_seal.json").exists() for path in saved.glob("global_step*")}
    assert not sealed.pop("global_step1", True)
    assert (sealed["global_step3"], sealed["global_step4"]) == (False, True)
    assert (saved / "latest").read_text() == "global_step4"


@pytest.mark.exhaustive
def test_saves_to_node_local_folders_do_not_use_memory(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """No node could detect that all files are complete, so no save would be sealed. A single node uses memory."""
    options = {"memory": str(tmp_path / "memory$RANK"), "copies": 1}
    local = Case(1, 2, "bf16", config={"checkpoint": {"use_node_local_storage": True, "universal": {"save": options}}})
    world, nodes = ucp_worlds.get(2), [str(tmp_path / f"node{node}") for node in range(2)]
    world.run(ranks.on_nodes, ranks.save, "", local.training(), tuple(nodes))
    parts = [{path.name for path in Path(node).rglob("*optim_states.pt")} for node in nodes]
    assert all(parts) and not parts[0] & parts[1]
    assert not [*tmp_path.glob("memory*/**/*_states.pt")]
    options["memory"] = str(tmp_path / "memory")
    folder = str(tmp_path / "one")
    (state,) = world.run(save_each, local.ds_config, folder, TWICE[:1])[0]
    check_loads(world, local, folder, tmp_path / "memory", 0, state)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_save_survives_the_loss_of_a_node(lost: int, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Its neighbour has a copy: fewer ranks, or a new empty node, resume without the folder."""
    folder, memory, variable = tmp_path / "saved", tmp_path / "memory", Path("$NODE_MEMORY")
    config = Case(1, 2, "bf16").saving(variable, copies=1).ds_config
    states = ucp_worlds.get(2).run(ranks.on_nodes, save_each, str(memory), config, str(folder), TWICE)[0]
    shutil.rmtree(folder)
    for target in few([Case(3, 2), Case(1, 2, "bf16")], 1):
        loader = target.saving(variable)
        found = check_loads(ucp_worlds.get(2), loader, folder, memory, 1, states[1], memory=memory)
        assert (
            sum(rank.bytes_read for rank in found) <= 1.02 * found[0].state_bytes
        )  # although two nodes have each file
    shutil.rmtree(memory / f"node{lost}")
    (memory / f"node{1 - lost}").rename(memory / "left")
    for target in few([Case(3, 1), Case(2, 2), Case(1, 2, "bf16"), Case(0, 2)], 1):
        shutil.rmtree(memory / "node1", ignore_errors=True)
        shutil.copytree(memory / "left", memory / "node0", dirs_exist_ok=True)
        world = ucp_worlds.get(target.world)
        check_loads(world, target.saving(variable), folder, memory, 1, states[1], memory=memory)


@pytest.mark.parametrize("case", params([Case(1, 2, "bf16"), Case(3, 2)], [Case(0, 2), Case(2, 1, "fp16")], str))
def test_a_new_engine_logs_the_expected_memory_of_saves(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """It includes states that the first step creates, without counters of steps."""
    config, world = case.saving(tmp_path / "memory").ds_config, ucp_worlds.get(case.world)
    answers = world.run(forecast, config, 1 << 30)
    message = f"a save takes about 0 MiB of {tmp_path / 'memory'} on a node, where 1,024 MiB are free"
    assert [each[0] for each in answers] == [message, *[""] * (case.world - 1)]
    for _, before, after in answers:
        assert before <= after < before + 100
    needed = int(1.05 * sum(before for _, before, _ in answers))
    assert "it does not hold two, so the last one is deleted" in world.run(forecast, config, needed)[0][0]
    with pytest.raises(ConfigError, match=r"where 0 MiB are free\. Give the container more memory"):
        world.run(forecast, config, needed - 1)


# --- snapshots: saves without a call of the script; a killed run resumes from them

SAMPLES = 3 * BATCH


# --- on the ranks


@contextmanager
def follow(engine: Any, folder: str, *, every: Any, **options: Any) -> Iterator[list[int]]:
    """Take snapshots of an engine until the block ends. Yield the list of their steps."""
    steps, take = list[int](), snapshots._take

    def record(followed: Any, argument: Any, client_state: Any) -> None:
        steps.append(followed.global_steps)
        take(followed, argument, client_state)

    with mock.patch.object(snapshots, "_take", record):
        snapshots.follow(engine, folder, every=every, **options)
        yield steps
    ranks.close(engine)


@dataclass
class Trained:
    """One rank's part of a run: its start, samples and random number of each step, states after steps, snapshots."""

    step: int
    client_state: dict[str, Any]
    begun: CapturedEngine
    draws: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    states: dict[int, CapturedEngine] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)


def train(
    ds_config: dict[str, Any], folder: str, steps: int, *, every: int, seed: int, saves: dict[int, str] | None = None
) -> Trained:
    """Load and train on the sampler's batches; `saves`: by step the folder of a save after it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = make_engine(ds_config, "plain", seed=seed)
    sampler = ElasticSampler(SAMPLES, BATCH, rank=rank, world=world, seed=1)
    sampler.follow(engine)
    rng.follow(engine)
    torch.manual_seed(100 * seed + rank)
    with follow(engine, folder, every=every, client_state=lambda: {"ended": engine.global_steps}) as taken:
        _, found = engine.load_checkpoint(folder)
        client_state = {name: value for name, value in (found or {}).items() if name in ("ended", "saved")}
        run = Trained(engine.global_steps, client_state, capture(engine), taken=taken)
        for _ in range(steps):
            samples = list(islice(sampler, BATCH // world))
            noise = torch.rand(1)  # drawn for the batch, before the engine is called
            run.draws[engine.global_steps] = samples, noise.item()
            batch = torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, FEATURES) / SAMPLES + noise
            engine.backward(engine(batch).square().mean())
            engine.step()
            run.states[engine.global_steps] = capture(engine)
            if place := (saves or {}).get(engine.global_steps):
                engine.save_checkpoint(place, client_state={"saved": engine.global_steps})
            with torch.no_grad():
                engine.eval()
                if rank == 0 and not engine.zero_optimization_partition_weights():  # alone
                    engine(batch)
                engine.train()
    return run


def train_by_the_clock(ds_config: dict[str, Any], folder: str, seconds: dict[int, float], steps: int) -> list[int]:
    """List the steps of snapshots every 5 s, on ranks whose clocks differ; `seconds`: by first step."""
    engine, now = make_engine(ds_config), 1000.0 * dist.get_rank()
    trained, save_checkpoint, step = train_engine(engine), engine.save_checkpoint, engine.step

    def save_slowly(*args: Any, **more: Any) -> None:
        nonlocal now
        now += 0.5
        save_checkpoint(*args, **more)

    def step_slowly(*args: Any, **more: Any) -> None:
        nonlocal now
        now += max((at, took) for at, took in seconds.items() if at <= engine.global_steps)[1] - 0.01 * dist.get_rank()
        step(*args, **more)

    engine.save_checkpoint, engine.step = save_slowly, step_slowly
    with (
        mock.patch.object(snapshots, "monotonic", side_effect=lambda: now),
        follow(engine, folder, every="5s") as taken,
    ):
        train_steps(trained, steps)
    return taken


def train_until_signaled(ds_config: dict[str, Any], folder: str) -> list[int]:
    """List the steps of snapshots; a signal arrives in the step after which a snapshot is due."""
    engine = make_engine(ds_config, "plain")
    trained = train_engine(engine)
    preemption.follow(engine, folder)
    with follow(engine, folder, every=2) as taken:
        for number in range(7):
            if number == 3 and dist.get_rank():
                os.kill(os.getpid(), signal.SIGUSR1)
            train_steps(trained, 1)
    return taken


def call_the_module(ds_config: dict[str, Any], folder: str) -> list[int]:
    """List the steps of snapshots of a training by `engine.module`, which does not report the begin of a step."""
    engine = make_engine(ds_config, "plain")
    with follow(engine, folder, every=2) as taken:
        for _ in range(6):
            engine.backward(engine.module(torch.ones(1, FEATURES)).square().mean())
            engine.step()
    return taken


def train_without_room(ds_config: dict[str, Any], folder: str) -> tuple[list[int], list[str]]:
    """Return the steps of snapshots that at first do not fit into memory, and the warnings."""
    engine, warnings = make_engine(ds_config), list[str]()
    trained = train_engine(engine)
    warn = mock.patch.object(snapshots.logger, "warning", lambda text, *args: warnings.append(text % args))
    with warn, follow(engine, folder, every=2) as taken:
        with mock.patch("deepspeed_ucp.saves.budget.count_free", return_value=1000):
            train_steps(trained, 5)
        train_steps(trained, 2)
        if dist.get_rank():
            find_state(engine).snapshots.client_state = mock.Mock(side_effect=StorageError("the client's"))
        train_steps(trained, 4)
    return taken, warnings


def train_pipeline(make: Any, folder: str) -> tuple[list[int], dict[int, CapturedEngine]]:
    """Return the steps of snapshots of a pipeline, and the state at the end of each step."""
    trained, states = make(), dict[int, CapturedEngine]()
    engine = next(trained)
    with follow(engine, folder, every=2) as taken:
        for _ in range(5):
            next(trained)
            states[engine.global_steps] = capture(engine)
            if engine.global_steps == 2:
                engine.save_checkpoint(folder)
    return taken, states


# --- tests


@pytest.mark.parametrize(
    ("source", "target"),
    [(Case(3, 2), Case(2, 3)), pytest.param(Case(1, 2), Case(1, 2), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_a_run_resumes_from_a_snapshot(source: Case, target: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Samples and random numbers continue, too. A save of the script to the folder replaces a snapshot."""
    folder, elsewhere = str(tmp_path / "saved"), str(tmp_path / "elsewhere")
    config, saves = source.saving(tmp_path / "memory").ds_config, {2: folder, 6: elsewhere}
    whole = ucp_worlds.get(2).run(train, config, folder, 7, every=2, seed=1, saves=saves)
    assert [each.taken for each in whole] == [[4, 6]] * 2
    ranks.wait_for_marks(folder)
    assert [path.name for path in (tmp_path / "saved").glob("*_step*")] == ["global_step2"]
    assert (tmp_path / "elsewhere" / "latest").read_text() == "global_step6"
    world, config = ucp_worlds.get(target.world), target.saving(tmp_path / "memory").ds_config
    for rank, each in enumerate(world.run(train, config, folder, 1, every=5, seed=2)):
        assert (each.step, each.client_state, each.taken) == (6, {"ended": 6}, [])
        assert compare(whole[0].states[6], each.begun)[1] == []
        if target.world == 2:
            assert each.draws[6] == whole[rank].draws[6]
            assert compare(whole[rank].states[7], each.states[7])[1] == []
    shutil.rmtree(tmp_path / "memory")
    for each in world.run(train, config, folder, 0, every=5, seed=3):
        assert (each.step, each.client_state) == (2, {"saved": 2})


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        pytest.param({0: 1.0}, [5, 10, 15], marks=pytest.mark.exhaustive),  # constant duration of steps
        ({0: 0.1, 10: 2.1}, [12, 14, 16]),  # at ten steps a second step 50 would be due
    ],
)
def test_all_ranks_take_snapshots_by_one_clock(
    seconds: dict[int, float], taken: list[int], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    work = (
        train_by_the_clock,
        Case(1, 2).saving(tmp_path / "memory").ds_config,
        str(tmp_path / "saved"),
        seconds,
        taken[-1] + 1,
    )
    assert ucp_worlds.get(2).run(*work) == [taken] * 2


def test_a_signaled_job_saves_only_once(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    work = train_until_signaled, Case(1, 2).saving(tmp_path / "memory").ds_config, str(tmp_path / "saved")
    assert ucp_worlds.get(2).run(*work) == [[2, 6]] * 2
    assert (tmp_path / "saved" / "latest").read_text() == "global_step4"


def test_snapshots_are_taken_at_step_ends_if_the_engine_is_not_called(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    config = Case(1, 2).saving(tmp_path / "memory").ds_config
    assert ucp_worlds.get(2).run(call_the_module, config, str(tmp_path)) == [[3, 5]] * 2


def test_training_continues_if_a_snapshot_fails(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The folder remains empty, and each cause is logged once."""
    work = train_without_room, Case(1, 2).saving(tmp_path / "memory").ds_config, str(tmp_path / "saved")
    (taken, warnings), (_, others) = ucp_worlds.get(2).run(*work)
    assert taken == [2, 4, 6] and others == []
    assert len(warnings) == 2 and "no snapshot of step 2" in warnings[0] and "MiB are free" in warnings[0]
    assert "no snapshot of step 8" in warnings[1] and "the client's" in warnings[1]
    assert not (tmp_path / "saved").exists()


@pytest.mark.exhaustive
def test_stages_of_a_pipeline_take_snapshots_at_the_same_step(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    make = pipe(1, 2, method="uniform", world=2, model="EBBH").saving(tmp_path / "memory").training()
    world, folder = ucp_worlds.get(2), str(tmp_path / "saved")
    runs = world.run(train_pipeline, make, folder)
    for (taken, states), (local,) in zip(runs, world.run(ranks.load_each, make, [Load(folder)]), strict=True):
        assert (taken, local.state.counters["global_steps"]) == ([4], 4)
        assert compare(states[4], local.state)[1] == []
