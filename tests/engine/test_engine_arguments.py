"""Arguments and return value of `load_checkpoint`, compared with DeepSpeed's load in the same topology."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.ranks import saved_state
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import params
from tests.support.curriculum import make_sampler
from tests.support.engines.cases import Case, make_engine, train_engine
from tests.support.engines.ranks import Load, Local, differences, load_each, save

OPTIONS = {"model": "bulk", "scheduler": True}
SMALL = {"model": "plain", "scheduler": True}
SOURCES = [Case(stage, 3, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
TARGETS = {0: Case(1, 2).on(), 1: Case(3, 2).on(), 2: Case(0, 2).on(), 3: Case(2, 2).on()}

# Loads of one engine, in this order: weights alone while its optimizer is fresh, then states after a training step, to
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


def load(worlds: WorldPool, target: Case, loads: list[Load], **options: Any) -> list[list[Local]]:
    """Load into one engine. Returns the ranks by load; all have the same counters."""
    answers = worlds.get(target.dp).run(load_each, target.training(**options), loads, read_before=True)
    for local in (local for each in answers for local in each if local.path):
        assert local.direct
    by_load = [list(each) for each in zip(*answers, strict=True)]
    for first, *others in by_load:
        assert all(other.state.counters == first.state.counters for other in others)
    return by_load


@pytest.mark.parametrize("source", params([SOURCES[at] for at in (0, 3, 5, 6)], SOURCES, str))
def test_arguments(
    source: Case, sources: Any, ucp_worlds: WorldPool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Each stage in one precision (the others are exhaustive), compared with DeepSpeed's load without the plugin."""
    folder = str(sources.get(source, **OPTIONS).folder)
    loads = [Load(folder, each.arguments, before=each.before) for each in ARGUMENTS.values()]
    empty, *ours = load(ucp_worlds, target_of(source), [Load(str(tmp_path)), *loads], **OPTIONS)
    theirs = ucp_worlds.get(source.dp).run(load_each, source.training(**OPTIONS), loads, plugin=False)[0]
    assert (empty[0].path, empty[0].client_state) == (None, None)  # as without the plugin
    assert empty[0].state.counters["global_steps"] == 0
    for called, ranks, other in zip(ARGUMENTS, ours, theirs, strict=True):
        with subtests.test(called=called):
            check_answers(ranks[0], other)
            if called == "defaults":
                assert differences(folder, ranks[0].state) == []
                check_bytes(ranks)
            if called in WEIGHTS:
                check_weights(ranks[0], folder)


def check_answers(ours: Local, theirs: Local) -> None:
    """Compare return values, counters and scheduler."""
    assert ours.path == theirs.path
    assert ours.client_state is not None and theirs.client_state is not None
    # DeepSpeed returns these tensors, too; the plugin does not read them a second time.
    tensors = {"optimizer", "frozen_param_fragments"}
    assert sorted(ours.client_state.keys() - tensors) == sorted(theirs.client_state.keys() - tensors)
    for key in ("deepspeed_ucp_testing", "lr_scheduler", "ds_version", "global_samples"):
        assert ours.client_state.get(key) == theirs.client_state.get(key)
    assert ours.state.counters == theirs.state.counters
    assert ours.state.scheduler == theirs.state.scheduler


def check_weights(local: Local, folder: str) -> None:
    """The weights are saved ones; moments and hyper-parameters are unchanged."""
    saved = saved_state(folder)
    for name, state in local.state.parameters.items():
        assert state.value.equal(saved.parameters[name].value)
        assert state.fp32 is not None and state.fp32.to(state.value.dtype).equal(state.value)
        assert all(not tensor.any() for tensor in state.tensors.values())
        assert state.hyper["weight_decay"] == local.before.parameters[name].hyper["weight_decay"]


def check_bytes(ranks: list[Local]) -> None:
    """Every byte is read once, except a few elements of padding between partitions."""
    assert 0 < ranks[0].state_bytes == ranks[1].state_bytes
    assert sum(rank.bytes_read for rank in ranks) <= 1.02 * ranks[0].state_bytes


