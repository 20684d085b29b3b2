"""The ds_config."""

import json
from typing import Any

from .checkpointing import load_checkpoint
from .global_vars import get_args


def _create_ds_config_dict() -> Any:
    args = get_args()
    if isinstance(args.deepspeed_config, dict):
        config = args.deepspeed_config
    else:
        with open(args.deepspeed_config, encoding="utf-8") as stream:
            config = json.load(stream)
    if args.universal_checkpoint:
        config["checkpoint"] = {"load_universal": True}
    args.deepspeed_config = None
    return config


def make_config() -> Any:
    return _create_ds_config_dict()


def resume(engine: Any) -> int:
    """As `setup_model_and_optimizer` ends."""
    return int(load_checkpoint([engine], None, None))
