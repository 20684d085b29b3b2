"""Megatron-DeepSpeed: other degrees than the saved ones as with its own ``--universal-checkpoint``, given or not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from ..comm import connect
from ..engine_state import get_config
from ..io.jsonfile import read_json

logger = logging.getLogger("deepspeed_ucp")

_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def create_ds_config(original: Callable[..., Any], *args: Any) -> Any:
    """``_create_ds_config_dict``, which with ``--universal-checkpoint`` writes ``load_universal`` in the place of the
    whole section ``checkpoint``: where that switches the plugin on it stays."""
    given = _get_args().deepspeed_config
    if isinstance(given, str):
        given = read_json(given, advice="Give --deepspeed_config a ds_config in JSON.")
    section = (given or {}).get("checkpoint") or {}  # before it is replaced
    config = original(*args)
    if section.get("universal"):
        config["checkpoint"] = section
    return config


def load_checkpoint(original: Callable[..., Any], model: list[Any], *args: Any, **kwargs: Any) -> Any:
    """``load_checkpoint``: of an engine that the plugin has filled at other degrees the rest goes on as Megatron has it
    go on after a universal load: the sizes may differ, and tensor-parallel ranks draw from new seeds."""
    engine = model[0]
    if get_config(engine) is None:
        return original(model, *args, **kwargs)
    own = engine.load_checkpoint

    def load(*given: Any, **more: Any) -> Any:
        path, client_state = own(*given, **more)
        if engine.ucp_report.direct:
            _accept_degrees((client_state or {}).get("args"))
        return path, client_state

    engine.load_checkpoint = load
    try:
        return original(model, *args, **kwargs)
    finally:
        del engine.load_checkpoint


def _accept_degrees(saved: Any) -> None:
    live = _get_args()
    changed = [name for name in _DEGREES if getattr(saved, name, None) != getattr(live, name)]
    if saved is None or not changed or getattr(live, "universal_checkpoint", True):
        return  # also in releases that lack the flag, whose check of the degrees stands
    live.universal_checkpoint = True
    if connect().rank == 0:
        told = ", ".join(f"{name} {getattr(saved, name, None)} → {getattr(live, name)}" for name in changed)
        logger.info("%s: Megatron goes on as with --universal-checkpoint, which seeds tensor-parallel ranks anew", told)


def _get_args() -> Any:
    return sys.modules["megatron.global_vars"].get_args()
