"""The choice between both loaders; arguments and return value of `load_checkpoint`, compared with DeepSpeed's load."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
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
from deepspeed_ucp.testing.capture import CapturedEngine
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import params
from tests.support.curriculum import make_sampler
from tests.support.engines.cases import MIXED, SMALL, Case, make_engine, train_engine
from tests.support.engines.driver import Engines, Outcome, Row, Saved, Source
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


SAME_ROWS = [
    Row(case, [case], "same", MIXED, check=check_deepspeeds_load, marks=marks)
    for cases, marks in ((SAME[:8], [pytest.mark.engine_smoke]), (SAME[8::3], []), (OFFLOADED, []), (SAME[9:11], MORE))
    for case in cases
]
SAME_ROWS += [Row(Case(1, 2, config={"checkpoint": {"universal": False}}), [Case(1, 2)], "off", SMALL)]
EXACT = {"direct": True, "tolerance": 0.0}
SAME_ROWS += [Row(case.on(same_topology="direct"), [case], "ours", MIXED, compared=EXACT) for case in OURS]


@pytest.mark.releases
@pytest.mark.parametrize("row", [row.param for row in SAME_ROWS])
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


@pytest.mark.parametrize(("saved", "live"), [(True, False), (False, True), (True, WarmupLR), (WarmupLR, True)], ids=str)
def test_another_scheduler_in_the_same_topology(saved: Any, live: Any, engines: Engines) -> None:
    """DeepSpeed's load would ignore a saved one, fail without one or in the middle, or begin the schedule again."""
    run = engines.saved(Case(1, 2), **{**SMALL, "scheduler": saved})
    (outcome,) = engines.load(Case(1, 2), Load(str(run.folder)), **{**SMALL, "scheduler": live})
    if saved and live:
        kind = "WarmupLR" if saved is True else "LambdaLR"
        words = ("The saved lr_scheduler is of another kind", f"this run's {kind}", "load_lr_scheduler_states")
        outcome.check_refused(*words)
    else:
        assert not outcome.errors and all(local.direct for local in outcome.ranks)
        assert outcome.list_messages("WARNING", f"only {'the checkpoint' if saved else 'this engine'} has lr_scheduler")


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


def test_an_engine_without_the_plugin_fails_with_a_note(engines: Engines) -> None:
    """Other engines of the process have the plugin."""
    folder, case = str(engines.saved(Case(1, 3), **SMALL).folder), Case(1, 2)
    for (local,) in engines.get(case).run(load_each, case.training(77, **SMALL), [Load(folder)], catch=True):
        assert (local.calls, local.log, local.direct) == (1, [], None)
        assert "world size" in local.error and "imported but off for this engine" in local.error


def test_uninstall_removes_the_hook_after_two_installs() -> None:
    """The wrappers of DeepSpeed's method are counted after each change."""
    found = []
    for name in ("uninstall", "install", "install", "uninstall", "uninstall", "install"):
        getattr(deepspeed_ucp, name)()
        found.append(0)
        method = DeepSpeedEngine.load_checkpoint
        while hasattr(method, "__wrapped__"):
            method, found[-1] = method.__wrapped__, found[-1] + 1
    assert found == [0, 1, 1, 0, 0, 1]


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


# --- arguments and return value, compared with DeepSpeed's load in the same topology

