"""Model-parallel checkpoints that are not one whole save: what is missing or foreign is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.atoms import MASTER, AtomicIndex
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, MismatchError, UcpError, UnsupportedError
from deepspeed_ucp.sources import open_checkpoint
from tests.sources.parallel import tail_cut
from tests.sources.test_index import name_groups
from tests.sources.test_parallel import PIPE, PLAIN, WORD
from tests.synth import Layer, Model, Param, Run, Topology, build_files, random_state, write_files

PIPED = Topology(1, 2, "bf16", tp=2, pp=2)
FLAT = Topology(2, 2, "bf16", tp=2)
SHARDED = Topology(3, 2, "bf16", tp=2)
KINDS = [(PIPE, PIPED), (PLAIN, FLAT), (PLAIN, SHARDED), (PLAIN, Topology(0, 1, tp=2))]

Files = dict[str, dict[str, Any]]


def make_files(model: Model, topology: Topology, seed: int = 0, run: Run | None = None, **options: Any) -> Files:
    state = random_state(model, seed, precision=topology.precision, topology=topology, **options)
    return build_files(model, state, topology, run or Run(), cut=tail_cut)


def open_files(folder: Path, model: Model, files: Files) -> AtomicIndex:
    write_files(folder, files)
    return open_checkpoint(str(folder), Comm(), name_groups(model))


def refuse(folder: Path, model: Model, files: Files, kind: type[UcpError], text: str) -> None:
    with pytest.raises(kind, match=text):
        open_files(folder, model, files)


@pytest.mark.parametrize(("model", "topology"), KINDS, ids=[topology.label for _, topology in KINDS])
def test_any_missing_file_of_a_further_rank_is_named(tmp_path: Path, model: Model, topology: Topology) -> None:
    files = make_files(model, topology)
    for name in files:
        if "mp_rank_00" in name or name.startswith("layer"):
            continue
        rest = {key: content for key, content in files.items() if key != name}
        refuse(tmp_path / name, model, rest, CheckpointError, f"{name}.* missing; the checkpoint was saved by")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_missing_layer_is_named(tmp_path: Path, tp: int) -> None:
    files = make_files(PIPE, Topology(1, 1, tp=tp, pp=2))
    for name in [name for name in files if name.startswith(("layer_01", "layer_04"))]:
        rest = {key: content for key, content in files.items() if key != name}
        refuse(tmp_path / name, PIPE, rest, CheckpointError, f"{name} (is )?missing")


def test_a_layer_that_all_ranks_lack_is_named(tmp_path: Path) -> None:
    files = {name: content for name, content in make_files(PIPE, PIPED).items() if "layer_02" not in name}
    refuse(tmp_path, PIPE, files, CheckpointError, "layer_02-model_00-model_states.pt missing; .*have parameters")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Topology(1, 2, tp=2, pp=2), Topology(1, 2, tp=1, pp=2, model_axis=True)),
        (Topology(1, 3, tp=2, pp=4), Topology(1, 2, tp=2, pp=2)),
        (Topology(1, 2, pp=2), Topology(1, 2, tp=2, pp=2)),
    ],
    ids=["tp2+tp1", "pp4+pp2", "no axis+tp2"],
)
def test_leftovers_of_an_earlier_save_are_ignored(
    tmp_path: Path, old: Topology, new: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path, make_files(PIPE, old, seed=1))
    caplog.set_level(logging.WARNING, "deepspeed_ucp")
    index = open_files(tmp_path, PIPE, make_files(PIPE, new))
    assert "ignoring files of an earlier save" in caplog.text
    assert (index.run.topology.tp, index.run.topology.pp) == (new.tp, new.pp)
    assert {Path(file.path).name for file in index.stored.files} <= set(make_files(PIPE, new))
    assert "files of an earlier save" in " ".join(index.limits.unnoticed)


def test_layer_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, make_files(PIPE, Topology(1, 1, pp=2, model_axis=True), seed=1))
    files = make_files(PIPE, Topology(1, 1, pp=2))
    text = r"two saves \(layer_00-model_states.pt and layer_00-model_00-model_states.pt"
    refuse(tmp_path, PIPE, files, CheckpointError, text)


def test_layer_files_that_do_not_divide_the_ranks_are_refused(tmp_path: Path) -> None:
    files = make_files(PIPE, Topology(1, 1, tp=3, pp=2), run=Run(parallel_dimensions=False))
    for name in [name for name in files if "model_02" in name]:
        del files[name]
    for name in [name for name in files if name.startswith("mp_rank")]:
        files[name]["mp_world_size"] = 5
    refuse(tmp_path, PIPE, files, CheckpointError, "saved by 5 model-parallel ranks, its layer files are of 2")


def mix(model: Model, topology: Topology, other: Files, *ends: str) -> Files:
    """A checkpoint with some files of another."""
    files = make_files(model, topology)
    return {**files, **{name: content for name, content in other.items() if name.endswith(ends)}}


@pytest.mark.parametrize(("model", "topology"), KINDS, ids=[topology.label for _, topology in KINDS])
def test_model_states_of_another_step_are_refused(tmp_path: Path, model: Model, topology: Topology) -> None:
    other = make_files(model, topology, run=Run(global_steps=9))
    files = mix(model, topology, other, "mp_rank_01_model_states.pt")
    text = r"mp_rank_01_model_states.pt( \(2 files\))?: its step differs .*global_steps 9 ≠"
    refuse(tmp_path, model, files, CheckpointError, text)


@pytest.mark.parametrize("mp", [1, 2, 3])
def test_optimizer_states_of_another_step_are_refused(tmp_path: Path, mp: int) -> None:
    """Those of a further stage too, whose parameters the first stage's files do not have."""
    other = make_files(PIPE, PIPED, seed=1, step=4)
    files = mix(PIPE, PIPED, other, f"mp_rank_{mp:02d}_optim_states.pt", f"mp_rank_{mp ^ 1:02d}_optim_states.pt"[:mp])
    refuse(tmp_path, PIPE, files, CheckpointError, r"has step [34]\.0, other .* [34]\.0.*another step")


