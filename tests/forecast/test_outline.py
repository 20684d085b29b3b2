"""A plan by arithmetic alone, held against what is foretold of a checkpoint of as many parameters, and its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_ucp.cli import plan as command
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.forecast.degrees import parse_degrees
from deepspeed_ucp.forecast.outline import OPTIMIZERS, outline_run
from deepspeed_ucp.forecast.target import predict_target
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.topology import Topology as Saved
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("wte", (1000, 300)), Param("h.0", (400, 500))))
NUMEL = 500_000


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_figures_are_those_of_a_checkpoint(stage: int, precision: str, tmp_path: Path) -> None:
    topology = Topology(stage, 4, precision)
    folder = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 1, precision=precision), topology)
    index = open_checkpoint(str(folder), Comm(), groups="module")
    degrees = parse_degrees(f"dp=4,zero={stage},precision={precision}", index.run.topology)
    target = predict_target(index, degrees)
    found = outline_run(NUMEL, degrees, "adam", 0)
    memory = found.memory
    assert memory.weights + memory.masters + memory.states == target.measure_engine(0)
    assert memory.gradients == (2 if precision != "fp32" else 4) * (NUMEL // 4 if stage > 1 else NUMEL)
    assert found.totals.needed == 4 * found.rank.needed == target.count_needed()
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert found.totals.files == len(sizes)
    assert found.totals.checkpoint == pytest.approx(sum(sizes), rel=0.01)


def test_pipelines_and_tensor_parallel_ranks_share_the_model() -> None:
    degrees = parse_degrees("dp=2,tp=2,pp=2,zero=1,precision=bf16", Saved(1, "zero12", "bfloat16"))
    found = outline_run(8000, degrees, "sgd", 0)
    assert found.memory.weights == found.memory.gradients == 2 * 2000
    assert (found.memory.masters, found.memory.states) == (4 * 1000, 0)
    assert (found.totals.checkpoint, found.totals.files) == (6 * 8000, 4 + 8)


def test_the_command_knows_the_optimizers() -> None:
    assert tuple(OPTIMIZERS) == command.OPTIMIZERS
