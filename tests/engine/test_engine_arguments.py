"""Arguments and return value of `load_checkpoint`, compared with DeepSpeed's load in the same topology."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.testing.capture import CapturedEngine
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import params
from tests.support.curriculum import make_sampler
from tests.support.engines.cases import SMALL, Case, make_engine, train_engine
from tests.support.engines.driver import Engines, Outcome
from tests.support.engines.ranks import Load, Local

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


WEIGHTS_OF_BOTH = {"load_module_strict": False, "load_optimizer_states": False}
OTHERS: dict[str, tuple[str, str, list[Case], Case, dict[str, Any]]] = {
    "not-strict-deeper": ("plain", "deeper", [Case(stage, 3) for stage in (0, 1, 3)], Case(3, 2), WEIGHTS_OF_BOTH),
    "not-strict-plain": ("deeper", "plain", [Case(stage, 3) for stage in (0, 1, 3)], Case(2, 2), WEIGHTS_OF_BOTH),
    "freeze": ("plain", "frozen", [Case(1, 3), Case(3, 3)], Case(2, 2), {}),
    "thaw": ("frozen", "plain", [Case(1, 3, "bf16"), Case(3, 3, "bf16")], Case(3, 2, "bf16"), {}),
}
"""Saved and live model, sources, target, and arguments."""


@pytest.mark.parametrize("name", OTHERS)
def test_a_lenient_load_into_another_model(name: str, engines: Engines) -> None:
    """Parameters that only one side has are skipped. Frozen and thawed parameters restore their weight."""
    model, live, sources, target, arguments = OTHERS[name]
    runs = [engines.saved(source, **{**SMALL, "model": model}) for source in sources]
    loads = [Load(str(run.folder), arguments) for run in runs]
    for run, outcome in zip(runs, load(engines, target, *loads, **{**SMALL, "model": live}), strict=True):
        before = outcome.ranks[0].before.parameters
        for param, state in outcome.state.parameters.items():
            assert state.value.equal(run.state.parameters.get(param, before[param]).value)
            assert param == "gain" or not state.value.equal(before[param].value)


def load_renamed(src: dict[str, Any], dst: Any) -> None:
    dst.load_state_dict({name.replace("last.", "head."): value for name, value in src.items()})


@pytest.mark.parametrize("source", params([Case(1, 3, "bf16")], [Case(0, 3), Case(2, 3)], str))
def test_custom_load_fn_gets_the_saved_state_dict_and_the_module(source: Case, engines: Engines) -> None:
    """It may rename keys."""
    saved = engines.saved(source, **SMALL)
    loads = [
        Load(str(saved.folder), {**ARGUMENTS[called].arguments, "custom_load_fn": load_renamed}) for called in WEIGHTS
    ]
    for outcome in load(engines, target_of(source), *loads, **{**SMALL, "model": "renamed"}):
        check_values(outcome.state, saved.state, "head.")


SCHEDULE = {"require_steps": 10, "seq_per_step": 8}
RANDOM_LTD = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [0],
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 8,
        "max_value": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": SCHEDULE,
    },
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
