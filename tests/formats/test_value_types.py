"""Types of values in state files: types that DeepSpeed writes are read, others are refused by name."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.formats.open import look_at_job
from deepspeed_ucp.model.index import AtomicIndex, SavedJob
from tests.formats.saves import Files, make_files, open_files
from tests.synth import Model, Param, Topology

MODEL = Model((Param("a", (3, 5)), Param("b", (7,), group=1), Param("fixed", (2, 2), frozen=True)))
MODEL_STATES, OPTIM = "model_states", "optim_states"


class Field(NamedTuple):
    """A value, by its path of keys, in all files whose names contain `kind`."""

    kind: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(self.keys)

    def change(self, files: Files, convert: Callable[[Any], Any]) -> None:
        """Replace the value in all files."""
        for tree in (content for name, content in files.items() if self.kind in name):
            for key in self.keys[:-1]:
                tree = tree[key]
            tree[self.keys[-1]] = convert(tree[self.keys[-1]])


def model(*keys: str) -> Field:
    return Field(MODEL_STATES, keys)


def config(*keys: str) -> Field:
    return Field("_states.pt", ("ds_config", *keys))


def optim(*keys: str) -> Field:
    return Field(OPTIM, ("optimizer_state_dict", *keys))


fragment_address = namedtuple("fragment_address", ["numel", "start"])


def as_named_tuples(mappings: Any) -> Any:
    """Convert positions of parameters to the form of older releases."""
    return [{name: fragment_address(at.numel, at.start) for name, at in each.items()} for each in mappings]


STAGE_1, STAGE_3 = Topology(1, 2, "bf16"), Topology(3, 2)
WHOLE = (float, np.int64, np.float64, torch.tensor)

# Field, topology, types other than int that were found for it, and the code that writes them. Of the releases 0.16.0,
# 0.16.9, 0.17.2, 0.17.6, 0.18.2 and 0.19.8; numbers that a script computes with numpy or torch reach them unchanged.
WRITTEN: list[tuple[Field, Topology, tuple[Callable[[Any], Any], ...]]] = [
    # engine.py: += train_batch_size(), which is micro * (world / sp) since 0.17 (runtime/config.py)
    (model("global_samples"), STAGE_1, WHOLE),
    (model("global_samples"), STAGE_3, WHOLE),
    # engine.py: += 1; a script may set them to continue another run's count
    (model("global_steps"), STAGE_1, WHOLE),
    (model("skipped_steps"), STAGE_1, WHOLE),
    # groups.py: sizes of process groups, or a value of an mpu
    (model("dp_world_size"), STAGE_3, WHOLE),
    (model("mp_world_size"), STAGE_3, WHOLE),
    # the script's ds_config, unchanged: DeepSpeed accepts floats there, and the stage also as text or enum
    (config("train_batch_size"), STAGE_1, (float,)),
    (config("train_micro_batch_size_per_gpu"), STAGE_1, (float,)),
    (config("gradient_accumulation_steps"), STAGE_1, (float,)),
    (config("zero_optimization", "stage"), STAGE_1, (float, str, ZeroStageEnum)),
    (config("zero_optimization", "stage"), STAGE_3, (float, str, ZeroStageEnum)),
    # zero/config.py to 0.18: an integer for pydantic
    (config("zero_optimization", "mics_shard_size"), STAGE_3, (float, str)),
    # bwc.py: a value of an mpu
    (model("checkpoint_parallel_dimensions", "tp_degree"), STAGE_1, WHOLE),
    (model("checkpoint_parallel_dimensions", "pp_degree"), STAGE_1, WHOLE),
    # stage_1_and_2.py, stage3.py, bf16_optimizer.py
    (optim("zero_stage"), STAGE_1, (ZeroStageEnum,)),
    (optim("zero_stage"), STAGE_3, (ZeroStageEnum,)),
    (optim("partition_count"), STAGE_1, (list, tuple)),
    (optim("group_paddings"), STAGE_1, (list, tuple)),
    (optim("param_slice_mappings"), STAGE_1, (as_named_tuples,)),
    # config.py: "gradient_clipping", unchanged
    (optim("clip_grad"), STAGE_1, (float, int)),
]
ROWS = [
    pytest.param(field, topology, convert, id=f"{field}-zero{topology.stage}-{convert.__name__}")
    for field, topology, types in WRITTEN
    for convert in types
]

# Field, topology, and a value of a type that no release writes.
UNKNOWN: list[tuple[Field, Topology, Any]] = [
    (model("global_samples"), STAGE_1, 6.5),
    (model("global_samples"), STAGE_1, float("nan")),
    (model("global_samples"), STAGE_1, "6"),
    (model("global_samples"), STAGE_1, -6.0),
    (model("global_steps"), STAGE_3, 2.5),
    (model("skipped_steps"), STAGE_1, [1]),
    (model("dp_world_size"), STAGE_3, 1.5),
    (model("dp_world_size"), STAGE_3, -1),
    (model("mp_world_size"), STAGE_3, 0),
    (config("zero_optimization", "stage"), STAGE_1, 1.5),
    (config("zero_optimization", "stage"), STAGE_1, "weights"),
    (config("zero_optimization"), STAGE_1, {"stage": 1, "list": [0] * 100_000}),
    (model("checkpoint_parallel_dimensions", "tp_degree"), STAGE_1, 1.5),
    (model("buffer_names"), STAGE_1, [7]),
    (model("module"), STAGE_1, [7]),
    (model("param_shapes"), STAGE_1, [7]),
    (model("param_shapes"), STAGE_3, [{"a": [3, 5]}]),
    (model("shared_params"), STAGE_1, {"a": 7}),
    (optim("zero_stage"), STAGE_1, 1.5),
    (optim("partition_count"), STAGE_1, [2.5]),
    (optim("group_paddings"), STAGE_1, [0.5, 0]),
    (optim("param_slice_mappings"), STAGE_1, [{"a": (0, 15)}]),
]


def make(topology: Topology) -> Files:
    """Make the files of a save whose fields are all integers."""
    files = make_files(MODEL, topology, zero={"mics_shard_size": -1})
    for name, content in files.items():
        content["ds_config"] |= {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3}
        content["ds_config"]["gradient_accumulation_steps"] = 1
        if MODEL_STATES in name:
            content["checkpoint_parallel_dimensions"] = {"tp_degree": 1, "pp_degree": 1}
            content |= {"global_steps": 5, "global_samples": 30, "skipped_steps": 1, "mp_world_size": 1}
        else:
            content["optimizer_state_dict"]["clip_grad"] = 1
    return files


def open_both(folder: Path, files: Files) -> tuple[AtomicIndex, SavedJob]:
    return open_files(folder, files), look_at_job(str(folder))


@pytest.mark.parametrize(("field", "topology", "convert"), ROWS)
def test_a_value_that_deepspeed_writes_is_read(
    tmp_path: Path, field: Field, topology: Topology, convert: Callable[[Any], Any]
) -> None:
    plain, plain_job = open_both(tmp_path / "plain", make(topology))
    changed = make(topology)
    field.change(changed, convert)
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
def test_a_value_of_unknown_type_is_refused(tmp_path: Path, field: Field, topology: Topology, value: Any) -> None:
    files = make(topology)
    field.change(files, lambda _: value)
    with pytest.raises(UnsupportedError) as found:
        open_both(tmp_path, files)
    text = str(found.value)
    where = next(key for key in field.keys if key != "optimizer_state_dict")
    assert f"its {where} is " in text and "is not supported" in text and "Update deepspeed_ucp" in text
    assert field.kind in text and "damage" not in text
    if not isinstance(value, (list, dict)):
        assert (str(value) if not isinstance(value, str) else repr(value)) in text