def test_what_deepspeeds_own_load_would_lose_in_the_same_topology(sources: Any, ucp_worlds: WorldPool) -> None:
    """At stage 0 in 16 bit: masters in a load of the weights alone, and the live hyper-parameters, if requested."""
    case = Case(0, 2, "bf16").on(param_groups="live")
    folder = str(sources.get(Case(0, 3, "bf16"), **OPTIONS).folder)
    own = find_checkpoint(folder)
    loads = [Load(folder, ARGUMENTS[WEIGHTS[1]].arguments), Load(own, {WEIGHTS[0]: True}, before=1), Load(own)]
    training = case.training(**OPTIONS, optimizer="adam_like_fused", seed=1)
    weights, module, whole = ucp_worlds.get(case.dp).run(load_each, training, loads)[0]
    assert [weights.direct, module.direct, whole.direct] == [True, True, True]
    assert "load_optimizer_states" in weights.reason and "load_module_only" in module.reason
    for name, saved in saved_state(folder).parameters.items():
        for state in (local.state.parameters[name] for local in (weights, module)):
            assert state.value.equal(saved.value)
            assert state.fp32 is not None and state.fp32.to(state.value.dtype).equal(state.value)
        state = whole.state.parameters[name]
        assert saved.fp32 is not None and state.fp32 is not None and state.fp32.equal(saved.fp32)
        assert state.hyper["lr"] == saved.hyper["lr"]  # the scheduler's
        assert state.hyper["betas"] == (0.9, 0.999) != saved.hyper["betas"]
    (warning,) = whole.list_messages("WARNING", "hyper-parameters")
    assert "saved: betas (0.8, 0.95) → (0.9, 0.999); this run's are kept" in warning


@pytest.mark.parametrize("target", [Case(0, 2, "bf16").on(), Case(1, 2, "bf16").on()], ids=str)
def test_edited_hyper_parameters_are_told_whoever_loads(target: Case, sources: Any, ucp_worlds: WorldPool) -> None:
    """Both loaders warn once, not about a rate that a scheduler changed, and not about equal values."""
    folder = str(sources.get(Case(0, 3, "bf16"), **OPTIONS).folder)
    training = target.training(**OPTIONS, optimizer="adam_like_fused", seed=1)
    ranks = ucp_worlds.get(target.dp).run(load_each, training, [Load(folder), Load(folder, before=1)])
    assert [local.direct for local in ranks[0]] == [target.stage == 1] * 2
    (warning,), *others = [local.list_messages("WARNING", "hyper-parameters") for rank in ranks for local in rank]
    assert "saved: betas (0.8, 0.95) → (0.9, 0.999); the saved ones are taken" in warning and folder in warning
    assert others == [[]] * 3