def test_a_stage_of_another_step_is_refused(tmp_path: Path) -> None:
    other = make_files(PIPE, PIPED, seed=1, step=4)
    files = mix(PIPE, PIPED, other, "mp_rank_02_optim_states.pt", "mp_rank_03_optim_states.pt")
    text = r"mp_rank_02_optim_states.pt: has step 4\.0, other stages of this checkpoint have 3\.0"
    refuse(tmp_path, PIPE, files, CheckpointError, text)


def test_a_tensor_parallel_rank_with_another_learning_rate_is_refused(tmp_path: Path) -> None:
    files = make_files(PLAIN, FLAT)
    for name in [name for name in files if "mp_rank_01_optim" in name]:
        for group in files[name]["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group["lr"] = 0.5
    text = r"_{0-1}_mp_rank_01_optim_states.pt \(2 files\): groups differs from .*mp_rank_00.*group 0: lr 0.5 ≠ 0.001"
    refuse(tmp_path, PLAIN, files, CheckpointError, text)


@pytest.mark.parametrize("run", [Run(clip_grad=0.25), Run(global_steps=4)], ids=["clip_grad", "scaler"])
def test_a_stage_of_another_run_is_refused_by_what_differs(
    tmp_path: Path, run: Run, request: pytest.FixtureRequest
) -> None:
    topology = Topology(1, 2, "fp16", pp=2)
    files = mix(PIPE, topology, make_files(PIPE, topology, run=run), "mp_rank_01_optim_states.pt")
    what = request.node.callspec.id
    text = rf"_{{0-1}}_mp_rank_01_optim_states.pt \(2 files\): {what} differs from .*mp_rank_00"
    refuse(tmp_path, PIPE, files, CheckpointError, text)


def test_a_stage_of_another_world_size_is_refused(tmp_path: Path) -> None:
    topology = Topology(1, 2, pp=2)
    files = mix(PIPE, topology, make_files(PIPE, Topology(1, 3, pp=2)), "mp_rank_01_optim_states.pt")
    refuse(tmp_path, PIPE, files, CheckpointError, r"was saved by \(3, 3\) ranks, the model states say 2")


def test_tensor_parallel_ranks_that_hold_other_parameters_are_refused(tmp_path: Path) -> None:
    """As ranks that are numbered tensor-parallel first would."""
    files = make_files(PLAIN, FLAT)
    lesser = Model(tuple(param for param in PLAIN.params if param.name != "a.row"), PLAIN.buffers)
    files = {**files, **{n: c for n, c in make_files(lesser, FLAT).items() if "mp_rank_01" in n}}
    text = r"holds a.row \(fp32\), the files of tensor-parallel rank 1 do not"
    refuse(tmp_path, PLAIN, files, CheckpointError, text)


def test_a_state_that_one_tensor_parallel_rank_lacks_is_named(tmp_path: Path) -> None:
    files = make_files(PLAIN, FLAT)
    for name in [name for name in files if "mp_rank_01_optim" in name]:
        del files[name]["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    text = r"holds a.col \(exp_avg\), the files of tensor-parallel rank 1 do not"
    refuse(tmp_path, PLAIN, files, CheckpointError, text)


def test_stage0_ranks_with_and_without_optimizer_are_refused(tmp_path: Path) -> None:
    files = make_files(PLAIN, Topology(0, 1, tp=2))
    files["mp_rank_01_model_states.pt"]["optimizer"] = None
    refuse(tmp_path, PLAIN, files, CheckpointError, "mp_rank_01_model_states.pt: kind differs from .*None ≠ torch")


# -- tied modules that cannot be told apart ---------------------------------------------------------------------------

TWINS = Model(
    (
        Param("tied_modules.one.col", (4, 3), tied=True),
        Param("tied_modules.two.col", (4, 3), tied=True),
        Param("2.row", (3, 4)),
    ),
    {},
    (Layer("one"), Layer("two"), Layer(), Layer("one"), Layer("two")),
)


def test_copies_of_twin_modules_are_left_out(tmp_path: Path) -> None:
    files = make_files(TWINS, Topology(1, 1, "bf16", tp=2, pp=2))
    index = open_files(tmp_path, TWINS, files)
    assert {key.name for key in index.stored.atoms if key.state == "copy"} == {"2.row"}
    assert len(index.model.instances) == 2


def test_frozen_parameters_of_twin_modules_are_not_lost(tmp_path: Path) -> None:
    files = make_files(TWINS, Topology(1, 1, "bf16", pp=2))
    files["layer_00-model_states.pt"]["fixed"] = torch.ones(2)
    refuse(tmp_path, TWINS, files, UnsupportedError, r"layer_00-model_states.pt: holds fixed of a tied module")


# -- stage 0 ----------------------------------------------------------------------------------------------------------

LAYERS = Model(tuple(Param(f"{i}.col", (4, 3)) for i in range(4)), {}, (Layer(),) * 4)


@pytest.mark.parametrize(
    "topology", [Topology(0, 1, pp=2), Topology(0, 1, "fp16", "fused", tp=2, pp=2)], ids=lambda t: t.label
)
def test_stages_of_equal_layers_are_told_by_their_number(tmp_path: Path, topology: Topology) -> None:
    index = open_files(tmp_path, LAYERS, make_files(LAYERS, topology))
    assert {key.name for key in index.stored.atoms if key.state == MASTER} == {param.name for param in LAYERS.params}


def test_a_stage0_pipeline_needs_a_live_engine(tmp_path: Path) -> None:
    write_files(tmp_path, make_files(LAYERS, Topology(0, 1, pp=2)))
    with pytest.raises(MismatchError, match="there is no live engine to name them"):
        open_checkpoint(str(tmp_path), Comm(), None)
    index = open_checkpoint(str(tmp_path), Comm(), None, weights_only=True)
    assert {key.state for key in index.stored.atoms} == {"module"}


def test_weights_alone_of_a_stage0_pipeline_have_their_names(tmp_path: Path) -> None:
    """The live groups do not fit the saved ones, but they tell which names are a tied module's."""
    write_files(tmp_path, make_files(PIPE, Topology(0, 1, tp=2, pp=2)))
    live = [[(param.name, True)] for param in PIPE.params]
    index = open_checkpoint(str(tmp_path), Comm(), live, weights_only=True)
    assert {key.name for key in index.stored.atoms} == {param.name for param in PIPE.params} | set(PIPE.buffers)
    with pytest.raises(MismatchError, match="the param groups must be made as in the saved run"):
        open_checkpoint(str(tmp_path), Comm(), live)


def test_runs_of_layers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    topology = Topology(0, 1, pp=2, placement=((0, 2), (1, 3)))
    model = Model(
        (Param("0.a", (4, 3)), Param("1.b", (5,)), Param("2.c", (2, 2)), Param("3.d", (7,))), {}, LAYERS.layers
    )
    refuse(tmp_path, model, make_files(model, topology), MismatchError, "no division of the layers into 2 runs fits")


def test_runs_of_layers_that_fit_in_two_ways_are_refused(tmp_path: Path) -> None:
    """A tied module as large as a layer, before the first step: nothing has a shape to compare."""
    model = Model(
        (Param(WORD, (4, 3), tied=True), Param("1.a", (4, 3)), Param("2.b", (4, 3))),
        {},
        (Layer("embed"), Layer(), Layer(), Layer("embed", file=False)),
    )
    files = make_files(model, Topology(0, 1, "fp16", "fused", pp=2, placement=((0, 1), (2, 3))))
    index = open_files(tmp_path, model, files)
    assert index.model.instances == {WORD: 2}
    larger = Model(
        (Param(WORD, (4, 3), tied=True), *(Param(f"{i}.a", (4, 3)) for i in range(1, 4))),
        {},
        (Layer("embed"), Layer(), Layer(), Layer(), Layer("embed", file=False)),
    )
    files = make_files(larger, Topology(0, 1, "fp16", "fused", pp=3, placement=((0, 1), (2,), (3, 4))))
    refuse(tmp_path / "larger", larger, files, MismatchError, "cannot be told from their states' sizes")
