"""Tensor, pipeline, sequence and data parallelism and every ZeRO stage, to others: the example's GPT on four ranks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_3d import (
    MODELS,
    Launch,
    Local,
    Runs,
    attempt,
    compare_joined,
    expect,
    join,
    load_plainly,
    renames,
    resume,
    shift_master,
)

from deepspeed_ucp.testing import LOSS_TOLERANCE
from deepspeed_ucp.testing.compare import compare

Plain = partial(Launch, pipeline=False)

TP2_PP2 = Launch(2, 2)
TP2_PP2_BF16 = Launch(2, 2, precision="bf16", fp32_grads=True)  # BF16_Optimizer
TP2_PP2_STAGE0 = Launch(2, 2, 0)
DP4 = Launch()

ROUTES: dict[str, list[tuple[Launch, Launch]]] = {
    "dense": [
        (TP2_PP2, Launch(1, 2)),
        (TP2_PP2, Launch(2, 1)),
        (TP2_PP2, Launch(4, 1)),
        (TP2_PP2, Launch(1, 4, method="parameters")),
        (TP2_PP2, Launch(1, 2, world=2)),
        (TP2_PP2, Plain(1, stage=3)),
        (TP2_PP2, Plain(2, stage=2)),
        (TP2_PP2, Plain(1, stage=1, sp=2)),
        (TP2_PP2_BF16, Launch(4, 1)),
        (TP2_PP2_BF16, Launch(1, 2, precision="bf16")),
        (TP2_PP2_BF16, Plain(2, stage=3, precision="bf16")),
        (TP2_PP2_STAGE0, Launch(1, 2)),
        (TP2_PP2_STAGE0, Launch(1, 1, 0)),
        (Launch(1, 2, 0, "bf16"), Launch(2, 1, precision="bf16")),
        (DP4, TP2_PP2_BF16),
        (DP4, TP2_PP2_STAGE0),
        (DP4, Launch(1, 4, 0, method="uniform")),
        (Plain(1, stage=1), Launch(2, 2, method="parameters")),
    ],
    "llama": [
        (Plain(2, stage=2), Plain(4, stage=1)),
        (Plain(2, stage=2), Plain(1, stage=3, sp=2)),
        (Plain(2, stage=2), Launch(1, 2)),
        (Launch(1, 2, precision="bf16"), Launch(2, 2, precision="bf16")),
        (Launch(1, 2, precision="bf16"), Plain(4, stage=2)),
    ],
    "moe": [
        (Plain(2, stage=3), Plain(1, stage=1)),
        (Plain(2, stage=3), Plain(4, stage=3)),
        (Plain(2, stage=3), Launch(2, 2)),
    ],
}
POSITIONS = "language_model.embedding.position_embeddings.weight"
HEAD = "language_model.output_layer.weight"
WORDS = "language_model.embedding.word_embeddings.weight"


def list_routes(*routes: tuple[Any, ...]) -> list[Any]:
    """Parameters with readable ids: (model, source, target, …) or (source, target, …)."""
    found = []
    for route in routes:
        launches = "→".join(str(part) for part in route if isinstance(part, Launch))
        names = [part for part in route if isinstance(part, str)]
        found.append(pytest.param(*route, id="-".join([*names, launches])))
    return found


def rules(model: str, source: Launch, target: Launch) -> dict[str, Any] | None:
    """What the user has to say: the names, where one side is a pipeline and the other is not."""
    if source.pipeline == target.pipeline:
        return None
    return {"rename": renames(model, to_pipeline=target.pipeline)}


def check(saved: Sequence[Local], resumed: Sequence[Local], model: str, **options: Any) -> None:
    """All of the source's bits are where the target wants them."""
    assert all(local.direct for local in resumed), resumed[0].reason
    count, differences = compare_joined(saved, resumed, model, **options)
    assert count > 80
    assert not differences, "\n".join(differences[:20])


def check_losses(saved: Sequence[Local], resumed: Sequence[Local], *launches: Launch) -> None:
    coarse = "bf16" if any(launch.precision == "bf16" for launch in launches) else "fp32"
    assert resumed[0].losses == pytest.approx(saved[0].losses, rel=LOSS_TOLERANCE[coarse])


def warnings(local: Local, text: str) -> list[str]:
    return [message for level, message in local.log if level == "WARNING" and text in message]


