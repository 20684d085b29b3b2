"""PEFT adapters without their base, and their configuration, which is in no tag."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, ConfigError, shorten
from ...io.jsonfile import read_json
from ...io.paths import normalize
from ...tensor_parallel.adapters import is_added_in_file, read_in_file, read_live
from ..findings import Finding
from ..locations import FileTable
from .contents import Contents
from .names import ADAPTER, ADAPTER_CONFIG, holds
from .weights import read_tensors, split_ties

_NAME = "default"  # default name of the adapter in a live model

_DROPPED = "a PEFT adapter holds no weights of its base"


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the file's header; rename its tensors as in a live model (collective)."""
    file = next(name for name in where.entries if holds(ADAPTER, name, heads=True))
    read, _ = where.once(file, lambda: read_tensors(where, file), comm)
    tensors, ties = split_ties(read)

    def rename() -> Contents:
        live = {name: find_live_name(name, read) for name in read}
        if len({*live.values()}) < len(live):
            raise CheckpointError("two of its tensors are one in a live model; it is damaged.", path=where.path(file))
        weights = {live[name]: tensor for name, tensor in tensors.items()}
        aliases = {live[alias]: live[name] for alias, name in ties.items()}
        return Contents(ADAPTER, file, weights, aliases=aliases, dropped=_DROPPED)

    return comm.run_replicated(rename), []


def find_live_name(name: str, names: Collection[str]) -> str:
    """Return the name of a file's tensor in a live model.

    ``names``: all names of the file. A bias without its weight is a bias of the base, trained with the adapter.
    """
    module, _, end = name.rpartition(".")
    is_base = end == "bias" and ".lora_" not in name and f"{module}.weight" not in names
    return name if is_base else read_in_file(name, _NAME).live


def name_as_live(contents: Contents) -> Contents:
    """Rename weights of PEFT's files as in a live model and the optimizer's states.

    FSDP saves only an adapter in this way (``adapter_only`` of Accelerate's ``save_fsdp_model``).
    """
    weights = contents.weights
    tensors = [*filter(None, map(read_live, contents.states))]
    known = {tensor.in_file: tensor.live for tensor in tensors}
    if not any(map(is_added_in_file, weights)) or not all(
        name in known or name in contents.states or is_added_in_file(name) or read_live(name) for name in weights
    ):
        return contents  # no adapter, or an adapter with its base, under the names of a live model
    adapter = next((tensor.adapter for tensor in tensors), _NAME)
    live = {
        name: known.get(name) or (read_in_file(name, adapter).live if is_added_in_file(name) else name)
        for name in weights
    }
    if len({*live.values()}) < len(live):
        return contents
    return replace(contents, weights={live[name]: tensor for name, tensor in weights.items()}, dropped=_DROPPED)


def read_config(path: str | None, folder: str) -> dict[str, Any]:
    """Read the configuration of an adapter.

    Args:
        path: a file, or its folder; None searches the checkpoint's folder (PEFT) and its parent (trainers).
    """
    places = [folder, os.path.dirname(normalize(folder))] if path is None else [path]
    files = [os.path.join(place, ADAPTER_CONFIG) if os.path.isdir(place) else place for place in places]
    chosen = next((file for file in files if os.path.isfile(file)), None)
    if chosen is None:
        raise ConfigError(
            f"{shorten(files)}: no adapter_config.json. Ranks and factors are in no checkpoint: name the run's with "
            "--adapter-config."
        )
    config: dict[str, Any] = read_json(chosen, advice="Restore it, or name the run's with --adapter-config.")
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{chosen}: is of {config.get('peft_type')}; only LoRA is supported.")
    return config
