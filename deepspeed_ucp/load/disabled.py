"""DeepSpeed's load of an engine without the plugin: its errors suggest the plugin if it would help."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..engine.coverage import describe_own_files
from ..errors import shorten
from ..formats import read_latest
from ..formats.deepspeed.ownfiles import compare_own_files
from ..formats.latest import find_folder

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")


def load_switched_off(engine: Any, load_dir: str, tag: Any, deepspeed_load: Callable[[], T]) -> T:
    """Run DeepSpeed's load; if it fails on a checkpoint of another topology, add a note to the error.

    Args:
        deepspeed_load: DeepSpeed's load, with all of the caller's arguments.

    Raises:
        Exception: that of the load; before Python 3.11, which has no notes, the text is logged.
    """
    try:
        return deepspeed_load()
    except Exception as error:
        note = explain_failure(engine, load_dir, tag)
        if note and hasattr(error, "add_note"):
            error.add_note(note)
        elif note:
            logger.error("%s", note)
        raise


def explain_failure(engine: Any, load_dir: str, tag: Any) -> str:
    """Explain a failure by a difference between this rank's files and the live topology; empty if there is none.

    No explanation is given if the ds_config switches the plugin off explicitly.
    """
    section = engine._config._param_dict.get("checkpoint") or {}
    if section.get("universal") is False:
        return ""
    try:
        wanted = read_latest(load_dir) if tag is None else str(tag)
        folder = find_folder(load_dir, wanted or "")
        differences = compare_own_files(*describe_own_files(engine, folder)) if os.path.isdir(folder) else ()
    except Exception as error:  # noqa: BLE001 - an explanation must not hide the error
        logger.debug("%s: %s", load_dir, error)
        return ""
    if not differences:
        return ""
    late = not hasattr(engine._config, "ucp_config")
    why = "it was made before deepspeed_ucp was imported" if late else 'its ds_config has no "checkpoint.universal"'
    do = "Import deepspeed_ucp before deepspeed.initialize, with" if late else "Write"
    return (
        f"deepspeed_ucp is imported but off for this engine: {why}. {folder} was saved in another topology "
        f'({shorten(differences, 4)}), which it resumes. {do} "checkpoint": {{"universal": true}} in the ds_config, '
        "or set the environment variable DEEPSPEED_UCP=1 on every rank (several nodes: in ~/.deepspeed_env)."
    )
