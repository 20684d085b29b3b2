"""`load_checkpoint`'s own arguments and return value, beside those of DeepSpeed's own load in the same topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_ranks
import pytest
from engine_cases import Case

from deepspeed_ucp.testing import WorldPool

ON = {"checkpoint": {"universal": True}}
OPTIONS = {"model": "plain", "scheduler": True}
SOURCES = [Case(stage, 3, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
TARGETS = {0: Case(1, 2, config=ON), 1: Case(3, 2, config=ON), 2: Case(0, 2, config=ON), 3: Case(2, 2, config=ON)}


def target_of(source: Case) -> Case:
    return TARGETS[source.stage].but(precision=source.precision)


def load(
    source: Case, sources: Any, worlds: WorldPool, target: Case | None = None, options: Any = None, **more: Any
) -> tuple[str, engine_ranks.Loaded]:
    """Load a source under its target; the folder and what rank 0 saw. All ranks agree."""
    target = target or target_of(source)
    folder = str(sources.get(source, **{**OPTIONS, **more.pop("saved", {})}).folder)
    answers = worlds.get(target.dp).run(engine_ranks.load, target.ds_config, folder, options or OPTIONS, **more)
    assert all(answer.direct for answer in answers)
    first = answers[0].state
    for answer in answers[1:]:
        assert answer.state.counters == first.counters
    return folder, answers[0]


def load_plain(source: Case, sources: Any, worlds: WorldPool, arguments: dict[str, Any]) -> engine_ranks.Loaded:
    """DeepSpeed's own load in the source's topology, without the plugin."""
    folder = str(sources.get(source, **OPTIONS).folder)
    world = worlds.get(source.dp)
    return world.run(engine_ranks.load_plain, source.ds_config, folder, OPTIONS, arguments)[0]


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"load_lr_scheduler_states": False},
    {"load_optimizer_states": False},
    {"load_module_only": True},
    {"load_optimizer_states": False, "load_lr_scheduler_states": False},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: "-".join(a) or "defaults")
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_return_value_and_counters(
    source: Case, arguments: dict[str, Any], sources: Any, ucp_worlds: WorldPool
) -> None:
    folder, ours = load(source, sources, ucp_worlds, arguments=arguments)
    theirs = load_plain(source, sources, ucp_worlds, arguments)
    assert ours.path == theirs.path
    assert ours.client_state is not None and theirs.client_state is not None
    # The model's and optimizer's tensors, which DeepSpeed leaves in there, are not read a second time for the client.
    tensors = {"optimizer", "frozen_param_fragments"}
    assert sorted(ours.client_state.keys() - tensors) == sorted(theirs.client_state.keys() - tensors)
    for key in ("deepspeed_ucp_testing", "lr_scheduler", "ds_version", "global_samples"):
        assert ours.client_state.get(key) == theirs.client_state.get(key)
    assert ours.state.counters == theirs.state.counters
    assert ours.state.scheduler == theirs.state.scheduler
    assert engine_ranks.differences(folder, ours.state) == [] if not arguments else True


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("arguments", ARGUMENTS[2:4], ids="-".join)
def test_weights_without_optimizer_states(
    source: Case, arguments: dict[str, Any], sources: Any, ucp_worlds: WorldPool
) -> None:
    """The weights are the saved ones; moments and hyper-parameters are those of the fresh engine."""
    folder, ours = load(source, sources, ucp_worlds, arguments=arguments)
    saved = engine_ranks.saved_state(folder)
    for name, state in ours.state.parameters.items():
        assert state.value.equal(saved.parameters[name].value)
        assert state.fp32 is not None and state.fp32.to(state.value.dtype).equal(state.value)
        assert all(not tensor.any() for tensor in state.tensors.values())
        assert state.hyper["weight_decay"] == ours.before.parameters[name].hyper["weight_decay"]


@pytest.mark.parametrize("source", [Case(1, 3), Case(3, 3)], ids=str)
def test_tag(source: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two saves in one folder: the tag chooses, `latest` does without one."""
    folder = str(tmp_path / "two")
    for steps in (1, 2):
        world = ucp_worlds.get(source.dp)
        world.run(engine_ranks.save, source.ds_config, folder, OPTIONS, steps, True)
    target = target_of(source)
    for arguments, steps in (({}, 2), ({"tag": "global_step1"}, 1), ({"tag": "global_step2"}, 2)):
        world = ucp_worlds.get(target.dp)
        loaded = world.run(engine_ranks.load, target.ds_config, folder, OPTIONS, arguments)[0]
        assert loaded.state.counters["global_steps"] == steps
        assert f"global_step{steps}" in str(loaded.path)


