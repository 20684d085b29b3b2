"""The ds_config."""

import json
from typing import Any

from .checkpointing import load_checkpoint  # noqa: F401 - as there
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
