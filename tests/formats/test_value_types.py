"""Types of values in state files: types that DeepSpeed writes are read, others are refused by name."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.formats.open import read_saved_job
from deepspeed_ucp.model.index import AtomicIndex, SavedJob
from tests.formats.saves import Files, make_files, open_files
from tests.synth import Model, Param, Topology

MODEL = Model((Param("a", (3, 5)), Param("b", (7,), group=1), Param("fixed", (2, 2), frozen=True)))


def find_files(path: str) -> str:
    """Return a part of the names of the files that have a field, given by its keys joined by dots."""
    kinds = {"ds_config": "_states.pt", "optimizer_state_dict": "optim_states"}
    return kinds.get(path.partition(".")[0], "model_states")


def change(files: Files, path: str, convert: Callable[[Any], Any]) -> None:
    """Replace a field in all files that have it."""
    *outer, last = path.split(".")
    for tree in (content for name, content in files.items() if find_files(path) in name):
        for key in outer:
            tree = tree[key]
        tree[last] = convert(tree[last])


fragment_address = namedtuple("fragment_address", ["numel", "start"])


def as_named_tuples(mappings: Any) -> Any:
    """Convert positions of parameters to the form of older releases."""
    return [{name: fragment_address(at.numel, at.start) for name, at in each.items()} for each in mappings]


STAGE_1, STAGE_3 = Topology(1, 2, "bf16"), Topology(3, 2)
WHOLE = (float, np.int64, np.float64, torch.tensor)

# Field, topology, types other than int that were found for it, and the code that writes them. Of the releases 0.16.0,
# 0.16.9, 0.17.2, 0.17.6, 0.18.2 and 0.19.8; numbers that a script computes with numpy or torch reach them unchanged.
WRITTEN: list[tuple[str, Topology, tuple[Callable[[Any], Any], ...]]] = [
    # engine.py: += train_batch_size(), which is micro * (world / sp) since 0.17 (runtime/config.py)
    ("global_samples", STAGE_1, WHOLE),
    ("global_samples", STAGE_3, WHOLE),
    # engine.py: += 1; a script may set them to continue another run's count
    ("global_steps", STAGE_1, WHOLE),
    ("skipped_steps", STAGE_1, WHOLE),
    # groups.py: sizes of process groups, or a value of an mpu
    ("dp_world_size", STAGE_3, WHOLE),
    ("mp_world_size", STAGE_3, WHOLE),
    # the script's ds_config, unchanged: DeepSpeed accepts floats there, and the stage also as text or enum
    ("ds_config.train_batch_size", STAGE_1, (float,)),
    ("ds_config.train_micro_batch_size_per_gpu", STAGE_1, (float,)),
    ("ds_config.gradient_accumulation_steps", STAGE_1, (float,)),
    ("ds_config.zero_optimization.stage", STAGE_1, (float, str, ZeroStageEnum)),
    ("ds_config.zero_optimization.stage", STAGE_3, (float, str, ZeroStageEnum)),
    # zero/config.py to 0.18: an integer for pydantic
    ("ds_config.zero_optimization.mics_shard_size", STAGE_3, (float, str)),
    # bwc.py: a value of an mpu
    ("checkpoint_parallel_dimensions.tp_degree", STAGE_1, WHOLE),
    ("checkpoint_parallel_dimensions.pp_degree", STAGE_1, WHOLE),
    # stage_1_and_2.py, stage3.py, bf16_optimizer.py
    ("optimizer_state_dict.zero_stage", STAGE_1, (ZeroStageEnum,)),
    ("optimizer_state_dict.zero_stage", STAGE_3, (ZeroStageEnum,)),
    ("optimizer_state_dict.partition_count", STAGE_1, (list, tuple)),
    ("optimizer_state_dict.group_paddings", STAGE_1, (list, tuple)),
    ("optimizer_state_dict.param_slice_mappings", STAGE_1, (as_named_tuples,)),
    # config.py: "gradient_clipping", unchanged
    ("optimizer_state_dict.clip_grad", STAGE_1, (float, int)),
]
ROWS = [
    pytest.param(field, topology, convert, id=f"{field}-zero{topology.stage}-{convert.__name__}")
    for field, topology, types in WRITTEN
    for convert in types
]

# Field, topology, and a value of a type that no release writes.
UNKNOWN: list[tuple[str, Topology, Any]] = [
    ("global_samples", STAGE_1, 6.5),
    ("global_samples", STAGE_1, float("nan")),
    ("global_samples", STAGE_1, "6"),
    ("global_samples", STAGE_1, -6.0),
    ("global_steps", STAGE_3, 2.5),
    ("skipped_steps", STAGE_1, [1]),
    ("dp_world_size", STAGE_3, 1.5),
    ("dp_world_size", STAGE_3, -1),
    ("mp_world_size", STAGE_3, 0),
    ("ds_config.zero_optimization.stage", STAGE_1, 1.5),
    ("ds_config.zero_optimization.stage", STAGE_1, "weights"),
    ("ds_config.zero_optimization", STAGE_1, {"stage": 1, "list": [0] * 100_000}),
    ("checkpoint_parallel_dimensions.tp_degree", STAGE_1, 1.5),
    ("buffer_names", STAGE_1, [7]),
    ("module", STAGE_1, [7]),
    ("param_shapes", STAGE_1, [7]),
    ("param_shapes", STAGE_3, [{"a": [3, 5]}]),
    ("shared_params", STAGE_1, {"a": 7}),
    ("optimizer_state_dict.zero_stage", STAGE_1, 1.5),
    ("optimizer_state_dict.partition_count", STAGE_1, [2.5]),
    ("optimizer_state_dict.group_paddings", STAGE_1, [0.5, 0]),
    ("optimizer_state_dict.param_slice_mappings", STAGE_1, [{"a": (0, 15)}]),
]


def make(topology: Topology) -> Files:
    """Make the files of a save whose fields are all integers."""
    files = make_files(MODEL, topology, zero={"mics_shard_size": -1})
    for name, content in files.items():
        content["ds_config"] |= {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3}
        content["ds_config"]["gradient_accumulation_steps"] = 1
        if "model_states" in name:
            content["checkpoint_parallel_dimensions"] = {"tp_degree": 1, "pp_degree": 1}
            content |= {"global_steps": 5, "global_samples": 30, "skipped_steps": 1, "mp_world_size": 1}
        else:
            content["optimizer_state_dict"]["clip_grad"] = 1
    return files


def open_both(folder: Path, files: Files) -> tuple[AtomicIndex, SavedJob]:
    return open_files(folder, files), read_saved_job(str(folder))


@pytest.mark.parametrize(("field", "topology", "convert"), ROWS)
def test_a_value_that_deepspeed_writes_is_read(
    tmp_path: Path, field: str, topology: Topology, convert: Callable[[Any], Any]
) -> None:
    plain, plain_job = open_both(tmp_path / "plain", make(topology))
    changed = make(topology)
    change(changed, field, convert)
    index, job = open_both(tmp_path / "changed", changed)
    assert (job, index.job) == (plain_job, plain.job)
    assert job.total_batch == 6 and job.accumulation == 1 and job.steps == 5
    assert index.counters == plain.counters
    assert all(type(value) is int for value in index.counters.values())
    assert index.atoms == plain.atoms
    assert index.topology == plain.topology
    assert index.clip_grad == plain.clip_grad


@pytest.mark.parametrize(
    ("field", "topology", "value"), [pytest.param(*row, id=f"{row[0]}-{str(row[2])[:20]}") for row in UNKNOWN]
)
def test_a_value_of_unknown_type_is_refused(tmp_path: Path, field: str, topology: Topology, value: Any) -> None:
    files = make(topology)
    change(files, field, lambda _: value)
    with pytest.raises(UnsupportedError) as found:
        open_both(tmp_path, files)
    text = str(found.value)
    where = field.removeprefix("optimizer_state_dict.").partition(".")[0]
    assert f"its {where} is " in text and "is not supported" in text and "Update deepspeed_ucp" in text
    assert find_files(field) in text and "damage" not in text
    if not isinstance(value, (list, dict)):
        assert (str(value) if not isinstance(value, str) else repr(value)) in text
