"""Select an adapter of PEFT under the names of PEFT's files, and write its configuration.

Ranks and factors are only in ``adapter_config.json``, not in a tag.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import CheckpointError, shorten
from ..io.disk import explain_full
from ..patterns.adapters import list_adapted, read_live
from ..sources.foreign.names import ADAPTER_CONFIG


def write_config(folder: str, config: Mapping[str, Any]) -> None:
    """Write a configuration for inference, as PEFT does."""
    path = os.path.join(folder, ADAPTER_CONFIG)
    with explain_full(path), open(path, "x", encoding="utf-8") as stream:
        stream.write(json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n")


def choose_adapter(names: Collection[str], adapter: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return saved name → name in PEFT's file, for the tensors of an adapter.

    Args:
        config: the adapter's configuration, with the trained biases of the base.

    Raises:
        CheckpointError: the adapter does not exist.
    """
    written = dict[str, str]()
    mode, biases = config.get("bias", "none"), {f"{module}.base_layer.bias" for module in list_adapted(names)}
    for name in names:
        tensor = read_live(name)
        if tensor is not None and tensor.adapter == adapter:
            written[name] = tensor.in_file
        elif tensor is None and (name.endswith(".bias") if mode == "all" else mode != "none" and name in biases):
            written[name] = name
    if any(map(read_live, written)):
        return written
    known = {tensor.adapter for tensor in map(read_live, names) if tensor}
    raise CheckpointError(
        f"holds no adapter {adapter!r}; it has {shorten(sorted(known))}. Name one with --adapter-name."
        if known
        else "holds no adapter of PEFT's (no lora_A, lora_B, modules_to_save)."
    )
