"""Saves of every kind of engine, with and without memory: files equal DeepSpeed's, and load in other topologies."""

from __future__ import annotations

import errno
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import ConfigError
from deepspeed_ucp.formats.deepspeed.files import PUBLISHED, SEAL
from deepspeed_ucp.io.paths import UPLOAD
from deepspeed_ucp.io.store import list_tree, read_small
from deepspeed_ucp.saves.sizes import _count_saved
from deepspeed_ucp.testing import World, WorldPool
from deepspeed_ucp.testing.capture import capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import cover, few, params
from tests.support.engines import autoep, experts, nvme, ranks
from tests.support.engines.cases import MIXED, SMALL, Case, Idle, make_engine, train_engine
from tests.support.engines.driver import Engines
from tests.support.engines.kinds import ON_CPU, SUMS_IN_FP32, Kind
from tests.support.engines.parallel import join, pipe, plain, resume
from tests.support.engines.ranks import Load, Local
from tests.support.memory import put_folder

pytest.importorskip("moto")

# --- on the ranks


class Save(NamedTuple):
    """Micro steps before a save, its tag, and steps after it.

    Attributes:
        fault: "no room" on all ranks or "runs full" on the last one.
        wait: until it is written; otherwise the next save may replace it.
    """

    steps: int = 1
    tag: str | None = None
    after: int = 0
    fault: str = ""
    wait: bool = True


def save_each(
    training: Any,
    folder: str,
    saves: Sequence[Save],
    *,
    reference: str = "",
    read: Callable[[Any], Any] = capture,
) -> list[Local]:
    """Save several times, in `reference` by DeepSpeed without the plugin. Return the engine at each save."""
    trained, found = training(), list[Local]()
    engine, is_last = next(trained), dist.get_rank() == dist.get_world_size() - 1
    failing = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for number, (steps, tag, after, fault, wait) in enumerate(saves):
        train_steps(trained, steps)
        found.append(ranks.describe(engine, read))
        if reference:
            with ranks.uninstalled():
                engine.save_checkpoint(reference, tag, {"number": number})
        no_room = mock.patch("deepspeed_ucp.saves.budget.count_free", return_value=1000)
        runs_full = mock.patch("deepspeed_ucp.saves.saver.save_in_place", failing)
        with (
            no_room if fault == "no room" else nullcontext(),
            runs_full if fault == "runs full" and is_last else nullcontext(),
        ):
            engine.save_checkpoint(folder, tag, {"number": number})
        train_steps(trained, after)
        saver = find_state(engine).saver
        assert not wait or not saver.is_owner or saver.wait()
    ranks.close(engine)
    return found


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


# --- saves through memory


def run(world: World, memory: object, work: Any, *args: Any, **more: Any) -> list[Any]:
    """Call `work` on every rank; with a memory folder each rank is a node with a folder below it."""
    return list(
        world.run(ranks.on_nodes, work, str(memory), *args, **more) if memory else world.run(work, *args, **more)
    )


def check_files(reference: Path, saved: Path) -> None:
    assert [name for name in ranks.files_that_differ(reference, saved) if os.path.basename(name) != SEAL] == []


def check_loads(
    world: World, target: Case, folder: object, place: object, number: int, saved: Local, memory: object = None
) -> list[Local]:
    """Load `folder` on every rank: from `place`, the save with this number, and its state."""
    answers = run(world, memory, ranks.load_each, target.training(seed=99), [Load(str(folder), steps=1)])
    for (local,) in answers:
        assert local.path.startswith(str(place)) and local.client_state["number"] == number
        assert compare(saved.state, local.state)[1] == []
    return [local for (local,) in answers]


