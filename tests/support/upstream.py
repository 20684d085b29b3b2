"""DeepSpeed's converter, run in this process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace


def to_universal(source: Path, destination: Path) -> Path:
    """Convert a tag's folder; returns the destination, whose parent gets ``latest_universal``."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = {
        "input_folder": str(source),
        "output_folder": str(destination),
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": False,
        "inject_missing_state": True,
    }
    destination.parent.mkdir(parents=True, exist_ok=True)
    ds_to_universal.main(SimpleNamespace(**arguments))
    return destination
