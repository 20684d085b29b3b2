"""The hook: the choice between the plugin's and DeepSpeed's loader."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import WarmupLR

import deepspeed_ucp
from deepspeed_ucp.engine import engines
from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import capture
from deepspeed_ucp.testing.compare import compare
from tests.support.covering import params
from tests.support.engines.cases import MIXED, SMALL, Case, make_engine
from tests.support.engines.driver import Engines, Outcome, Row, Saved
from tests.support.engines.kinds import ON_CPU
from tests.support.engines.ranks import Load, Local, load_each, on_nodes, save

SAME = [Case(stage, 2, precision) for precision in ("fp32", "bf16", "fp16") for stage in range(4)]
"""All wrappers of `known.py`. The model has frozen parameters and buffers. ZeRO in fp16 always runs at one stage."""

MORE = [pytest.mark.exhaustive]

OFFLOADED = [Case(2, 2, "bf16", zero=ON_CPU), Case(3, 2, zero={**ON_CPU, "offload_param": {"device": "cpu"}})]
OURS = [Case(0, 2, "bf16"), Case(1, 2, "bf16"), Case(2, 2), Case(3, 2, "fp16")]
"""The plugin loads these, too, if requested."""


def check_deepspeeds_load(_saved: Saved, outcome: Outcome) -> None:
    """Check that DeepSpeed's load runs between two INFO messages."""
    for rank, local in enumerate(outcome.ranks if not outcome.ranks[0].direct else ()):
        assert "same topology" in local.reason
        assert [" loaded in " in text for text in local.list_messages("INFO")] == ([False, True] if rank == 0 else [])


ROWS = [
    Row(case, [case], "same", MIXED, check=check_deepspeeds_load, marks=marks)
    for cases, marks in ((SAME[:8], [pytest.mark.engine_smoke]), (SAME[8::3], []), (OFFLOADED, []), (SAME[9:11], MORE))
    for case in cases
]
EXACT = {"direct": True, "tolerance": 0.0}
ROWS += [Row(case.on(same_topology="direct"), [case], "ours", MIXED, compared=EXACT) for case in OURS]


@pytest.mark.releases
@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_deepspeed_loads_an_unchanged_topology(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "sent"])
def test_gather_in_place_completes_partitions(shared: bool, ucp_worlds: WorldPool) -> None:
    """Partitions have one element or several slices."""
    for partition in (1, (5 << 20) + 3):
        assert ucp_worlds.get(2).run(gather_partitions, partition, shared=shared) == [True, True]


def gather_partitions(partition: int, *, shared: bool) -> bool:
    """Return True if `gather_in_place` completes a buffer, through shared memory or without."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(size * partition, dtype=torch.float32).to(torch.bfloat16)
    flat = torch.full_like(whole, -1)
    flat.view(size, -1)[rank] = whole.view(size, -1)[rank]
    alone = [memoryview(b"") if each == rank else None for each in range(size)]
    with nullcontext() if shared else mock.patch.object(engines, "share_memory", return_value=alone):
        engines.gather_in_place(flat, None)
    return flat.equal(whole)


def test_changed_batch_and_clipping_are_logged_in_an_unchanged_topology(engines: Engines) -> None:
    target = Case(1, 2, config={"train_batch_size": 30, "gradient_clipping": 0.5})
    # DeepSpeed finds no checkpoint in a tag's folder.
    tag_folder = find_checkpoint(str(engines.saved(Case(1, 2), **SMALL).folder))
    (outcome,) = engines.load(target, Load(tag_folder), **SMALL)
    first = outcome.ranks[0]
    found = [[message for message in each.log if "differs from the saved one" in message[1]] for each in outcome.ranks]
    assert (first.direct, first.calls, found[1]) == (False, 1, [])
    assert Path(str(first.path)).parent == Path(tag_folder)
    ((level, text),) = found[0]
    changes = "total batch 60 → 30, gradient_clipping 0.0 → 0.5 (the saved value is used)"
    assert (level, text.partition("saved one: ")[2]) == ("WARNING", changes)


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_plugin_loads_if_only_one_side_has_a_scheduler(is_saved: bool, engines: Engines) -> None:
    """DeepSpeed's load would ignore a saved scheduler, and fail without one."""
    saved = engines.saved(Case(1, 2), **{**SMALL, "scheduler": is_saved})
    (outcome,) = engines.load(Case(1, 2), Load(str(saved.folder)), **{**SMALL, "scheduler": not is_saved})
    assert not outcome.errors and all(local.direct for local in outcome.ranks)
    assert outcome.list_messages("WARNING", f"only {'the checkpoint' if is_saved else 'this engine'} has lr_scheduler")


