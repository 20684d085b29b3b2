"""Conversions of runs with tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.convert import ConvertOptions, convert_index
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.reshard import PATIENT, FakeTarget, open_everywhere
from tests.support.reshard3d import SavedRun, make_config, make_pipeline, make_plain

PIPELINE = make_pipeline([["column", "norm", "router", "row"], ["qkv", "experts"], ["gate_up", "bias"]])
PLAIN = make_plain(["column", "norm", "router", "qkv_uneven", "few", "word", "row"], frozen=["router", "row"])


def convert(source: Path, targets: Sequence[FakeTarget], config: UniversalConfig = PATIENT) -> tuple[AtomicIndex, Path]:
    """Convert a checkpoint whose parameters live ranks name, if needed; return its index, and the output."""
    index = open_everywhere(source, targets)
    out = source.parent / "atomic"
    convert_index(index, str(source), str(out), Comm(), ConvertOptions(workers=1), rules=from_config(config.patterns))
    return index, out


def convert_run(held: SavedRun, folder: Path) -> tuple[AtomicIndex, Path]:
    """Write a run below a folder, and convert it."""
    return convert(held.write(folder / "tag"), held.make_targets(), make_config(held.model))
