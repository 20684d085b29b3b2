"""MiCS (up to DeepSpeed 0.18): each group of ranks holds all partitions, and the first group saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from tests.synth import Model, Param, Topology, build_files, random_state, write_files

MODEL = Model((Param("a", (3, 5)), Param("b", (7,))))


def save(folder: Path, shard: Any = -1, ranks: int = 2) -> str:
    """Write ZeRO 3's save of two partitions with the metadata of ``ranks`` ranks under MiCS."""
    files = build_files(MODEL, random_state(MODEL, 0), Topology(3, 2))
    for name, content in files.items():
        content["ds_config"]["zero_optimization"]["mics_shard_size"] = shard
        if "model_states" in name:
            content["dp_world_size"] = ranks
    write_files(folder, files)
    return str(folder)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_the_first_groups_partitions_are_the_checkpoint(tmp_path: Path, ranks: int) -> None:
    plain = open_checkpoint(save(tmp_path / "plain"), Comm())
    index = open_checkpoint(save(tmp_path / "mics", 2, ranks), Comm())
    assert index.stored.atoms == plain.stored.atoms
    assert index.run.topology == plain.run.topology
    assert len(index.limits.unnoticed) == (ranks > 2)  # DeepSpeed's own load would refuse the number of ranks


@pytest.mark.parametrize("shard", [0, 3, 8])
def test_a_size_that_does_not_divide_the_ranks_is_refused(tmp_path: Path, shard: Any) -> None:
    with pytest.raises(UnsupportedError, match="ds_config.*mics_shard_size .* of 4 data-parallel ranks"):
        open_checkpoint(save(tmp_path, shard, 4), Comm())


def test_without_mics_the_files_of_all_ranks_are_needed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_{2-3}_.* \(2 files\) is missing"):
        open_checkpoint(save(tmp_path, -1, 4), Comm())
