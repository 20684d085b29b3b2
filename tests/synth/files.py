"""The files of a checkpoint: names, entries other than module and optimizer, and writing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

from .description import Model, Run, State, Topology
from .expertfiles import finish_model_content, fold_optimizer, list_expert_files
from .experts import held_layers, is_writer, largest_degree, own_models, own_state
from .layout import Flat, partition_layout
from .module import frozen_fragments, frozen_shapes, module_state, param_shapes, shared_params
from .optimizer import optimizer_state, version
from .parallel import Local, ShardFunction, split
from .stages import layer_prefix

DEFAULT_RUN = Run()


def write_checkpoint(
    folder: Path | str,
    model: Model,
    state: State,
    topology: Topology,
    *,
    tag: str | None = None,
    run: Run = DEFAULT_RUN,
    cut: ShardFunction | None = None,
    legacy: bool = False,
    latest: bool = True,
) -> Path:
    """Write folder/tag like `save_checkpoint`, without recovery scripts, and return its path.

    `tag` defaults to global_step{N}; `cut` returns the tensor-parallel shards; `legacy` selects torch's non-zip format.
    """
    tag = tag or f"global_step{run.global_steps}"
    write_files(Path(folder) / tag, build_files(model, state, topology, run, cut=cut), legacy=legacy)
    if latest:
        (Path(folder) / "latest").write_text(tag)
    return Path(folder) / tag


def build_files(
    model: Model, state: State, topology: Topology, run: Run = DEFAULT_RUN, *, cut: ShardFunction | None = None
) -> dict[str, dict[str, Any]]:
    """Return the content of every file by name; edit it before `write_files` to make a damaged checkpoint."""
    return build_local_files(split(model, state, topology, cut), topology, run)


def build_local_files(
    local: Mapping[int, Local], topology: Topology, run: Run = DEFAULT_RUN
) -> dict[str, dict[str, Any]]:
    return {name: content for rank in local for name, content in _rank_files(local[rank], topology, run, rank)}


def _rank_files(local: Local, topology: Topology, run: Run, mp: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the files of one model-parallel rank's data-parallel ranks."""
    flats = partition_layout(local.model, topology)
    owns = [replace(local, model=own, state=own_state(local.state, own)) for own in own_models(local.model, topology)]
    module = module_state(owns[0].model, owns[0].state, topology)
    if local.model.experts:
        yield from list_expert_files(local.model, owns, flats, topology, run, mp)
    else:
        yield from _layer_files(local, module, topology, mp % topology.tp)
    for rank in list_model_writers(local.model, topology):
        content = _model_content(
            owns[rank], module, topology, run, flats[rank if topology.partitions else 0], (rank, mp)
        )
        if local.model.experts:
            content = clone_tensors_for_torch_save(finish_model_content(local.model, content, topology, rank))
        yield model_file(topology, rank, mp), content
    if not topology.partitions:
        return
    for rank, own in enumerate(owns):
        optimizer = optimizer_state(own.model, own.state, topology, run, flats[rank], rank)
        rest = {**_provenance(topology, run), **fold_optimizer(local.model, own.model, topology, rank)}
        yield optim_file(topology, rank, mp), {"optimizer_state_dict": optimizer, **rest}


def list_model_writers(model: Model, topology: Topology) -> range:
    """Return the data-parallel ranks that save model states; with experts another lane's rank may save them."""
    if topology.stage == 3:
        return range(topology.dp)
    layers, degree = held_layers(model), largest_degree(model, topology)
    return range(1 if not layers or is_writer(model, topology, layers[0], degree, 0) else 0)


def _layer_files(
    local: Local, module: OrderedDict[str, torch.Tensor], topology: Topology, tp: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """`PipelineModule.save_state_dict`: each layer's state_dict, cloned."""
    for layer in local.layers:
        prefix = layer_prefix(local.model, layer)
        if local.model.layers[layer].file:
            held = ((name, tensor) for name, tensor in module.items() if name.startswith(prefix))
            yield layer_file(topology, layer, tp), OrderedDict((n[len(prefix) :], tensor.clone()) for n, tensor in held)


def write_files(folder: Path, files: Mapping[str, Any], *, legacy: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        torch.save(content, folder / name, _use_new_zipfile_serialization=not legacy)


def model_file(topology: Topology, rank: int, mp: int = 0) -> str:
    return f"{f'zero_pp_rank_{rank}_' * (topology.stage == 3)}mp_rank_{mp:02d}_model_states.pt"


def optim_file(topology: Topology, rank: int, mp: int = 0) -> str:
    return f"{'bf16_' * (topology.precision == 'bf16')}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"


def layer_file(topology: Topology, layer: int, tp: int = 0) -> str:
    return f"layer_{layer:02d}{f'-model_{tp:02d}' * topology.names_model_axis}-model_states.pt"


def _model_content(
    local: Local,
    module: OrderedDict[str, torch.Tensor],
    topology: Topology,
    run: Run,
    flats: tuple[Flat, ...],
    ranks: tuple[int, int],
) -> dict[str, Any]:
    """`DeepSpeedEngine._common_checkpoint_state` with the client's state; `ranks` are (dp rank, mp rank)."""
    model, state = local.model, local.state
    rank = ranks[0]
    optimizer = optimizer_state(model, state, topology, run, flats, rank) if topology.stage == 0 else None
    dimensions = {"checkpoint_parallel_dimensions": {"pp_degree": topology.pp, "tp_degree": topology.tp}}
    return {
        "module": None if model.layers and not model.experts else run.nest(module) if run.nest else module,
        "buffer_names": list(model.buffers),
        "optimizer": optimizer,
        "param_shapes": param_shapes(topology, flats),
        "frozen_param_shapes": frozen_shapes(model, topology),
        "shared_params": shared_params(model, topology, first=ranks == (0, 0)),
        "frozen_param_fragments": frozen_fragments(model, topology, run, module, state, rank),
        "lr_scheduler": run.lr_scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": run.skipped_steps,
        "global_steps": run.global_steps,
        "global_samples": run.global_steps * 4 * topology.dp if run.global_samples is None else run.global_samples,
        "dp_world_size": topology.dp,
        "mp_world_size": topology.mp,
        **(dimensions if run.parallel_dimensions else {}),
        **_provenance(topology, run),
        **run.client_state,
    }


def _provenance(topology: Topology, run: Run) -> dict[str, Any]:
    config = topology.ds_config() if run.ds_config is None else run.ds_config
    return {"ds_config": config, "ds_version": version}