@pytest.mark.parametrize(("saved", "live"), [(True, WarmupLR), (WarmupLR, True)], ids=["torch's", "DeepSpeed's"])
def test_a_scheduler_of_another_kind_in_the_same_topology(saved: Any, live: Any, engines: Engines) -> None:
    """DeepSpeed's load would fail in the middle, or begin the schedule again."""
    run = engines.saved(Case(1, 2), **{**SMALL, "scheduler": saved})
    (outcome,) = engines.load(Case(1, 2), Load(str(run.folder)), **{**SMALL, "scheduler": live})
    kind = "WarmupLR" if saved is True else "LambdaLR"
    outcome.check_refused("The saved lr_scheduler is of another kind", f"this run's {kind}", "load_lr_scheduler_states")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_node_local_files_load_like_one_folder(stage: int, tmp_path: Path, engines: Engines) -> None:
    """DeepSpeed loads if each node has its ranks' files; otherwise the plugin loads them to the bit."""
    options = {"universal": {"seal": True}, "use_node_local_storage": True}
    local = Case(stage, 2, "bf16", config={"checkpoint": options})
    other, world = local.but(stage=4 - stage), engines.get(local)
    nodes = tuple(str(tmp_path / f"node{node}") for node in range(2))

    def load(case: Case, *folders: str) -> list[Local]:
        work = on_nodes, load_each, "", case.training(**SMALL), [Load(folders, steps=1)]
        return [rank for (rank,) in world.run(*work)]

    world.run(on_nodes, save, "", local.training(**SMALL), nodes)
    assert [(tmp_path / f"node{node}" / "latest").exists() for node in range(2)] == [True, False]
    deepspeeds = load(local, *nodes)
    for rank in deepspeeds:
        assert (rank.calls, rank.direct) == (1, False)
        assert "each rank's own files" in rank.reason
    for node in nodes[::-1]:  # each node has the model states below ZeRO 3: rank 0's overwrite the others
        shutil.copytree(node, tmp_path / "shared", dirs_exist_ok=True)
    (outcome,) = engines.load(other.but(config={}), Load(str(tmp_path / "shared"), steps=1), **SMALL)
    for folders in (nodes, nodes[::-1]):
        for one, two in zip(outcome.ranks, load(other, *folders), strict=True):
            assert two.direct
            assert compare(one.state, two.state)[1] == []
            assert (one.client_state, one.losses) == (two.client_state, two.losses)
    for one, two in zip(deepspeeds, load(local, *nodes[::-1]), strict=True):
        assert (one.direct, two.direct) == (False, True)
        assert compare(one.state, two.state)[1] == []


@pytest.mark.parametrize("config", params([{"checkpoint": {"universal": False}}], [{}, {"checkpoint": {}}], str))
def test_deepspeed_loads_without_the_universal_flag(config: dict[str, Any], engines: Engines) -> None:
    folder, kind = str(engines.saved(Case(1, 2), **SMALL).folder), Case(1, 2, config=config)
    for (local,) in engines.get(kind).run(load_each, kind.training(1, **SMALL), [Load(folder)]):
        assert (local.calls, local.log, local.direct, local.reason) == (1, [], None, "")


def test_uninstall_removes_the_hook_after_two_installs(ucp_worlds: WorldPool) -> None:
    assert ucp_worlds.get(2).run(count_wrappers) == [[0, 1, 1, 0, 0, 1]] * 2


def count_wrappers() -> list[int]:
    """Count the wrappers of DeepSpeed's method after each change."""
    found = []
    for name in ("uninstall", "install", "install", "uninstall", "uninstall", "install"):
        getattr(deepspeed_ucp, name)()
        found.append(0)
        method = DeepSpeedEngine.load_checkpoint
        while hasattr(method, "__wrapped__"):
            method, found[-1] = method.__wrapped__, found[-1] + 1
    return found


def test_engines_with_and_without_the_plugin_in_one_process(engines: Engines) -> None:
    saved, case = engines.saved(Case(1, 3), **SMALL), Case(1, 2)
    work = two_engines, case.on().ds_config, case.ds_config, str(saved.folder)
    for state, error, reports in engines.get(case).run(*work):
        assert compare(saved.state, state)[1] == []
        assert "world size" in error
        assert "imported but off for this engine" in error
        assert reports == [True, None]


def two_engines(on: dict[str, Any], off: dict[str, Any], folder: str) -> tuple[Any, str, list[Any]]:
    first, second = (make_engine(config, **SMALL) for config in (on, off))
    error = ""
    try:
        second.load_checkpoint(folder)
    except Exception as raised:  # noqa: BLE001 - the test checks the error
        error = "\n".join([str(raised), *getattr(raised, "__notes__", [])])
    first.load_checkpoint(folder)
    found = capture(first), error, [first.ucp_report.direct, getattr(second, "ucp_report", None)]
    first.destroy()
    second.destroy()
    return found


def test_preserve_batch_size_changes_the_engines_batch_sizes(ucp_worlds: WorldPool) -> None:
    """``tests/test_config.py`` has other sizes."""
    config = Case(1, 3).on(preserve_batch_size=True).ds_config
    config |= {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    assert ucp_worlds.get(3).run(read_batch_sizes, config) == [(12, 2, 2)] * 3


def read_batch_sizes(ds_config: dict[str, Any]) -> tuple[int, int, int]:
    engine = make_engine(ds_config, "plain")
    sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    engine.destroy()
    return sizes
