"""Saves of every kind of engine, with and without memory: files equal DeepSpeed's, and load in other topologies."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.formats.deepspeed.files import PUBLISHED, SEAL
from deepspeed_ucp.io.paths import UPLOAD
from deepspeed_ucp.io.store import list_tree, read_small
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import cover, few, params
from tests.support.engines import autoep, experts, muon, nvme, ranks
from tests.support.engines.cases import MIXED, SMALL, Case, Idle
from tests.support.engines.driver import Engines
from tests.support.engines.kinds import ON_CPU, SUMS_IN_FP32, Kind
from tests.support.engines.parallel import join, pipe, plain, resume
from tests.support.engines.ranks import Load, Local
from tests.support.memory import put_folder

pytest.importorskip("moto")


FUSED, LORA, FROZEN = {"optimizer": "fused_adam"}, {"model": "lora"}, {"frozen": True}
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
    "muon": (muon.Kind(2, 2), muon.Kind(3, 2), {}),
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


def save(name: str, folder: str, reference: str, swap: str, steps: int = 2) -> Local:
    """Train, save by DeepSpeed and by the plugin, and continue at once. Return the engine at the last save."""
    kind, _, options = KINDS[name]
    trained = kind.training(1, swap, **options)()
    engine = next(trained)
    for number in range(steps):
        train_steps(trained, 1)
        local = ranks.describe(engine, kind.read)
        with ranks.uninstalled():
            engine.save_checkpoint(reference, str(number))
        engine.save_checkpoint(folder, str(number))
        train_steps(trained, 1)
        assert not find_state(engine).saver.is_owner or find_state(engine).saver.wait()
    ranks.close(engine)
    return local


def load_elsewhere(name: str, folder: str, swap: str) -> Local:
    _, kind, options = KINDS[name]
    engine = next(kind.training(3, swap, **options)())
    path, _ = engine.load_checkpoint(folder)
    local = ranks.describe(engine, kind.read)
    local.path = path
    engine.destroy()
    return local


def test_every_pair_of_options_always_runs() -> None:
    for first, second in combinations((1, 2, 3), 2):
        assert {(row[first], row[second]) for row in ALWAYS} == set(product(FACTORS[first], FACTORS[second]))


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """Serve a bucket. The import is late, because ranks import this module for their functions."""
    with importlib.import_module("tests.stores.server").serve_bucket() as found:
        yield found


PLACE = "s3://bucket"


@pytest.fixture
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if "tmpfs" in request.param else tmp_path) as folder:
        yield folder


@pytest.mark.parametrize(
    ("row", "memory"),
    params([(row, row) for row in ALWAYS], [(row, row) for row in cover(*FACTORS)], lambda row: "-".join(row[0])),
    indirect=["memory"],
)
def test_saves_equal_deepspeeds_and_load_from_memory_in_another_topology(
    row: tuple[str, ...], memory: str, server: Any, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    name, _, copies, place = row
    (source, target, _), world, swap = KINDS[name], ucp_worlds.get(2), str(tmp_path / "swap")
    saved, reference = tmp_path / "saved", tmp_path / "own"
    url = f"{PLACE}/{'-'.join(row)}" if place == "s3" else str(saved)
    section = {
        "memory": "$NODE_MEMORY" if copies == "copied" else memory,
        "copies": int(copies == "copied"),
        "wait_s": 240,
    }
    options = {"save": section, "storage_options": server.options}

    def run(work: Any, *args: Any, **more: Any) -> list[Any]:
        if copies == "copied":
            return list(world.run(ranks.on_nodes, work, memory, *args, **more))
        return list(world.run(work, *args, **more))

    saved_ranks = run(ranks.with_options, options, save, name, url, str(reference), swap)
    ranks.wait_for_marks(url)
    if place == "s3":
        download(url, saved)
    assert [each for each in ranks.files_that_differ(reference, saved) if os.path.basename(each) != SEAL] == []
    found = run(ranks.with_options, options, load_elsewhere, name, url, swap)
    assert all(local.path.startswith(memory) for local in found)
    assert target.compare(source.keep(source.join(saved_ranks)), target.join(found))[1] == []


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
