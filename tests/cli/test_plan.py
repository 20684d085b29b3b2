"""``ds_ucp plan``: options, JSON, and a trillion parameters."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.huge import make_gpt, write_gpt
from tests.synth import Model, Param, Run, Topology, random_state, write_checkpoint

MODEL = Model((Param("wte", (40, 9)), Param("h.0.norm", (9,), group=1), Param("h.0.attn", (27, 9))))
RULES = '[{"match": "wte|.*attn", "pattern": "shard-v"}, {"match": ".*norm", "pattern": "replicate"}]'
SAVES = ("--mtbf", "4h", "--restart", "2m", "--read-gbs", "273", "--write-gbs", "273")
Plan = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    topology = Topology(1, 4, "bf16")
    run = Run(ds_config={**topology.ds_config(), "train_batch_size": 48})
    write_checkpoint(tmp_path, MODEL, random_state(MODEL, 1, precision="bf16"), topology, run=run)
    return tmp_path


@pytest.fixture(name="plan")
def _plan(run_json: Plan) -> Plan:
    return lambda folder, target, *options: run_json("plan", folder, "--target", target, *options)


def test_plan_describes_a_checkpoint_in_another_topology(folder: Path, plan: Plan) -> None:
    code, result = plan(folder, "dp=3,zero=3", "--read-gbs", "2")
    numel = sum(param.numel for param in MODEL.params)
    assert (code, result["possible"], result["loader"], result["state"]) == (0, True, "deepspeed_ucp", 12 * numel)
    assert result["checkpoint"] == sum(file.stat().st_size for file in folder.glob("*/*.pt"))
    assert result["read_per_rank"] == -(-result["read"] // 3)
    assert result["seconds"]["load"] == pytest.approx(result["read"] / 2e9)
    assert result["batch"]["train"] == 48
    assert plan(folder, "sp=2,zero=3", "--ranks", "12")[1]["degrees"]["dp"] == 6
    assert plan(folder, "dp=5,zero=1", "--train-batch-size", "50")[0] == 0
    for target in ("dp=4", "dp=6,zero=2"):
        code, result = plan(folder, target, *SAVES, "--ranks-per-node", "2")
        assert (code, result["saves"]["size"]["total"]) == (0, 14 * numel)
    code, result = plan(folder, "dp=5,zero=1", *SAVES)
    assert code == 1 and "saves" not in result
    next(folder.glob("*/*optim_states.pt")).write_bytes(b"PK")
    code, result = plan(folder, "dp=3")
    assert code == 2 and "no zip directory" in result["error"]


LAYERS, HIDDEN, VOCABULARY = 125, 25600, 51200
WRITERS = Topology(1, 4, "bf16", tp=8, pp=16)
"""512 ranks: 128 model files, 512 optimizer files, 1016 layer files."""


@pytest.fixture(name="trillion", scope="module")
def _trillion() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # disks remove sparse files slowly
    with tempfile.TemporaryDirectory(prefix="trillion-", dir=memory) as folder:
        yield write_gpt(Path(folder), make_gpt(LAYERS, HIDDEN, VOCABULARY), WRITERS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["dp=384,zero=3", "tp=8,pp=48,dp=2"])
def test_a_plan_of_a_trillion_parameters_takes_at_most_fifty_seconds(trillion: Path, plan: Plan, target: str) -> None:
    code, result = plan(trillion, target, "--read-gbs", "273", "--patterns", "megatron-gpt")
    assert code == 0, result["obstacles"]
    parameters = LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN)
    assert result["checkpoint"] == pytest.approx(13.8e12, rel=0.002)
    assert 12 * parameters < result["state"] < 12.1 * parameters  # masters and two states, no 16-bit copies
    assert 1 <= result["read"] / result["state"] < 1.002  # needed records contain the last stage's embedding
    assert result["seconds"]["load"] == pytest.approx(12 / 14 * 50.5, rel=0.005)
    assert sum(file.stat().st_blocks for file in trillion.rglob("*.pt")) * 512 < 200 << 20
