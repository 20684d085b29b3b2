"""Saves of special engines: read, partly read, or refused by name, depending on ds_config and states.

ZenFlow, AutoEP, LoRA, offload, 1-bit Adam, MiCS (up to DeepSpeed 0.18) and DeepSpeed's FusedAdam.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.deepspeed.save import describe_offload
from deepspeed_ucp.formats.open import survey_checkpoint
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import MODULE, AtomKey
from tests.formats.saves import STATES, assign, edit, find_states, make_files, open_files, shard
from tests.synth import Model, Param, Topology, write_files

MODEL = Model((Param("a", (9, 5)), Param("frozen", (7,), frozen=True), Param("b", (17,), group=1)))


@pytest.mark.parametrize("stage", [2, 3])
def test_zenflow_saves_load_weights_but_refuse_states(stage: int, tmp_path: Path) -> None:
    """The weights of ZeRO 1 and 2 are in the model states."""
    remedy = {2: "load_optimizer_states=False", 3: "transposed partitions"}[stage]
    files = make_files(MODEL, Topology(stage, 2), zero={"zenflow": {"topk_ratio": 0.1}})
    with pytest.raises(UnsupportedError, match=f"was saved by ZenFlow.*behind the weights.*{remedy}"):
        open_files(tmp_path, files)
    if stage == 2:
        assert open_checkpoint(str(tmp_path), Comm(), Naming(weights_only=True)).find("a", "copy")
    else:
        with pytest.raises(UnsupportedError, match="was saved by ZenFlow"):
            open_checkpoint(str(tmp_path), Comm(), Naming(weights_only=True))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_autoep_saves_need_a_placement_of_experts(stage: int, tmp_path: Path) -> None:
    """AutoEP without layers is a dense model."""
    files = make_files(MODEL, Topology(stage, 2))
    for name, tree in files.items():
        tree["ds_config"]["expert_parallel"] = {"enabled": True, "autoep_size": 2}
        if "model_states" in name and stage != 1:
            tree["num_experts"] = [1]
    if stage == 1:
        assert open_files(tmp_path, files).find("a", "fp32")
        return
    if stage == 0:
        files["layer_0_expert_0_mp_rank_00_model_states.pt"] = {"experts.w1.0": torch.ones(2)}
        optimizer = files[STATES]["optimizer"]
        files["expp_rank_0_mp_rank_00_optim_states.pt"] = {"optimizer": optimizer}
    text = "mixture-of-experts checkpoint of AutoEP without a placement of the experts"
    with pytest.raises(UnsupportedError, match=text):
        open_files(tmp_path, files)


LORA = (
    Param("l.lora_weight_1.weight", (2, 8)),
    Param("l.lora_weight_2.weight", (5, 2)),
)


@pytest.mark.parametrize(("stage", "shape"), [(1, (20,)), (3, (20,)), (1, (5, 8))], ids=str)
def test_base_weights_of_lora_must_be_whole(stage: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    files = make_files(Model((Param("l.weight", shape, frozen=True), *LORA)), Topology(stage, 2))
    if len(shape) == 2:
        assert open_files(tmp_path, files).find("l.weight", "module")
        return
    with pytest.raises(UnsupportedError, match="only rank 0's slice was saved.*l.weight"):
        open_files(tmp_path, files)


@pytest.mark.parametrize("path", ["/nvme", Path("/nvme")], ids=["text", "path"])
@pytest.mark.parametrize("numel", [7, 2])
def test_placeholders_of_frozen_parameters_on_nvme(numel: int, path: object, tmp_path: Path) -> None:
    """With 2 elements each rank has one, and only the ds_config shows the placeholder."""
    model = Model((Param("a", (9, 5)), Param("frozen", (numel,), frozen=True)))
    files = make_files(model, Topology(3, 2), zero={"offload_param": {"device": "nvme", "nvme_path": path}})
    for tree in files.values():
        for name in tree.get("frozen_param_fragments", {}):
            tree["frozen_param_fragments"][name] = torch.ones(1, dtype=torch.float16)
    index = open_files(tmp_path, files)
    assert list(index.unreadable) == [AtomKey("frozen", MODULE)]
    assert "placeholder" in index.unreadable[AtomKey("frozen", MODULE)]


@pytest.mark.parametrize(
    ("section", "number"),
    [
        ({"enabled": True, "dtype": "torch.float16"}, 1),
        ({"enabled": True, "dtype": "half"}, 1),
        ({"enabled": True, "dtype": torch.float16}, 1),
        ({"enabled": False, "dtype": "fp16"}, 0),
        ({"enabled": True, "dtype": "bfloat16"}, 0),
        ({"enabled": True}, 0),
    ],
    ids=str,
)
def test_an_unsaved_grad_scaler_is_a_warning(section: dict[str, Any], number: int, tmp_path: Path) -> None:
    files = make_files(MODEL, Topology(1, 2))
    write_files(tmp_path, edit("", lambda tree: tree["ds_config"].update(torch_autocast=section))(files))
    findings = survey_checkpoint(str(tmp_path), Comm()).findings
    assert [finding.kind for finding in findings if not finding.is_fault] == ["unsaved"] * number


@pytest.mark.parametrize(
    ("options", "message", "offload"),
    [({"super_offload": True}, "SuperOffload", "superoffload/none"), ({"ratio": 0.5}, "ratio 0.5", "cpu/none")],
    ids=["superoffload", "partial"],
)
def test_unsaved_moments_are_irregular(options: dict[str, Any], message: str, offload: str, tmp_path: Path) -> None:
    files = make_files(MODEL, Topology(3, 2), zero={"offload_optimizer": {"device": "cpu", **options}})
    assert open_files(tmp_path / "whole", files).irregular == {}
    index = open_files(tmp_path / "lost", edit("optim_states", lambda tree: find_states(tree)["state"].pop(0))(files))
    assert list(index.irregular) == [AtomKey("a", "moments")]
    assert message in index.irregular[AtomKey("a", "moments")]
    assert index.topology.offload == offload


@pytest.mark.parametrize(
    ("zero", "devices"),
    [
        ({}, "none/none"),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}, "cpu/nvme"),
        ({"offload_optimizer": {}}, "none/none"),
        ({"cpu_offload": True}, "cpu/none"),
        ({"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}, "zenflow/none"),
        ({"cpu_offload": False, "cpu_offload_param": True}, "none/cpu"),
    ],
    ids=str,
)
def test_offload_devices_of_a_configuration(zero: dict[str, Any], devices: str) -> None:
    assert describe_offload(zero) == devices


@pytest.mark.parametrize("padding", [0, 3])
def test_compression_errors_and_states_of_other_sizes_are_irregular(padding: int, tmp_path: Path) -> None:
    """1-bit Adam (up to DeepSpeed 0.18) pads its errors to a multiple of the number of ranks."""
    files = make_files(MODEL, Topology(1, 2))
    for scale, tree in zip((1.0, math.nan), (files[shard(rank)] for rank in range(2)), strict=True):
        for state in find_states(tree)["state"].values():
            state |= {"scale": scale, "fixed": math.nan}
            state |= {"worker_error": torch.zeros(len(state["exp_avg"]) + padding), "row": torch.zeros(3)}
            state |= {"late": 1.0} if math.isnan(scale) else {}
        find_states(tree)["state"] |= {"common": {"rho": 1.0}, "empty": {}}
        find_states(tree)["slow_state"] = {0: torch.ones(3)}
    index = open_files(tmp_path, files)
    message = "a compression error of rank 0; those of other ranks are not saved"
    assert index.irregular[AtomKey("a", "worker_error")] == message
    assert "shape (3,) where the parameter's part has" in index.irregular[AtomKey("a", "row")]
    assert not {"worker_error", "row"} & {key.state for key in index.atoms}
    message = "a number that differs between ranks, 1.0 on one and nan on another"
    assert index.irregular[AtomKey("a", "scale")] == message
    assert AtomKey("a", "fixed") not in index.irregular
    assert index.irregular[AtomKey("b", "late")] == "a number that only some of its ranks have"
    for common in ("common", "slow_state"):  # keys of the whole optimizer
        assert index.irregular[AtomKey("a", common)] == "a dict of 2 parts"
    assert AtomKey("a", "empty") not in index.irregular


@pytest.mark.parametrize("convert", [float, np.float64, torch.tensor])
@pytest.mark.parametrize("topology", [Topology(2, 1, "fp16"), Topology(0, 1, "fp16", "fused")], ids=lambda t: t.label)
def test_a_loss_scale_of_any_type_is_read(topology: Topology, convert: Any, tmp_path: Path) -> None:
    files = make_files(MODEL, topology)
    for tree in files.values():
        state = tree.get("optimizer_state_dict") or tree["optimizer"] or {}
        if "loss_scaler" in state:
            state["loss_scaler"].cur_scale = convert(2.0**20)
        elif "cur_scale" in state:
            state["cur_scale"] = convert(2.0**20)
    index = open_files(tmp_path, files, Naming(MODEL.live_groups))
    assert index.scaler["cur_scale"] == 2.0**20


# -- MiCS: each group of ranks holds all partitions, and the first group saves ----------------------------------------


def save_mics(folder: Path, shard: Any = -1, ranks: int = 2) -> AtomicIndex:
    """Open ZeRO 3's save of two partitions with the metadata of ``ranks`` ranks under MiCS."""
    files = make_files(MODEL, Topology(3, 2), zero={"mics_shard_size": shard})
    return open_files(folder, assign("model_states", dp_world_size=ranks)(files))


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_mics_partitions_of_the_first_group_are_read(tmp_path: Path, ranks: int) -> None:
    plain, index = save_mics(tmp_path / "plain"), save_mics(tmp_path / "mics", 2, ranks)
    assert index.atoms == plain.atoms
    assert index.topology == plain.topology
    assert len(index.unnoticed) == (ranks > 2)  # DeepSpeed's load would refuse the number of ranks