@pytest.mark.parametrize(
    ("model", "source", "target"),
    list_routes(*((model, *pair) for model in ROUTES for pair in ROUTES[model])),
)
def test_resumes(model: str, source: Launch, target: Launch, runs: Runs) -> None:
    saved = runs.saved(model, source)
    resumed = runs.resumed(model, source, target, rules(model, source, target))
    check(saved, resumed, model, lost_copies=source.loses_copies)
    check_losses(saved, resumed, source, target)


@pytest.mark.parametrize(
    ("model", "source", "target"),
    list_routes(
        ("dense", TP2_PP2, TP2_PP2),
        ("dense", TP2_PP2_BF16, TP2_PP2_BF16),
        ("dense", TP2_PP2_STAGE0, TP2_PP2_STAGE0),
        ("dense", Plain(2, stage=0), Plain(2, stage=0)),
        ("llama", Plain(2, stage=2), Plain(2, stage=2, sp=2)),  # sequence parallelism is folded into data parallelism
    ),
)
def test_same_topology_is_deepspeeds_own_load(model: str, source: Launch, target: Launch, runs: Runs) -> None:
    saved, resumed = runs.saved(model, source), runs.resumed(model, source, target)
    assert [local.direct for local in resumed] == [False] * 4
    check_losses(saved, resumed, source)


def test_layers_move_between_stages(runs: Runs) -> None:
    """Other partition methods cut the layers elsewhere."""
    stages = {
        launch.method: sorted({local.layers for local in runs.resumed("dense", TP2_PP2, launch)})
        for launch in (Launch(1, 4, method="parameters"), Launch(1, 4, 0, method="uniform"))
    }
    assert [len(cut) for cut in stages.values()] == [4, 4]
    assert stages["parameters"] != stages["uniform"]


# --- tied modules


def test_positions_of_each_stage_come_back_to_it(runs: Runs) -> None:
    """DeepSpeed ties the word embeddings only: the last stage's positions decay without ever having a gradient."""
    saved = join(runs.saved("dense", TP2_PP2), "dense").parameters
    assert not saved[POSITIONS].fp32.equal(saved[f"{POSITIONS}#1"].fp32)
    assert saved[WORDS].fp32.equal(saved[f"{WORDS}#1"].fp32)
    resumed = runs.resumed("dense", TP2_PP2, Launch(1, 2))
    assert join(resumed, "dense").parameters[f"{POSITIONS}#1"].fp32.equal(saved[f"{POSITIONS}#1"].fp32)
    assert not any(warnings(local, "position_embeddings") for local in resumed)


def test_the_first_stages_positions_count_where_one_remains(runs: Runs) -> None:
    saved = join(runs.saved("dense", TP2_PP2), "dense").parameters
    resumed = runs.resumed("dense", TP2_PP2, Launch(2, 1))
    loaded = join(resumed, "dense").parameters
    assert f"{POSITIONS}#1" not in loaded
    assert loaded[POSITIONS].fp32.equal(saved[POSITIONS].fp32)
    assert [len(warnings(local, "tied_modules.embed.position_embeddings.weight")) for local in resumed] == [1, 0, 0, 0]
    assert not any(warnings(local, "word_embeddings") for local in resumed)


def test_copies_that_no_file_holds_are_named(runs: Runs) -> None:
    saved = join(runs.saved("dense", TP2_PP2_STAGE0), "dense").parameters
    assert not saved[POSITIONS].fp32.equal(saved[f"{POSITIONS}#1"].fp32)
    resumed = runs.resumed("dense", TP2_PP2_STAGE0, Launch(1, 2))
    assert warnings(resumed[0], "tied_modules.embed.position_embeddings.weight")
    assert join(resumed, "dense").parameters[f"{POSITIONS}#1"].fp32.equal(saved[POSITIONS].fp32)


# --- the padding of vocabularies

PADDED = {1: 264, 2: 272, 4: 288}


