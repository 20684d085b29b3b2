"""Saves of engines with optimizer states on NVMe: `engine.save_checkpoint` copies their swap files unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .description import Topology
from .files import optim_file, write_files

STALE = -3.5
"""Stale value of swapped states in the state file of pipelined swapping."""


def swap_out(
    files: Mapping[str, dict[str, Any]],
    topology: Topology,
    numbers: Mapping[str, int],
    chosen: Sequence[int],
    *,
    pipelined: bool = False,
    threads: int = 1,
) -> dict[str, bytes]:
    """Move the states of some sub-groups out of a save's files; return the swap files by name.

    Args:
        numbers: DeepSpeed's ids of the parameters.
    """
    swaps: dict[str, bytes] = {}
    for tree in files.values():
        tree["ds_config"]["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": "/nowhere"}
        tree["ds_config"]["aio"] = {"intra_op_parallelism": threads}
    shapes = next(tree["param_shapes"] for tree in files.values() if "param_shapes" in tree)
    for rank in range(topology.dp):
        state = files[optim_file(topology, rank)]["optimizer_state_dict"]
        for index in chosen:
            first, *_, last = [*shapes[index], *shapes[index]]
            name = f"{numbers[first]}_{numbers[last]}.tensor.swp"
            held = state["optimizer_state_dict"]["state"].get(index, {})
            tensors = {"": state["fp32_flat_groups"][index]}
            tensors |= {f"{key}-": value for key, value in held.items() if torch.is_tensor(value) and value.dim()}
            for prefix, tensor in tensors.items():
                data = tensor.detach().numpy().tobytes()
                padded = data + bytes(-len(data) % (1024 * threads))
                swaps[f"offloaded_tensors/rank{rank:02d}/{prefix}{name}"] = padded
                left = torch.full_like(tensor, STALE) if pipelined else torch.empty(0)
                if prefix:
                    held[prefix[:-1]] = left
                else:
                    state["fp32_flat_groups"][index] = left
    return swaps


def write_swapped(folder: Path, files: Mapping[str, Any], swaps: Mapping[str, bytes]) -> None:
    write_files(folder, files)
    for name, data in swaps.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