@pytest.mark.parametrize("shard", [0, 3, 8])
def test_a_mics_size_that_does_not_divide_the_ranks_is_refused(tmp_path: Path, shard: Any) -> None:
    with pytest.raises(UnsupportedError, match="ds_config.*mics_shard_size .* of 4 data-parallel ranks"):
        save_mics(tmp_path, shard, 4)


def test_without_mics_the_files_of_all_ranks_are_needed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_{2-3}_.* \(2 files\) is missing"):
        save_mics(tmp_path, -1, 4)


# -- steps that FusedAdam counts once per group, and stale copies of offloaded states ---------------------------------

STEPPED = Model((Param("a", (9, 5)), Param("b", (17,)), Param("c", (3,)), Param("d", (4,), group=1)))
FUSED = {"bias_correction": True, "step": 0}
"""Entries of a param group of DeepSpeed's FusedAdam."""


@pytest.mark.parametrize(
    ("steps", "group", "half", "expected"),
    [
        pytest.param([0, 0, 7, 7], FUSED, "", [7, 7, 7, 7], id="the last one counts for its group"),
        pytest.param([0, 7, None, 5], FUSED, "", [7, 7, None, 5], id="the last one that has states"),
        pytest.param([0, 0, 0, 0], FUSED, "", [0, 0, 0, 0], id="none"),
        pytest.param([3, 0, 7, 7], FUSED, "", [3, 0, 7, 7], id="the last one was another for a while"),
        pytest.param([0, 0, 14, 7], FUSED, "b", [0, 0, 14, 7], id="several dtypes each count"),
        pytest.param([0, 0, 7, 7], {"bias_correction": True}, "", [0, 0, 7, 7], id="another optimizer"),
        pytest.param([0, 0, 7, 7], {**FUSED, "step": 7}, "", [0, 0, 7, 7], id="a group that counts itself"),
    ],
)
def test_steps_of_deepspeeds_fused_adam(
    steps: list[int | None], group: dict[str, Any], half: str, expected: list[int | None], tmp_path: Path
) -> None:
    """A step of None: the parameter has no states; ``half`` is a parameter with 16-bit states."""
    files = make_files(STEPPED, Topology(0))
    optimizer = files[STATES]["optimizer"]
    for place, (param, step) in enumerate(zip(STEPPED.params, steps, strict=True)):
        held = optimizer["state"].pop(place)
        if step is not None:
            states = {n: t.bfloat16() if param.name == half else t for n, t in held.items() if torch.is_tensor(t)}
            optimizer["state"][place] = {**states, "step": step}
    for each in optimizer["param_groups"]:
        each.update(group)
    index = open_files(tmp_path, files, Naming(groups=[["a", "b", "c"], ["d"]]))
    found = {param.name: held["step"] for param, held in index.scalars.items() if held}
    assert found == {n: step for n, step in zip("abcd", expected, strict=True) if step is not None}


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_of_offload_states_are_ignored(stage: int, tmp_path: Path) -> None:
    files = make_files(MODEL, Topology(stage, 2))
    for tree in (tree for name, tree in files.items() if "optim_states" in name):
        for held in find_states(tree)["state"].values():
            held["exp_avg_offload_buffer"] = torch.zeros_like(held["exp_avg"])
            held["own_offload_buffer"] = torch.zeros_like(held["exp_avg"])
    states = {key.state for key in open_files(tmp_path, files).atoms}
    assert "exp_avg_offload_buffer" not in states
    assert "own_offload_buffer" in states