@pytest.mark.parametrize("case", params([Case(3, 2)], [Case(1, 2, "bf16")], str))
def test_saves_at_step_0_in_a_step_and_twice_under_one_tag(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    kind = case.but(config={"gradient_accumulation_steps": 2}).saving(tmp_path / "memory")
    reference, saved = tmp_path / "own", tmp_path / "saved"
    saves = [Save(0), *[Save(1, "twice", wait=False)] * 2]
    ucp_worlds.get(2).run(save_each, kind.training(), str(saved), saves, reference=str(reference))
    ranks.wait_for_marks(saved)
    check_files(reference, saved)
    assert {path.parent.name for path in saved.glob(f"*/{SEAL}")} == {"global_step0", "twice"}
    assert (saved / "latest").read_text() == "twice"


@pytest.mark.parametrize("case", params([Case(3, 2, "bf16")], [Case(1, 2, "bf16")], str))
def test_save_16bit_model_works_while_a_save_is_pending(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """It starts and commits a save of the checkpoint engine."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if case.stage == 3 else {}
    config = case.but(zero=zero).saving(tmp_path / "memory").ds_config
    assert ucp_worlds.get(2).run(save_weights_too, config, str(tmp_path / "saved")) == [[], []]
    assert (tmp_path / "saved" / "latest").read_text() == "global_step1"
    assert (tmp_path / "saved" / "global_step1" / SEAL).exists()


def test_a_save_that_does_not_fit_into_memory_is_written_by_deepspeed(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """No rank waits for one that exhausts memory. The next save uses memory again."""
    training, saved = Case(1, 2).saving(tmp_path / "memory").training(), tmp_path / "saved"
    saves = [Save(fault="no room", wait=False), Save(), Save(fault="runs full", wait=False), Save()]
    ucp_worlds.get(2).run(save_each, training, str(saved), saves)
    sealed = {path.name: (path / SEAL).exists() for path in saved.glob("global_step*")}
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
    (saved,) = world.run(save_each, local.training(), folder, [Save()])[0]
    check_loads(world, local, folder, tmp_path / "memory", 0, saved)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_save_survives_the_loss_of_a_node(lost: int, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Its neighbour has a copy: fewer ranks, or a new empty node, resume without the folder."""
    folder, memory, variable = tmp_path / "saved", tmp_path / "memory", Path("$NODE_MEMORY")
    training = Case(1, 2, "bf16").saving(variable, copies=1).training()
    _, saved = run(ucp_worlds.get(2), memory, save_each, training, str(folder), [Save(), Save()])[0]
    shutil.rmtree(folder)
    for target in few([Case(3, 2), Case(1, 2, "bf16")], 1):
        found = check_loads(ucp_worlds.get(2), target.saving(variable), folder, memory, 1, saved, memory)
        read = sum(rank.bytes_read for rank in found)
        assert read <= 1.02 * found[0].state_bytes  # although two nodes have each file
    shutil.rmtree(memory / f"node{lost}")
    (memory / f"node{1 - lost}").rename(memory / "left")
    for target in few([Case(3, 1), Case(2, 2), Case(1, 2, "bf16"), Case(0, 2)], 1):
        shutil.rmtree(memory / "node1", ignore_errors=True)
        shutil.copytree(memory / "left", memory / "node0", dirs_exist_ok=True)
        check_loads(ucp_worlds.get(target.world), target.saving(variable), folder, memory, 1, saved, memory)


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


# --- of every kind

FUSED, LORA, FROZEN = {"optimizer": "fused_adam"}, {"model": "lora"}, {"frozen": True}
MUON = nvme.Kind(2, 2, muon=True, small=True)
LETTERS, EVEN = pipe(1, 2, method="uniform", world=2, model="eBBh"), plain(2, world=2, model="even")
KINDS: dict[str, tuple[Kind, Kind, dict[str, Any]]] = {
    "zero1": (Case(1, 2, "bf16"), Case(3, 2), {}),
    "zero2": (Case(2, 2), Case(0, 2), {}),
    "zero3": (Case(3, 2, "bf16"), Case(1, 2, "bf16"), {}),
    "bf16": (Case(1, 2, "bf16", config=SUMS_IN_FP32), Case(3, 2, "bf16"), {}),
    "fp16_fused": (Case(0, 2, "fp16"), Case(1, 2), FUSED),
    "fp16_unfused": (Case(0, 2, "fp16"), Case(2, 2, "bf16"), {}),
    "torch": (Case(0, 2), Case(2, 2), {}),
    "pipeline": (LETTERS, LETTERS.but(pp=1), {}),
    "experts": (experts.Spread(2, 2, ep=(2, 1)), experts.Spread(1, 2, ep=(1, 2)), {}),
    "offload": (Case(2, 2, zero=ON_CPU), Case(3, 2), {}),
    "nvme": (nvme.Kind(3, 2, optimizer="nvme", frozen=True), nvme.Kind(1, 2, frozen=True), {}),
    "autotp": (EVEN, EVEN.but(tp=1, stage=3), {}),
    "lora": (Case(1, 2), Case(3, 2), LORA),
    "muon": (MUON, MUON.but(stage=3), {}),
    "autoep": (autoep.Spread(2, 2, ep=2), autoep.Spread(1, 2), FROZEN),
    "params": (Case(3, 2, "bf16", zero={**ON_CPU, "offload_param": {"device": "cpu"}}), Case(2, 2), {}),
    "none": (Idle(0), Idle(3), {}),
}
"""Source, target and options of both on two ranks."""

FACTORS = (tuple(KINDS), ("tmpfs", "disk"), ("alone", "copied"), ("folder", "s3"))
"""Engine, memory, copies on the next node, place."""
ALWAYS = [
    ("zero3", "disk", "copied", "s3"),
    ("pipeline", "tmpfs", "copied", "folder"),
    ("experts", "tmpfs", "alone", "s3"),
    ("nvme", "disk", "alone", "folder"),
]
"""Kinds whose files differ, with every pair of two options; every pair with another kind is exhaustive."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """Serve a bucket. The import is late, because ranks import this module for their functions."""
    with importlib.import_module("tests.stores.server").serve_bucket() as found:
        yield found


PLACE = "s3://bucket"


@pytest.mark.parametrize("row", params([*map(list, ALWAYS)], map(list, cover(*FACTORS)), "-".join))
def test_saves_equal_deepspeeds_and_load_from_memory_in_another_topology(
    row: list[str], server: Any, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """The engine trains on while the save is written."""
    name, kind_of_memory, copies, place = row
    (source, target, options), world, swap = KINDS[name], ucp_worlds.get(2), str(tmp_path / "swap")
    saved, reference = tmp_path / "saved", tmp_path / "own"
    url, is_copied = f"{PLACE}/{'-'.join(row)}" if place == "s3" else str(saved), copies == "copied"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if kind_of_memory == "tmpfs" else tmp_path) as memory:
        section = {"memory": "$NODE_MEMORY" if is_copied else memory, "copies": int(is_copied), "wait_s": 240}
        work = partial(run, world, memory if is_copied else "", ranks.with_options)
        plugin, saves = {"save": section, "storage_options": server.options}, [Save(1, str(n), 1) for n in range(2)]
        training, more = source.training(1, swap, **options), {"reference": str(reference), "read": source.read}
        runs = work(plugin, save_each, training, url, saves, **more)
        ranks.wait_for_marks(url)
        if place == "s3":
            download(url, saved)
        check_files(reference, saved)
        training = target.training(3, swap, **options)
        found = [each for (each,) in work(plugin, ranks.load_each, training, [Load(url)], read=target.read)]
        assert all(local.path.startswith(memory) for local in found)
        state = source.keep(source.join([each[-1] for each in runs]))
        assert target.compare(state, target.join(found))[1] == []


def test_an_engine_loads_from_a_failing_store(server: Any, engines: Engines) -> None:
    """A fresh and a trained engine load. The server fails some requests."""
    from tests.stores.server import fail_first

    source, place = Case(1, 3), f"{PLACE}/run"
    saved = engines.saved(source, **SMALL)
    put_folder(saved.folder, place)
    with server.failing(fail_first(1, "503", having="optim")):
        for case in few([Case(3, 2), source], 1):
            target, loads = case.on(storage_options=server.options), (Load(place), Load(f"{place}/", before=1))
            for outcome in engines.load(target, *loads, **SMALL):
                outcome.check(saved, direct=True)
                assert all(str(local.path).startswith(f"{place}/") for local in outcome.ranks)


def download(url: str, folder: Path) -> None:
    """Copy a store to a folder with the files of each tag in the tag's folder."""
    for name in list_tree(url):
        path = folder / re.sub(rf"{re.escape(UPLOAD)}[^/]+/", "", name)
        if path.name == PUBLISHED:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_small(f"{url}/{name}"))


# --- saves without memory, after a resume, and skipped damaged saves

PAIRS = [
    (Case(1, 3, "bf16"), Case(3, 2, "bf16")),
    (Case(3, 3), Case(1, 2)),
    (Case(0, 3), Case(2, 2)),
    (Case(2, 2, "fp16"), Case(0, 3, "fp16")),
    (Case(3, 2, "bf16"), Case(3, 3, "bf16").on(seal=True)),
    (Case(1, 2), Case(1, 3).on(seal=True)),
    (Case(3, 2), Case(0, 3)),
    (Case(0, 2, "bf16"), Case(1, 3, "bf16", config=SUMS_IN_FP32)),
]
BF16_3D = pipe(2, 2, precision="bf16", fp32_grads=True)
PAIRS_3D = [
    resume(plain(2, 2, world=2), pipe(1, 2, world=2)),
    resume(pipe(2, 2), pipe(1, 2)),
    resume(BF16_3D, pipe(4)),
    resume(pipe(), BF16_3D),
    resume(plain(2, 2, model="llama"), plain(1, 3, sp=2)),
    resume(plain(2, 2, model="llama"), plain(4)),
]
CHOSEN_PAIRS = [PAIRS[0], PAIRS[3], PAIRS[5], PAIRS_3D[0]]


@pytest.mark.parametrize(
    ("source", "target"), params(CHOSEN_PAIRS, [*PAIRS, *PAIRS_3D], lambda pair: "->".join(map(str, pair)))
)
def test_a_save_after_a_resume_loads_in_deepspeed_and_in_the_source(
    source: Kind, target: Kind, engines: Engines, tmp_path: Path
) -> None:
    """DeepSpeed without the plugin loads the source's state, a resume back restores it, and files equal DeepSpeed's."""
    is_case = isinstance(source, Case)
    options = MIXED if is_case else {}
    saved = engines.saved(source, **options)
    (first,) = engines.load(target, Load(str(saved.folder), again=str(tmp_path), steps=2), **options)
    if is_case:
        assert not first.errors and all(local.direct for local in first.ranks)
    else:
        first.check(saved, direct=True, least=81)
    without_plugin = target.but(config={key: value for key, value in target.config.items() if key != "checkpoint"})
    (alone,) = engines.load(without_plugin, tmp_path, plugin=False, **options)
    assert all(local.direct is None for local in alone.ranks)
    if not is_case:
        alone.state = join([mend_copies(local) for local in alone.ranks], target.model)
    found = (
        target.compare(saved.state, alone.state)[1] if is_case else without_plugin.compare(first.state, alone.state)[1]
    )
    assert not found, "\n".join(found[:20])
    assert alone.losses == pytest.approx(first.losses, rel=target.find_tolerance(source))
    if is_case:
        assert describe_files(tmp_path) == describe_files(engines.saved(without_plugin, **options).folder)
        assert any(tmp_path.rglob(SEAL)) == (target != without_plugin)
        (back,) = engines.load(source, tmp_path, **options)
        back.check(saved, direct=True, losses=False)


def mend_copies(local: Local) -> Local:
    """Restore copies that DeepSpeed restores only in the next step: a tied layer with a forward_fn has no file."""
    for name, state in local.state.parameters.items():
        if local.state.parallel.pp_rank and name.startswith("tied_modules.") and state.fp32 is not None:
            state.value = state.fp32.to(state.value.dtype)
    return local


def describe_files(folder: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(folder.rglob("*_states.pt")):
        tree = torch.load(path, weights_only=False)
        tree.pop("ds_config", None)
        found[str(path.relative_to(folder))] = tree_map(describe_value, tree)
    return found


def describe_value(value: Any) -> str:
    return f"{value.dtype}{tuple(value.shape)}" if torch.is_tensor(value) else type(value).__name__


# On one rank stage 3 has no padding, which DeepSpeed saves uninitialised.
@pytest.mark.parametrize("case", [Case(stage, 1 + (stage < 3), "bf16").on() for stage in (0, 1, 2, 3)], ids=str)
def test_plugin_does_not_change_a_save(case: Case, engines: Engines) -> None:
    """Equal trainings with and without the plugin write equal files."""
    ours, theirs = (engines.save(case, plugin=plugin, **MIXED).folder for plugin in (True, False))
    assert ranks.files_that_differ(ours, theirs) == []
    assert any(ours.rglob("*_states.pt"))


NEWEST = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("target", params([Case(2, 2)], [Case(1, 3)], str))
def test_fallback_loads_the_newest_complete_checkpoint(target: Case, engines: Engines) -> None:
    """Also in the same topology. Without a complete one all are listed."""
    folder = engines.save(Case(1, 3), steps=(2, 1), after=0, **MIXED).folder
    (folder / NEWEST).unlink()
    (refused,) = engines.load(target, folder, **MIXED)
    refused.check_refused("CheckpointError")
    (outcome,) = engines.load(target.on(fallback=True), folder, **MIXED)
    for rank, local in enumerate(outcome.ranks):
        assert local.state.counters["global_steps"] == 2
        warnings = local.list_messages("WARNING", "skipped")
        assert len(warnings) == (rank == 0) and all(Path(NEWEST).name in text for text in warnings)
    (folder / NEWEST.replace("step3", "step2")).unlink()
    (refused,) = engines.load(target.on(fallback=True), folder, **MIXED)
    refused.check_refused("CheckpointError", "none of its 2 checkpoints", "global_step2", "global_step3")
