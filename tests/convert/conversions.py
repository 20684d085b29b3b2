"""Small checkpoints and their conversion, in many batches."""

from __future__ import annotations

from pathlib import Path

import torch

from deepspeed_ucp.convert import ConvertOptions
from deepspeed_ucp.stream.report import OutputReport
from tests.support.conversion import convert_checkpoint
from tests.synth import Model, Param, Run, Topology, random_state, write_checkpoint

MODEL = Model(
    (Param("layer.weight", (30, 64)), Param("layer.bias", (30,)), Param("norm.weight", (64,), group=1)),
    buffers={"scale": torch.ones(3)},
)
TOPOLOGY = Topology(1, 2, precision="bf16")


def write_source(root: Path, seed: int = 0) -> Path:
    """Write a checkpoint below ``root``; return its tag's folder."""
    state = random_state(MODEL, seed, precision=TOPOLOGY.precision)
    return write_checkpoint(root, MODEL, state, TOPOLOGY, run=Run(client_state={"epoch": seed}))


def convert(
    source: Path, destination: Path | None = None, *, overwrite: bool = False, workers: int = 1
) -> OutputReport:
    """Convert in one process; one worker writes in a fixed order."""
    options = ConvertOptions(workers=workers, overwrite=overwrite)
    return convert_checkpoint(str(source), str(destination) if destination else None, options=options)


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
