"""Checkpoints without optimizer files: published weights, missing files, releases that wrote no such file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import ConvertOptions, convert_index
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.examine.degrees import parse_degrees
from deepspeed_ucp.examine.resume import check_resume
from deepspeed_ucp.examine.verify import list_findings
from deepspeed_ucp.export.dcp import export_dcp
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.open import open_checkpoint, survey_checkpoint
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.direct import run_load
from tests.support.reshard import FakeTarget, open_for
from tests.support.reshard3d import draw_state, load_all, make_config, make_pipeline
from tests.synth import Model, Param, Topology, build_files, random_state, write_files

MODEL = Model((Param("a", (7, 13)), Param("b", (5, 7), group=1), Param("frozen", (9,), frozen=True)))


def lose(folder: Path, topology: Topology, model: Model = MODEL) -> Path:
    """Write a save without files of optimizer states; for stage 0 in bf16 as DeepSpeed 0.17.6 writes it."""
    state = random_state(model, 0, precision=topology.precision)
    files = build_files(model, state, topology)
    if topology.stage == 0:
        zero = build_files(model, state, Topology(1, topology.dp, topology.precision))
        for name, tree in files.items():
            tree.update(optimizer=None, param_shapes=zero[name]["param_shapes"])
    write_files(folder, {name: tree for name, tree in files.items() if "optim_states" not in name})
    return folder


LOST = [Topology(1, 3), Topology(2, 2, "bf16"), Topology(0, 2, "bf16", "fused")]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("source", LOST, ids=lambda each: each.label)
@pytest.mark.parametrize("target", [None, Topology(3), Topology(0)], ids=["same", "zero3", "stage0"])
def test_a_load_with_optimizer_states_is_refused_without_their_files(
    source: Topology, target: Topology | None, strict: bool, tmp_path: Path
) -> None:
    path = lose(tmp_path, source)
    rank = FakeTarget(MODEL, target or source, 0)
    before = [flat.data.clone() for flat in rank.flats]
    with pytest.raises(CheckpointError) as error:
        run_load(open_for(path, rank), rank, load_module_strict=strict)
    prefix = "bf16_" if source.precision == "bf16" else ""
    missing = f"{prefix}zero_pp_rank_{{0-{source.dp - 1}}}_mp_rank_00_optim_states.pt missing"
    assert ("DeepSpeed 0.17.6 to 0.18.4 do not write them" if source.stage == 0 else missing) in str(error.value)
    assert "load_optimizer_states=False" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert all(torch.equal(flat.data, old) for flat, old in zip(rank.flats, before, strict=True))


def test_states_that_older_releases_never_wrote_are_not_reported_as_missing_files(tmp_path: Path) -> None:
    """DeepSpeed 0.17.6 to 0.18.4 use FP16_UnfusedOptimizer for bf16 with fp32 gradients, at ZeRO 1."""
    topology = Topology(1, 2, "bf16")
    tree = build_files(MODEL, random_state(MODEL, 0, precision="bf16"), topology)["mp_rank_00_model_states.pt"]
    tree["ds_config"]["data_types"] = {"grad_accum_dtype": "fp32"}
    write_files(tmp_path, {"mp_rank_00_model_states.pt": tree})
    rank = FakeTarget(MODEL, topology, 0)
    with pytest.raises(CheckpointError, match=r"do not write them .* or with fp32 gradients"):
        run_load(open_for(tmp_path, rank), rank)


@pytest.mark.parametrize("source", LOST, ids=lambda each: each.label)
def test_load_optimizer_states_false_loads_weights_without_optimizer_files(source: Topology, tmp_path: Path) -> None:
    path = lose(tmp_path, source)
    saved = random_state(MODEL, 0, precision=source.precision)
    rank = FakeTarget(MODEL, Topology(0), 0)
    run_load(open_for(path, rank), rank, load_optimizer_states=False)
    for flat in rank.flats:
        weight = saved.atoms[flat.name]["fp32"].to(source.dtype)
        assert torch.equal(flat.data.view(weight.shape), weight.float())


@pytest.mark.parametrize("source", LOST, ids=lambda each: each.label)
def test_commands_report_missing_optimizer_files(source: Topology, tmp_path: Path) -> None:
    """They report neither a save without ZeRO nor a complete one."""
    path = lose(tmp_path / "in", source)
    report = survey_checkpoint(str(path), Comm())
    index = report.require()
    assert index.topology.describe().startswith(f"ZeRO-{source.stage} ")
    assert index.topology.describe().endswith("(optimizer states missing)")
    assert any("load_optimizer_states=False" in each.text for each in list_findings(report))
    check = check_resume(index, parse_degrees("dp=3", index.topology))
    assert any("load_optimizer_states=False" in text for text in check.obstacles)
    out = str(tmp_path / "out")
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        convert_index(index, str(path), out, Comm(), ConvertOptions())
    with pytest.raises(Exception, match="--weights-only"):
        export_dcp(index, out, Comm(), ExportOptions())
    assert export_safetensors(index, out, Comm(), ExportOptions()).tensors == 3


def test_a_save_of_a_run_without_optimizer_loads_weights_only(tmp_path: Path) -> None:
    """For example, a save of an evaluation: no file is missing, but training cannot continue from it."""
    files = build_files(MODEL, random_state(MODEL, 0), Topology(0))
    for tree in files.values():
        tree["optimizer"] = None
    write_files(tmp_path, files)
    rank = FakeTarget(MODEL, Topology(1), 0)
    index = open_for(tmp_path, rank)
    assert index.topology.describe() == "ZeRO-0 float32 (none)"
    with pytest.raises(CheckpointError, match=r"had no optimizer.*load_optimizer_states=False"):
        run_load(index, rank, load_module_strict=False)
    run_load(index, rank, load_optimizer_states=False)


TIED = make_pipeline([["column", "norm"], ["row"]])


@pytest.mark.parametrize("files", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    "source", [Topology(1, 2, pp=2), Topology(1, 1, "bf16", "bf16", pp=2, tp=2)], ids=lambda each: each.label
)
def test_tied_modules_load_without_optimizer_files(source: Topology, files: tuple[bool, bool], tmp_path: Path) -> None:
    """DeepSpeed ties only the embedding's weight. A stage without a file gets other weights from another stage."""
    first, *others, last = TIED.layers
    model = replace(TIED, layers=(replace(first, file=files[0]), *others, replace(last, file=files[1])))
    held = draw_state(model, source)
    held.write(tmp_path)
    for path in tmp_path.glob("*optim_states.pt"):
        path.unlink()
    config, targets = make_config(model), held.make_targets()
    index, _ = load_all(tmp_path, targets, config, with_states=False)
    assert index.stateless
    for parallel, flat in ((rank.parallel, flat) for rank in targets for flat in rank.flats):
        for cut in flat.buffer.cuts(flat.part):
            stage = parallel.pp_rank if all(files) or "positions" not in cut.name else files.index(True)
            local = held.locals[stage * parallel.tp + parallel.tp_rank]
            weight = local.state.atoms[cut.name]["fp32"].to(source.dtype).float().reshape(-1)
            assert flat.data[cut.offset : cut.offset + cut.numel].equal(weight[cut.start :][: cut.numel])
    again = held.make_targets()
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        load_all(tmp_path, again, config, strict=False)
    rules = from_config(config.patterns)
    assert export_safetensors(index, f"{tmp_path}-out", Comm(), ExportOptions(), rules=rules).tensors == 7


@pytest.mark.parametrize("source", LOST[:2], ids=lambda each: each.label)
def test_weights_load_if_a_file_of_optimizer_states_is_missing(
    source: Topology, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A load with states is refused."""
    write_files(tmp_path, build_files(MODEL, random_state(MODEL, 0, precision=source.precision), source))
    next(tmp_path.glob("*zero_pp_rank_1_*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="optim_states.pt is missing"):
        open_checkpoint(str(tmp_path), Comm())
    assert not caplog.records
    index = open_checkpoint(str(tmp_path), Comm(), Naming(weights_only=True))
    assert index.stateless and not index.find("a", "fp32") and index.find("a", "copy")
    assert [record.getMessage() for record in caplog.records if "only weights are loaded" in record.getMessage()]


def test_weights_of_zero_3_need_the_optimizer_files(tmp_path: Path) -> None:
    write_files(tmp_path, build_files(MODEL, random_state(MODEL, 0), Topology(3, 2)))
    next(tmp_path.glob("*zero_pp_rank_1_*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="optim_states.pt is missing"):
        open_checkpoint(str(tmp_path), Comm(), Naming(weights_only=True))