@pytest.mark.parametrize(
    ("model", "source", "target"),
    list_routes(
        ("padded", TP2_PP2, DP4),
        ("padded", TP2_PP2, Launch(4, 1)),
        ("padded", TP2_PP2, Launch(2, 1)),
        ("padded-llama", Plain(2, stage=2), Plain(4, stage=3)),
        ("padded-llama", Plain(2, stage=2), Plain(1, stage=1)),
    ),
)
def test_padding(model: str, source: Launch, target: Launch, runs: Runs) -> None:
    saved, resumed = runs.saved(model, source), runs.resumed(model, source, target)
    check(saved, resumed, model)
    untied = MODELS[model].get("untied", False)
    before, after = (join(locals_, model).parameters[HEAD if untied else WORDS] for locals_ in (saved, resumed))
    old, new = PADDED[source.tp], PADDED[target.tp]
    assert (len(before.fp32), len(after.fp32)) == (old, new)
    kept = slice(MODELS[model]["vocabulary"], min(old, new))  # rows of padding that both sides have
    assert before.tensors["exp_avg"][kept].abs().sum() > 0  # they are trained
    assert after.tensors["exp_avg"][kept].equal(before.tensors["exp_avg"][kept])
    told = [text for level, text in resumed[0].log if level == "INFO" and f"padded to {new} rows" in text]
    assert len(told) == ((2 if untied else 1) if new > old else 0)
    if new == old:
        check_losses(saved, resumed, source, target)


# --- frozen parameters and buffers

SPAN = {"rules": [{"match": r"\d+\.span", "pattern": "shard-v"}]}
EXTRAS_ROUTES = [
    (TP2_PP2, Launch(4, 1), SPAN),
    (TP2_PP2, Launch(1, 2), SPAN),
    (Plain(2, stage=2), Plain(1, stage=3), {"rules": [{"match": r".*\.span", "pattern": "shard-v"}]}),
]


@pytest.mark.parametrize(("source", "target", "patterns"), list_routes(*EXTRAS_ROUTES))
def test_frozen_parameters_and_buffers(source: Launch, target: Launch, patterns: dict[str, Any], runs: Runs) -> None:
    saved, resumed = runs.saved("extras", source), runs.resumed("extras", source, target, patterns)
    check(saved, resumed, "extras")
    state = join(saved, "extras")
    assert sorted(name.rpartition(".")[2] for name in state.buffers) == ["passes"] * 3 + ["span"] * 3
    assert sum(each.fp32 is None for each in state.parameters.values()) == 6
    check_losses(saved, resumed, source, target)


def test_a_buffer_that_nothing_settles_is_refused(runs: Runs) -> None:
    runs.saved("extras", TP2_PP2)
    target = Launch(1, 2)
    refusals = runs.run(target, attempt, "extras", target, runs.folder("extras", TP2_PP2))
    assert {refusal.error for refusal in refusals} == {"MismatchError"}
    assert len({refusal.message for refusal in refusals}) == 1
    assert ".span: (16,) on 2 ranks in the checkpoint" in refusals[0].message
    assert all(refusal.changed == [] for refusal in refusals)


# --- stages without parameters


Short = partial(Launch, stage=0, method="uniform")
SHORT_ROUTES = [
    (Short(1, 2), Short(1, 4)),
    (Short(1, 4), Short(2, 2)),
    (Short(1, 4), Short(2, 1, stage=1)),
    (Short(2, 1, stage=1), Short(1, 4)),
]


@pytest.mark.parametrize(("source", "target"), list_routes(*SHORT_ROUTES))
def test_stages_without_parameters(source: Launch, target: Launch, runs: Runs) -> None:
    """DeepSpeed trains such stages at stage 0 in fp32 only."""
    saved, resumed = runs.saved("short", source), runs.resumed("short", source, target)
    assert all(local.direct for local in resumed)
    empty = [local.layers for local in (*saved, *resumed) if not local.state.parameters]
    assert empty == [(2, 2)] * (4 in (source.pp, target.pp))
    count, differences = compare_joined(saved, resumed, "short", lost_copies=source.loses_copies)
    assert count >= 16
    assert not differences, "\n".join(differences[:20])
    check_losses(saved, resumed, source, target)


# --- saving