@pytest.mark.parametrize("source", [Case(1, 3), Case(3, 3)], ids=str)
def test_tag(source: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two saves in one folder: the tag chooses, `latest` does without one."""
    folder = str(tmp_path / "two")
    ucp_worlds.get(source.dp).run(save, source.training(**SMALL), folder, [1, 1])
    tags = {None: 2, "global_step1": 1, "global_step2": 2}
    loads = [Load(folder, {"tag": tag} if tag else {}) for tag in tags]
    for (loaded, *_), steps in zip(load(ucp_worlds, target_of(source), loads, **SMALL), tags.values(), strict=True):
        assert loaded.state.counters["global_steps"] == steps
        assert f"global_step{steps}" in str(loaded.path)
    if source.stage == 3:
        weights_of_a_tag(source.on(), folder, ucp_worlds)


def weights_of_a_tag(target: Case, folder: str, worlds: WorldPool) -> None:
    """DeepSpeed's ZeRO 3 loads the weights of `latest` for any tag (DeepSpeed issue 8499)."""
    alone = {"load_optimizer_states": False}
    asked = [{"tag": "global_step1"}, {}, {"tag": "global_step1", **alone}]
    loads = [Load(folder, arguments) for arguments in asked]
    training = target.training(**SMALL)
    for earlier, latest, weights in worlds.get(target.dp).run(load_each, training, loads):
        assert weights.direct
        for name, state in weights.state.parameters.items():
            assert state.value.equal(earlier.state.parameters[name].value)
            assert not state.value.equal(latest.state.parameters[name].value)


@pytest.mark.parametrize(
    ("saved", "live", "target"),
    [("plain", "deeper", Case(3, 2).on()), ("deeper", "plain", Case(2, 2).on())],
    ids=["deeper", "plain"],
)
def test_not_strict(saved: str, live: str, target: Case, sources: Any, ucp_worlds: WorldPool) -> None:
    """Parameters of one side alone are skipped."""
    arguments = {"load_module_strict": False, "load_optimizer_states": False}
    folders = [str(sources.get(Case(stage, 3), **{**SMALL, "model": saved}).folder) for stage in (0, 1, 3)]
    loads = [Load(folder, arguments) for folder in folders]
    for folder, (ours, *_) in zip(
        folders, load(ucp_worlds, target, loads, **{**SMALL, "model": live, "seed": 1}), strict=True
    ):
        reference = saved_state(folder)
        for name in reference.parameters.keys() & ours.state.parameters.keys():
            assert ours.state.parameters[name].value.equal(reference.parameters[name].value)
        if live == "deeper":
            assert ours.before is not None
            assert ours.state.parameters["gain"].value.equal(ours.before.parameters["gain"].value)


@pytest.mark.parametrize("names", [("plain", "frozen"), ("frozen", "plain")], ids="->".join)
@pytest.mark.parametrize("source", [Case(1, 3, "bf16"), Case(3, 3)], ids=str)
def test_frozen_and_thawed_parameters_take_their_weight(
    source: Case, names: tuple[str, str], sources: Any, ucp_worlds: WorldPool
) -> None:
    folder = str(sources.get(source, **{**SMALL, "model": names[0]}).folder)
    live = {**SMALL, "model": names[1], "seed": 1}
    ((ours, *_),) = load(ucp_worlds, target_of(source), [Load(folder)], **live)
    reference = saved_state(folder)
    assert ours.before is not None
    for name, state in ours.state.parameters.items():
        assert state.value.equal(reference.parameters[name].value)
        assert not state.value.equal(ours.before.parameters[name].value)


@pytest.mark.parametrize("source", [Case(0, 3), Case(1, 3, "bf16"), Case(2, 3)], ids=str)
def test_custom_load_fn(source: Case, sources: Any, ucp_worlds: WorldPool) -> None:
    """It receives the saved state dict and the module, and may rename."""
    folder = str(sources.get(source, **SMALL).folder)
    loads = [Load(folder, ARGUMENTS[called].arguments, rename={"last.": "head."}) for called in WEIGHTS]
    saved = saved_state(folder)
    for ours, *_ in load(ucp_worlds, target_of(source), loads, **{**SMALL, "model": "renamed", "seed": 1}):
        for name, state in ours.state.parameters.items():
            reference = saved.parameters[name.replace("head.", "last.")]
            assert state.value.equal(reference.value)
            assert state.fp32 is not None and state.fp32.to(state.value.dtype).equal(state.value)


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
        "schedule_config": {"require_steps": 10, "seq_per_step": 8},
    },
}
HELPERS = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": RANDOM_LTD}}}


@pytest.mark.parametrize("source", [Case(0, 3), Case(1, 3), Case(3, 3)], ids=str)
def test_random_ltd_and_data_sampler(source: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    target, folder = target_of(source).but(config=HELPERS).on(), str(tmp_path / "checkpoint")
    config = source.but(config=HELPERS).ds_config
    saved = ucp_worlds.get(source.dp).run(train_with_helpers, config, folder, load=False)[0]
    assert saved["random_ltd"]["consumed_layer_tokens"] > 0
    assert ucp_worlds.get(target.dp).run(train_with_helpers, target.ds_config, folder, load=True) == [saved] * target.dp


def train_with_helpers(ds_config: dict[str, Any], folder: str, *, load: bool) -> dict[str, Any]:
    """Save or load with a random-LTD scheduler and a data sampler. Returns their states at the end."""
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
