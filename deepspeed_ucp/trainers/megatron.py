"""Replacements of functions of Megatron-DeepSpeed, which allow other degrees."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from ..comm import connect
from ..engine.references import replace_method
from ..engine_state import get_config
from ..io.jsonfile import read_json

logger = logging.getLogger("deepspeed_ucp")

_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def create_ds_config(original: Callable[..., Any], *args: Any) -> Any:
    """``_create_ds_config_dict``: keep the section ``checkpoint`` of the plugin.

    With ``--universal-checkpoint`` the original replaces the whole section by ``load_universal``.
    """
    ds_config = _get_args().deepspeed_config
    if isinstance(ds_config, str):
        ds_config = read_json(ds_config, advice="Give --deepspeed_config a ds_config in JSON.")
    section = (ds_config or {}).get("checkpoint") or {}  # before the original replaces it
    config = original(*args)
    if section.get("universal"):
        config["checkpoint"] = section
    return config


def load_checkpoint(original: Callable[..., Any], model: list[Any], *args: Any, **kwargs: Any) -> Any:
    """``load_checkpoint``: continue as after a universal load if degrees have changed.

    Megatron then accepts other degrees, and seeds the tensor-parallel ranks anew.
    """
    engine = model[0]
    if get_config(engine) is None:
        return original(model, *args, **kwargs)
    load_checkpoint = engine.load_checkpoint

    def load(*args: Any, **kwargs: Any) -> Any:
        path, client_state = load_checkpoint(*args, **kwargs)
        if engine.ucp_report.direct:
            _allow_changed_degrees((client_state or {}).get("args"))
        return path, client_state

    with replace_method(engine, "load_checkpoint", load):
        return original(model, *args, **kwargs)


def _allow_changed_degrees(saved: Any) -> None:
    live = _get_args()
    changed = [name for name in _DEGREES if getattr(saved, name, None) != getattr(live, name)]
    if saved is None or not changed or getattr(live, "universal_checkpoint", True):
        return  # releases without the flag check the degrees themselves
    live.universal_checkpoint = True
    if connect().rank == 0:
        changes = ", ".join(f"{name} {getattr(saved, name, None)} → {getattr(live, name)}" for name in changed)
        logger.info("%s: --universal-checkpoint is set, which reseeds tensor-parallel ranks", changes)


def _get_args() -> Any:
    return sys.modules["megatron.global_vars"].get_args()