OPTIONS = {"model": "bulk", "scheduler": True}
SOURCES = [Case(stage, 3, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
TARGETS = {0: Case(1, 2), 1: Case(3, 2), 2: Case(0, 2), 3: Case(2, 2)}

# Loads of one engine, in this order: only weights while its optimizer is fresh, then states after a training step, to
# see the states that an argument keeps.
ARGUMENTS: dict[str, Load] = {
    "load_module_only": Load("", {"load_module_only": True}),
    "weights-without-scheduler": Load("", {"load_optimizer_states": False, "load_lr_scheduler_states": False}),
    "load_optimizer_states": Load("", {"load_optimizer_states": False}),
    "load_lr_scheduler_states": Load("", {"load_lr_scheduler_states": False}, before=1),
    "defaults": Load("", before=1),
}
WEIGHTS = ["load_module_only", "load_optimizer_states"]


def target_of(source: Case) -> Case:
    return TARGETS[source.stage].but(precision=source.precision)


def load(engines: Engines, target: Case, *loads: Load, **options: Any) -> list[Outcome]:
    outcomes = engines.load(target, *loads, read_before=True, **options)
    for outcome in outcomes:
        assert not outcome.errors, outcome.errors[0]
        assert all(local.direct for local in outcome.ranks if local.path)
    return outcomes


@pytest.mark.parametrize("source", params([SOURCES[at] for at in (0, 3, 6)], SOURCES, str))
def test_arguments_have_the_same_effect_as_in_deepspeeds_load(
    source: Case, engines: Engines, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Each wrapper is tested in one precision."""
    saved = engines.saved(source, **OPTIONS)
    loads = [Load(str(saved.folder), each.arguments, before=each.before) for each in ARGUMENTS.values()]
    empty, *ours = load(engines, target_of(source), Load(str(tmp_path)), *loads, **OPTIONS)
    theirs = engines.load(source, *loads, plugin=False, **OPTIONS)
    assert (empty.ranks[0].path, empty.ranks[0].client_state) == (None, None)  # like DeepSpeed's load
    assert empty.state.counters["global_steps"] == 0
    for called, outcome, other in zip(ARGUMENTS, ours, theirs, strict=True):
        with subtests.test(called=called):
            check_answers(outcome.ranks[0], other.ranks[0])
            if called == "defaults":
                outcome.check(saved, direct=True)
            if called in WEIGHTS:
                check_weights(outcome.ranks[0], saved.state)


def check_answers(live: Local, upstream: Local) -> None:
    assert live.path == upstream.path
    assert live.client_state is not None and upstream.client_state is not None
    # DeepSpeed returns these tensors, too; the plugin does not read them a second time.
    tensors = {"optimizer", "frozen_param_fragments"}
    assert sorted(live.client_state.keys() - tensors) == sorted(upstream.client_state.keys() - tensors)
    for key in ("deepspeed_ucp_testing", "lr_scheduler", "ds_version", "global_samples"):
        assert live.client_state.get(key) == upstream.client_state.get(key)
    assert live.state.counters == upstream.state.counters
    assert live.state.scheduler == upstream.state.scheduler


def check_values(found: CapturedEngine, saved: CapturedEngine, renamed: str = "") -> None:
    """Check that weights equal the saved ones and agree with their masters."""
    for name, state in found.parameters.items():
        assert state.value.equal(saved.parameters[name.replace(renamed, "last.") if renamed else name].value)
        assert state.fp32 is not None and state.fp32.to(state.value.dtype).equal(state.value)


def check_weights(local: Local, saved: CapturedEngine) -> None:
    """Check that weights equal the saved ones, and that moments and hyper-parameters are unchanged."""
    check_values(local.state, saved)
    for name, state in local.state.parameters.items():
        assert all(not tensor.any() for tensor in state.tensors.values())
        assert state.hyper["weight_decay"] == local.before.parameters[name].hyper["weight_decay"]


def test_the_plugin_keeps_state_that_deepspeeds_load_would_lose(engines: Engines) -> None:
    """At stage 0 in 16 bit: masters in a load of only weights, and live hyper-parameters if requested."""
    case = Case(0, 2, "bf16").on(param_groups="live")
    saved = engines.saved(Case(0, 3, "bf16"), **OPTIONS)
    folder, tag_folder = str(saved.folder), find_checkpoint(str(saved.folder))
    loads = [
        Load(folder, ARGUMENTS[WEIGHTS[1]].arguments),
        Load(tag_folder, {WEIGHTS[0]: True}, before=1),
        Load(tag_folder),
    ]
    outcomes = load(engines, case, *loads, **OPTIONS, optimizer="adam_like_fused")
    weights, module, whole = (outcome.ranks[0] for outcome in outcomes)
    assert "load_optimizer_states" in weights.reason and "load_module_only" in module.reason
    for local in (weights, module):
        check_values(local.state, saved.state)
    for name, before in saved.state.parameters.items():
        state = whole.state.parameters[name]
        assert state.fp32.equal(before.fp32)
        assert state.hyper["lr"] == before.hyper["lr"]  # the value of the scheduler
        assert state.hyper["betas"] == (0.9, 0.999) != before.hyper["betas"]
    (warning,) = whole.list_messages("WARNING", "hyper-parameters")
    assert "saved: betas (0.8, 0.95) → (0.9, 0.999); this run's are kept" in warning


@pytest.mark.parametrize("target", [Case(0, 2, "bf16"), Case(1, 2, "bf16")], ids=str)
def test_both_loaders_warn_about_edited_hyper_parameters(target: Case, engines: Engines) -> None:
    """Each warns once, but not about a rate that a scheduler changed, nor about equal values."""
    folder = str(engines.saved(Case(0, 3, "bf16"), **OPTIONS).folder)
    outcomes = engines.load(target, Load(folder), Load(folder, before=1), **OPTIONS, optimizer="adam_like_fused")
    assert [outcome.ranks[0].direct for outcome in outcomes] == [target.stage == 1] * 2
    by_rank = zip(*(outcome.ranks for outcome in outcomes), strict=True)
    (warning,), *others = [local.list_messages("WARNING", "hyper-parameters") for rank in by_rank for local in rank]
    assert "saved: betas (0.8, 0.95) → (0.9, 0.999); the saved ones are taken" in warning and folder in warning
    assert others == [[]] * 3


@pytest.mark.parametrize("source", params([Case(3, 3)], [Case(1, 3)], str))
def test_the_tag_argument_selects_a_save_and_latest_is_the_default(source: Case, engines: Engines) -> None:
    folder = str(engines.save(source, steps=[1, 1], **SMALL).folder)
    tags = {None: 2, "global_step1": 1, "global_step2": 2}
    loads = [Load(folder, {"tag": tag} if tag else {}) for tag in tags]
    for outcome, steps in zip(load(engines, target_of(source), *loads, **SMALL), tags.values(), strict=True):
        assert outcome.state.counters["global_steps"] == steps
        assert f"global_step{steps}" in str(outcome.ranks[0].path)
    if source.stage == 3:  # DeepSpeed's ZeRO 3 loads the weights of `latest` for any tag (DeepSpeed issue 8499)
        calls = [{"tag": "global_step1"}, {}, {"tag": "global_step1", "load_optimizer_states": False}]
        found = engines.load(source, *(Load(folder, arguments) for arguments in calls), **SMALL)
        earlier, latest, weights = (outcome.state.parameters for outcome in found)
        assert all(local.direct for local in found[-1].ranks)
        for name, state in weights.items():
            assert state.value.equal(earlier[name].value) and not state.value.equal(latest[name].value)


def check_lenient(saved: Saved, outcome: Outcome) -> None:
    """Parameters that only one side has are skipped. Frozen and thawed parameters restore their weight."""
    assert not outcome.errors and all(local.direct for local in outcome.ranks)
    for name, state in outcome.state.parameters.items():
        wanted = saved.state.parameters.get(name)
        assert state.value.equal(wanted.value) if wanted else (name, state.value.item()) == ("gain", 1)


def lenient(model: str, live: str, stages: Sequence[int], target: Case, **arguments: bool) -> Row:
    kinds = [target.but(stage=stage, world=3) for stage in stages]
    sources = [Source(kind, {"model": model}, arguments, check=check_lenient) for kind in kinds]
    return Row(target, sources, "lenient", SMALL, {"model": live})


def load_renamed(src: dict[str, Any], dst: Any) -> None:
    dst.load_state_dict({name.replace("last.", "head."): value for name, value in src.items()})


def check_renamed(saved: Saved, outcome: Outcome) -> None:
    """Check that `custom_load_fn` gets the saved state dict and the module; it may rename keys."""
    assert not outcome.errors and all(local.direct for local in outcome.ranks)
    check_values(outcome.state, saved.state, "head.")


WEIGHTS_OF_BOTH = {"load_module_strict": False, "load_optimizer_states": False}
ROWS = [
    lenient("plain", "deeper", (0, 1, 3), Case(3, 2), **WEIGHTS_OF_BOTH),
    lenient("deeper", "plain", (0, 1, 3), Case(2, 2), **WEIGHTS_OF_BOTH),
    lenient("plain", "frozen", (1, 3), Case(2, 2)),
    lenient("frozen", "plain", (1, 3), Case(3, 2, "bf16")),
]
CUSTOM = [{**ARGUMENTS[called].arguments, "custom_load_fn": load_renamed} for called in WEIGHTS]
LOADS = [Source(Case(1, 3, "bf16"), arguments=each, check=check_renamed) for each in CUSTOM]
ROWS.append(Row(Case(3, 2, "bf16"), LOADS, "custom", SMALL, {"model": "renamed"}))


@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_loads_into_another_model(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


LAYERS = {"total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [0], "model_type": "decoder"}
SCHEDULE = {"schedule_type": "fixed_linear", "schedule_config": {"require_steps": 10, "seq_per_step": 8}}
RANDOM_LTD = {
    "enabled": True,
    **LAYERS,
    "model_mask_name": "mask",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {"min_value": 8, "max_value": 64, **SCHEDULE},
}
HELPERS = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": RANDOM_LTD}}}


@pytest.mark.parametrize("source", params([Case(0, 3)], [Case(1, 3), Case(3, 3)], str))
def test_states_of_random_ltd_and_the_data_sampler_are_restored(source: Case, tmp_path: Path, engines: Engines) -> None:
    target, folder = target_of(source).but(config=HELPERS).on(), str(tmp_path / "checkpoint")
    config = source.but(config=HELPERS).ds_config
    saved = engines.get(source).run(train_with_helpers, config, folder, load=False)[0]
    assert saved["random_ltd"]["consumed_layer_tokens"] > 0
    found = engines.get(target).run(train_with_helpers, target.ds_config, folder, load=True)
    assert found == [saved] * target.world


def train_with_helpers(ds_config: dict[str, Any], folder: str, *, load: bool) -> dict[str, Any]:
    """Save or load with a random-LTD scheduler and a data sampler. Return their states at the end."""
    engine = make_engine(ds_config, "plain")
    sampler = make_sampler(Path(f"{folder}_clusters"), dist.get_rank())
    engine.training_dataloader = SimpleNamespace(data_sampler=sampler)
    engine.curriculum_learning_enabled = lambda: True
    if load:
        engine.load_checkpoint(folder)
        assert engine.ucp_report.direct
    else:
        train_steps(train_engine(engine), 3)
        sampler.consumed_samples = 180
        engine.save_checkpoint(folder)
    found = {"random_ltd": engine.random_ltd_scheduler.state_dict(), "data_sampler": sampler.consumed_samples}
    engine.destroy()
    return found
