"""Compare a rank's files with the live engine before a load by DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats.deepspeed.ownfiles import compare_own_files, list_own_globals

EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts.0.weight"
PLACEMENT = {"num_experts": 4, "ep_size": 2, "ranks": [{"rank": 0, "experts": [0, 1]}, {"rank": 1, "experts": [2, 3]}]}
LIVE: dict[str, Any] = {
    "ZeRO stage": 1,
    "precision": "bfloat16",
    "model-parallel ranks": 1,
    "data-parallel ranks": 4,
    "experts per layer": [4],
    "use_data_before_expert_parallelism": False,
    "AutoEP placement": [PLACEMENT],
    "parameters": [[("first.weight", (7, 13))], [(EXPERT, (5, 5))]],
    "partitions": [4, 2],
    "partition groups": None,
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    model, optim = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shapes = [{"first.weight": torch.Size((7, 13))}, {EXPERT: torch.Size((5, 5))}]
    config = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    saved = {"ds_config": config, "dp_world_size": 4, "mp_world_size": 1, "num_experts": [4], "param_shapes": shapes}
    torch.save({**saved, "ds_autoep_layers": [{"expert_placement": PLACEMENT, "ep_rank": 0}]}, model)
    torch.save({"optimizer_state_dict": {"partition_count": [4, 2]}}, optim)
    return str(model), str(optim)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ZeRO stage", 2),
        ("precision", "float32"),
        ("data-parallel ranks", 2),
        ("model-parallel ranks", 2),
        ("experts per layer", [8]),
        ("use_data_before_expert_parallelism", True),
        ("AutoEP placement", [{**PLACEMENT, "ep_size": 1}]),
        ("parameters", [[("first.weight", (7, 13))], [(EXPERT, (5, 6))]]),
        ("partitions", [4, 4]),
        ("partition groups", [{"sub_group": 0}]),
        ("expert-parallel degrees", [2, 4]),
    ],
)
def test_each_difference_from_the_engine_is_named(key: str, value: Any, files: tuple[str, str]) -> None:
    assert compare_own_files(*files, LIVE) == []
    (text,) = compare_own_files(*files, {**LIVE, key: value})
    assert text.startswith(key)
    assert "→" in text


def test_a_missing_file_is_reported_by_name(files: tuple[str, str]) -> None:
    (text,) = compare_own_files(files[0], files[1].replace("rank_0_", "rank_3_"), LIVE)
    assert text.endswith("zero_pp_rank_3_mp_rank_00_optim_states.pt is missing")


def test_stage_0_has_a_file_of_states_for_each_expert_parallel_rank(files: tuple[str, str]) -> None:
    for rank in range(2):
        (Path(files[0]).parent / f"expp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert compare_own_files(files[0], None, {"expert-parallel ranks": 2}) == []
    assert compare_own_files(files[0], None, {"expert-parallel ranks": 4}) == ["expert-parallel ranks 2 → 4"]


def test_stage_0_has_states_in_the_order_of_the_module(files: tuple[str, str]) -> None:
    """Names that only one side has, such as frozen parameters, do not count."""
    torch.save({**torch.load(files[0]), "module": dict.fromkeys(("a", "b", "frozen", "c"))}, files[0])
    assert compare_own_files(files[0], None, {"order of parameters": ["a", "new", "b", "c"]}) == []
    assert compare_own_files(files[0], None, {"order of parameters": ["a", "c", "b"]}) == ["order of parameters b → c"]


def test_unreadable_files_are_refused(files: tuple[str, str]) -> None:
    Path(files[0]).write_bytes(b"nothing" * 20)
    with pytest.raises(CheckpointError):
        compare_own_files(*files, LIVE)


def test_an_unreadable_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent: cannot be listed \(No such file or directory\)"):
        list_own_globals(str(tmp_path / "absent"), 0, 1)