@pytest.mark.parametrize("source", [Case(0, 3), Case(1, 3), Case(3, 3)], ids=str)
def test_not_strict(source: Case, sources: Any, ucp_worlds: WorldPool) -> None:
    """What only one side has is passed over."""
    arguments = {"load_module_strict": False, "load_optimizer_states": False}
    for saved, live in (("plain", "deeper"), ("deeper", "plain")):
        folder, ours = load(
            source,
            sources,
            ucp_worlds,
            saved={"model": saved},
            options={**OPTIONS, "model": live},
            arguments=arguments,
        )
        reference = engine_ranks.saved_state(folder)
        for name in reference.parameters.keys() & ours.state.parameters.keys():
            assert ours.state.parameters[name].value.equal(reference.parameters[name].value)
        if live == "deeper":
            assert ours.state.parameters["gain"].value.equal(ours.before.parameters["gain"].value)


@pytest.mark.parametrize("names", [("plain", "frozen"), ("frozen", "plain")], ids="->".join)
@pytest.mark.parametrize("source", [Case(1, 3, "bf16"), Case(3, 3)], ids=str)
def test_frozen_and_thawed_parameters_take_their_weight(
    source: Case, names: tuple[str, str], sources: Any, ucp_worlds: WorldPool
) -> None:
    folder, ours = load(
        source, sources, ucp_worlds, saved={"model": names[0], "seed": 1}, options={**OPTIONS, "model": names[1]}
    )
    reference = engine_ranks.saved_state(folder)
    for name, state in ours.state.parameters.items():
        assert state.value.equal(reference.parameters[name].value)
        assert not state.value.equal(ours.before.parameters[name].value)


@pytest.mark.parametrize("source", [Case(0, 3), Case(1, 3, "bf16"), Case(2, 3)], ids=str)
@pytest.mark.parametrize("arguments", ARGUMENTS[2:4], ids="-".join)
def test_custom_load_fn(source: Case, arguments: dict[str, Any], sources: Any, ucp_worlds: WorldPool) -> None:
    """It gets the saved state dict and the module, and may rename."""
    folder, ours = load(
        source,
        sources,
        ucp_worlds,
        target=target_of(source),
        options={**OPTIONS, "model": "renamed"},
        arguments=arguments,
        rename={"last.": "head."},
    )
    saved = engine_ranks.saved_state(folder)
    for name, state in ours.state.parameters.items():
        reference = saved.parameters[name.replace("head.", "last.")]
        assert state.value.equal(reference.value)
        assert state.fp32 is not None and state.fp32.to(state.value.dtype).equal(state.value)


@pytest.mark.parametrize("case", [Case(1, 2, config=ON), Case(3, 2, config=ON)], ids=str)
def test_nothing_saved_yet(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """A first start finds nothing, as without the plugin."""
    loaded = ucp_worlds.get(case.dp).run(engine_ranks.load, case.ds_config, str(tmp_path), OPTIONS)[0]
    assert (loaded.path, loaded.client_state) == (None, None)
    assert loaded.state.counters["global_steps"] == 0


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_byte_is_read_once(source: Case, sources: Any, ucp_worlds: WorldPool) -> None:
    """Apart from the padding between partitions, which is a few elements per group and rank."""
    target, options = target_of(source), {"model": "bulk"}
    folder = str(sources.get(source, **options).folder)
    answers = ucp_worlds.get(target.dp).run(engine_ranks.load, target.ds_config, folder, options)
    assert 0 < answers[0].state_bytes == answers[1].state_bytes
    assert sum(answer.bytes_read for answer in answers) <= 1.02 * answers[0].state_bytes


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
    source = source.but(config=HELPERS)
    target = target_of(source).but(config={**ON, **HELPERS})
    folder, run = str(tmp_path / "checkpoint"), engine_ranks.train_with_helpers
    saved = ucp_worlds.get(source.dp).run(run, source.ds_config, folder, False)[0]
    assert saved["random_ltd"]["consumed_layer_tokens"] > 0
    assert ucp_worlds.get(target.dp).run(run, target.ds_config, folder, True) == [saved] * target.dp
