"""The files of a checkpoint: names, the keys around module and optimizer, and writing them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .description import Model, Run, State, Topology
from .layout import partition_layout
from .module import frozen_fragments, frozen_shapes, module_state, param_shapes, shared_params
from .optimizer import optimizer_state, version_of

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_RUN = Run()


def write_checkpoint(
    folder: Path | str,
    model: Model,
    state: State,
    topology: Topology,
    *,
    tag: str | None = None,
    run: Run = DEFAULT_RUN,
    legacy: bool = False,
    latest: bool = True,
) -> Path:
    """Writes folder/tag as `save_checkpoint` would and returns it; `tag` defaults to global_step{N}.

    `legacy` takes torch's non-zip format. The recovery scripts (zero_to_fp32.py), which no loader reads, are left out.
    """
    tag = tag or f"global_step{run.global_steps}"
    write_files(Path(folder) / tag, build_files(model, state, topology, run), legacy=legacy)
    if latest:
        (Path(folder) / "latest").write_text(tag)
    return Path(folder) / tag


def build_files(model: Model, state: State, topology: Topology, run: Run = DEFAULT_RUN) -> dict[str, dict[str, Any]]:
    """The content of every file by name, in memory: edit it before `write_files` to make a damaged checkpoint."""
    flats = partition_layout(model, topology)
    model_ranks = range(topology.dp if topology.stage == 3 else 1)
    files = {model_file(topology, rank): _model_content(model, state, topology, run, rank) for rank in model_ranks}
    if topology.stage == 0:
        return files
    for rank in range(topology.dp):
        optimizer = optimizer_state(model, state, topology, run, flats[rank], rank)
        files[optim_file(topology, rank)] = {"optimizer_state_dict": optimizer, **_provenance(topology, run)}
    return files


def write_files(folder: Path, files: Mapping[str, Any], *, legacy: bool = False) -> None:
    """Saves each file's content under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        torch.save(content, folder / name, _use_new_zipfile_serialization=not legacy)


def model_file(topology: Topology, rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if topology.stage == 3 else "mp_rank_00_model_states.pt"


def optim_file(topology: Topology, rank: int) -> str:
    return f"{'bf16_' * (topology.precision == 'bf16')}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _model_content(model: Model, state: State, topology: Topology, run: Run, rank: int) -> dict[str, Any]:
    """`DeepSpeedEngine._common_checkpoint_state` and the client's state."""
    module = module_state(model, state, topology)
    whole = partition_layout(model, topology)[0] if topology.stage == 0 else None
    return {
        "module": module,
        "buffer_names": list(model.buffers),
        "optimizer": optimizer_state(model, state, topology, run, whole, rank) if whole is not None else None,
        "param_shapes": param_shapes(model, topology),
        "frozen_param_shapes": frozen_shapes(model, topology),
        "shared_params": shared_params(model, topology, rank),
        "frozen_param_fragments": frozen_fragments(model, topology, run, module, state, rank),
        **_counters(topology, run),
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        **_provenance(topology, run),
        **run.client_state,
    }


def _counters(topology: Topology, run: Run) -> dict[str, Any]:
    samples = run.global_steps * 4 * topology.dp if run.global_samples is None else run.global_samples
    return {
        "lr_scheduler": run.lr_scheduler,
        "data_sampler": run.data_sampler,
        "random_ltd": run.random_ltd,
        "skipped_steps": run.skipped_steps,
        "global_steps": run.global_steps,
        "global_samples": samples,
        "dp_world_size": topology.dp,
        "mp_world_size": 1,
    }


def _provenance(topology: Topology, run: Run) -> dict[str, Any]:
    config = topology.ds_config() if run.ds_config is None else run.ds_config
    return {"ds_config": config, "ds_version": version_of(run)}
