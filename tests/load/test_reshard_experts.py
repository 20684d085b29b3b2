"""Invariants of a load over generated placements of experts, for every rank in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.stream.duplicates import check_samples
from tests.properties.samples import run_cli
from tests.support.cases import resume
from tests.support.conversion import convert_checkpoint
from tests.support.expertmodels import FUSED, NATIVE, NATIVES, expert_trips, expert_trips_3d, make_router, needs_autoep
from tests.support.reshard import examples, make_targets, open_for, temporary_folder
from tests.support.reshard3d import draw_state, expect, load_all, load_wanted, make_config
from tests.synth import ExpertLayer, Model, Param, Run, Topology, random_state, write_checkpoint
from tests.synth.expertfiles import expert_file, expert_optim_file
from tests.synth.files import optim_file

KINDS = pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_autoep)], ids=["deepspeed", "autoep"])


@KINDS
@examples(120)
@given(data=st.data(), chunk=st.sampled_from((16, 64, 1000)))
def test_any_placement_of_experts_loads_into_any_other(fused: bool, data: st.DataObject, chunk: int) -> None:
    """Degrees of each layer, stages, wrappers, precisions, orders of ranks and of groups, groups cut by size."""
    case, target = data.draw(expert_trips(fused=fused))
    note(f"{case.topology.label}→{target.label}")
    with temporary_folder() as folder:
        resume(case, target, folder, chunk=chunk)


@KINDS
@examples(40)
@given(data=st.data())
def test_experts_load_under_tensor_and_pipeline_parallelism(fused: bool, data: st.DataObject) -> None:
    """Whole experts on all ranks of a stage, cut ones, pipelines of three kinds, both orders of the groups."""
    trip = data.draw(expert_trips_3d(fused=fused))
    wanted, config = trip.wanted, make_config(trip.source.model)
    note(f"{trip.source.topology.label}→{trip.target.label}")
    with temporary_folder() as folder:
        trip.source.write(folder)
        if not trip.written:
            with pytest.raises(CheckpointError, match="DeepSpeed writes no model states"):
                load_all(folder, wanted.make_targets(), config)
            return
        load_wanted(folder, wanted, config, chunk=trip.chunk)


@KINDS
@examples(15)
@given(data=st.data())
def test_a_conversion_of_experts_equals_its_source(fused: bool, data: st.DataObject) -> None:
    """diff(x, convert(x)) is empty, and both load equally: folded, cut, in pipelines."""
    trip = data.draw(expert_trips_3d(fused=fused).filter(lambda each: each.written and each.source.topology.stage > 0))
    wanted, config = trip.wanted, make_config(trip.source.model)
    note(f"{trip.source.topology.label}→{trip.target.label}")
    with temporary_folder() as folder:
        saved, atomic = trip.source.write(folder / "saved"), folder / "atomic"
        convert_checkpoint(str(saved), str(atomic), patterns=config.patterns)
        rules = json.dumps(config.patterns["rules"])
        code, answer = run_cli("diff", str(saved), str(atomic), "--patterns", rules)
        assert (code, answer["atoms"]) == (0, []), answer
        load_wanted(atomic, wanted, config, chunk=trip.chunk)


@pytest.mark.parametrize("round_robin", [False, True], ids=["in order", "round robin"])
def test_another_order_of_expert_parallel_ranks_is_recognized(round_robin: bool, tmp_path: Path) -> None:
    """Each rank's file records its contents; with round robin the experts' files determine the order."""
    params = (Param("dense", (3,)), *(Param(f"body{NATIVE}{n}.w", (4, 3)) for n in range(4)))
    model = Model(params, experts=(ExpertLayer("body", 4),))
    topology = Topology(1, 4, "bf16", ep=(2,), round_robin=round_robin)
    config = {**topology.ds_config(), "use_data_before_expert_parallelism": True}
    state, run = random_state(model, 0, precision="bf16"), Run(ds_config=config)
    path = write_checkpoint(tmp_path, model, state, topology, run=run)
    text = "its fp32 weights differ from the model states" if round_robin else "belongs to another rank, run or"
    with pytest.raises(CheckpointError, match=text):
        open_and_compare(path)


@pytest.mark.parametrize("dp", [2, 4])
def test_experts_under_tensor_parallelism_without_model_states_are_refused(dp: int, tmp_path: Path) -> None:
    """The first tensor-parallel rank holds all experts."""
    path = draw_state(NATIVES, Topology(0, dp, tp=2, ep=(2,), data_first=True)).write(tmp_path)
    with pytest.raises(CheckpointError, match="DeepSpeed writes no model states"):
        open_and_compare(path)


# Keys of model states with experts, in DeepSpeed up to 0.19.2 (engine.py ``_save_moe_checkpoint``).
OLD_KEYS = {
    *("module", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts"),
}


def make_older(path: Path) -> None:
    for file in path.glob("mp_rank_*"):
        content = torch.load(file, weights_only=False)
        torch.save({key: content[key] for key in OLD_KEYS & content.keys()}, file)


@pytest.mark.parametrize(
    "topology",
    [
        *(Topology(0, 4, precision, ep=(2,)) for precision in ("fp32", "bf16")),
        *(Topology(stage, 4, "bf16", ep=(2,)) for stage in (1, 2)),
        *(Topology(stage, 4, tp=2, ep=(2,)) for stage in (0, 1)),
    ],
    ids=lambda topology: topology.label,
)
def test_model_states_of_older_releases_are_restored(topology: Topology, tmp_path: Path) -> None:
    """They record neither the ds_config nor the shapes, and at stage 0 no optimizer."""
    source = draw_state(NATIVES, topology)
    path, wanted = source.write(tmp_path), expect(source, replace(topology, stage=1))
    newer, _ = load_all(path, wanted.make_targets(), make_config(NATIVES))
    make_older(path)
    index, _ = load_wanted(path, wanted, make_config(NATIVES))
    assert index.atoms.keys() == newer.atoms.keys()
    assert (index.topology, index.groups) == (newer.topology, newer.groups)
    missed = [why for why in index.unnoticed if "DeepSpeed looks for in the model states" in why]
    assert bool(missed) == (topology.stage == 0 and topology.precision == "fp32")  # DeepSpeed's load fails there


def test_a_missing_optimizer_file_of_older_releases_is_reported(tmp_path: Path) -> None:
    """The param groups in the optimizer files record the number of files; the model states do not."""
    path = draw_state(NATIVES, Topology(0, 2, ep=(2,))).write(tmp_path)
    make_older(path)
    (path / expert_optim_file(1)).unlink()
    with pytest.raises(CheckpointError, match=f"{expert_optim_file(1)} is missing"):
        open_and_compare(path)


@needs_autoep
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_second_name_of_a_router_is_a_tie(stage: int, tmp_path: Path) -> None:
    model = replace(FUSED, params=(*make_router("0.mlp", "weight", (4, 2), fused=True), *FUSED.params))
    topology = Topology(stage, 2, ep=(2,))
    path = write_checkpoint(tmp_path, model, random_state(model, 0), topology)
    index = open_for(path, make_targets(model, topology)[0])
    assert index.aliases == {"0.mlp.gate.gate.weight": "0.mlp.router.gate.weight"}
    assert {key.name for key in index.atoms} == {param.name for param in model.owners}


@needs_autoep
def test_a_file_of_another_expert_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, FUSED, random_state(FUSED, 0), Topology(1, 2, ep=(2,)))
    first, second = (path / expert_file(0, number) for number in (0, 1))
    torch.save(torch.load(second), first)
    with pytest.raises(CheckpointError, match=rf"{first.name}: holds 0\.mlp\.experts\.w1\.1, which is not of expert 0"):
        open_and_compare(path)


@needs_autoep
def test_a_file_of_another_expert_parallel_rank_is_refused(tmp_path: Path) -> None:
    """AutoEP under AutoTP records the ranks in every file."""
    path = draw_state(FUSED, Topology(1, 2, tp=2, ep=(4,))).write(tmp_path)
    changed = path / optim_file(Topology(1), 1, 1)
    content = torch.load(changed, weights_only=False)
    content["folding"]["ep_rank"] = 0
    torch.save(content, changed)
    text = rf"{changed.name}: is of tensor- and expert-parallel rank \(1, 0\), but its name .* require \(1, 3\)"
    with pytest.raises(CheckpointError, match=text):
        open_and_compare(path)


def open_and_compare(path: Path) -> None:
    index = open_checkpoint(str(path), Comm())
    check_samples(index, index.atoms, Comm())