@pytest.mark.parametrize(
    ("model", "source", "target"),
    list_routes(
        ("dense", TP2_PP2, Launch(1, 2)),
        ("dense", TP2_PP2_BF16, Launch(4, 1)),
        ("dense", DP4, TP2_PP2_BF16),
        ("llama", Plain(2, stage=2), Plain(4, stage=1)),
        ("llama", Plain(2, stage=2), Plain(1, stage=3)),
    ),
)
def test_a_save_after_the_resume_is_deepspeeds_own(
    model: str, source: Launch, target: Launch, runs: Runs, tmp_path: Path
) -> None:
    again = str(tmp_path / "again")
    resumed = runs.resumed(model, source, target, again=again)
    loaded = runs.run(target, load_plainly, model, target, again)
    count, differences = compare(join(resumed, model), join(loaded, model))
    assert count > 80
    assert not differences, "\n".join(differences[:20])
    check_losses(resumed, loaded, target)


# --- arguments of load_checkpoint


@pytest.mark.parametrize("arguments", [{"load_optimizer_states": False}, {"load_module_only": True}], ids="".join)
@pytest.mark.parametrize(
    ("model", "source", "target"),
    list_routes(
        ("dense", TP2_PP2, Launch(1, 2)),
        ("dense", TP2_PP2_STAGE0, Launch(4, 1)),
        ("llama", Plain(2, stage=2), Plain(1, stage=3)),
    ),
)
def test_weights_only(model: str, source: Launch, target: Launch, arguments: dict[str, bool], runs: Runs) -> None:
    resumed = runs.resumed(model, source, target, arguments=arguments)
    saved, loaded = join(runs.saved(model, source), model), join(resumed, model)
    if source.loses_copies:
        saved.parameters = {name: state for name, state in saved.parameters.items() if "#" not in name}
    expected = expect(saved, loaded)
    if "load_module_only" in arguments:
        expected.counters = dict.fromkeys(expected.counters, 0)
    count, differences = compare(expected, loaded, optimizer_states=False)
    assert count > 25
    assert not differences, "\n".join(differences[:20])
    moments = [state.tensors.get("exp_avg") for state in loaded.parameters.values()]
    assert not any(moment is not None and moment.any() for moment in moments)


# --- one rank's error is all ranks' error


def test_one_ranks_error_is_the_same_on_all(runs: Runs) -> None:
    runs.saved("dense", TP2_PP2)
    folder, target = runs.folder("dense", TP2_PP2), Launch(2, 1)
    refusals = runs.run(target, attempt, "dense", target, folder, unreadable="mp_rank_03")
    assert len({refusal.message for refusal in refusals}) == 1
    assert "mp_rank_03" in refusals[0].message
    assert all(refusal.changed == [] for refusal in refusals)
    assert runs.run(target, attempt, "dense", target, folder)[0].error == ""


def test_a_damaged_shard_is_refused(runs: Runs, tmp_path: Path) -> None:
    runs.saved("dense", TP2_PP2)
    folder = tmp_path / "damaged"
    shutil.copytree(runs.folder("dense", TP2_PP2), folder)
    (path,) = folder.glob("*/*zero_pp_rank_0_mp_rank_03_optim_states.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    target = Launch(4, 1)
    refusals = runs.run(target, attempt, "dense", target, str(folder))
    assert {refusal.error for refusal in refusals} == {"CheckpointError"}
    assert len({refusal.message for refusal in refusals}) == 1
    assert path.name in refusals[0].message
    assert all(refusal.changed == [] for refusal in refusals)


def test_replicas_that_differ_are_refused(runs: Runs, tmp_path: Path) -> None:
    """Rank 1 drifted; a rule can say that the mean counts."""
    runs.saved("llama", Plain(2, stage=2))
    folder = tmp_path / "drifted"
    shutil.copytree(runs.folder("llama", Plain(2, stage=2)), folder)
    name = "language_model.encoder.final_layernorm.weight"
    shift_master(folder, name, 0.25)
    target = Plain(1, stage=1)
    refusals = runs.run(target, attempt, "llama", target, str(folder))
    assert {refusal.error for refusal in refusals} == {"MismatchError"}
    assert name in refusals[0].message
    assert "2.500e-01" in refusals[0].message
    mean = {"rules": [{"match": name.replace(".", r"\."), "pattern": "partial"}]}
    resumed = runs.run(target, resume, "llama", target, str(folder), mean)
    before = join(runs.saved("llama", Plain(2, stage=2)), "llama").parameters[name].fp32
    torch.testing.assert_close(join(resumed, "llama").parameters[name].fp32, before + 0.125, rtol=0, atol=1e-7)
