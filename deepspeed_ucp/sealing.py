"""Seal an engine's saves: at once, or when an asynchronous save is complete."""

from __future__ import annotations

import logging
import os
from typing import Any

from .comm import Comm, connect, is_shared
from .engine.coverage import writes_states
from .engine_state import UnsealedSave, find_state, get_config
from .errors import CheckpointError, UcpError
from .formats.deepspeed.seal import remove_seal
from .formats.open import lacks_states, seal_folder
from .io.paths import is_url
from .writer import find_other_writer

logger = logging.getLogger("deepspeed_ucp")


def seal_save(engine: Any, save_dir: Any, tag: Any) -> None:
    """Seal a complete save, or remove its tag's earlier seal (collective)."""
    config = get_config(engine)
    if config is None:
        return
    comm, folder = connect(), os.path.join(str(save_dir), str(tag))
    if comm.rank == 0 and not is_url(str(save_dir)) and writes_states(engine) and lacks_states(folder):
        logger.warning(
            "%s: this DeepSpeed has saved no optimizer states, as releases 0.17.6 to 0.18.4 do in bf16 without "
            "ZeRO or with fp32 gradients: training cannot resume from it. Save at ZeRO stage 1, or with another "
            "release",
            folder,
        )
    if is_url(str(save_dir)):  # DeepSpeed treats a URL as a local path
        if comm.rank == 0:
            message = "%s: DeepSpeed saves to local folders alone; it has made %s, which no load from the URL finds"
            logger.warning(message, save_dir, os.path.abspath(folder))
        return
    local = engine.use_node_local_storage()
    try:
        comm.run(lambda: remove_seal(folder) if comm.rank == 0 or local else None)
    except (UcpError, OSError) as error:
        _warn_unsealed(folder, comm, str(error))
    else:
        if config.seal:
            _seal(engine, UnsealedSave(folder, local))


def _seal(engine: Any, save: UnsealedSave, *, is_last: bool = False) -> None:
    """Seal a save, or retry later while its files are being written (collective).

    Args:
        is_last: do not retry.
    """
    comm = connect()
    find_state(engine).unsealed = None
    try:
        seal_folder(save.folder, comm, local=save.local)
    except (UcpError, OSError) as error:
        save.writer = save.writer or find_other_writer(engine)
        if not save.writer or is_last or not (isinstance(error, CheckpointError) and is_shared(error)):
            late = f"{save.writer} writes it, and had not ended by now: " if save.writer else ""
            _warn_unsealed(save.folder, comm, f"{late}{error}")
            return
        find_state(engine).unsealed = save
        if not save.steps:
            reason = f"{save.writer} writes its files after the save. The step that finds all of them seals it."
            _warn_unsealed(save.folder, comm, reason)


def _warn_unsealed(folder: str, comm: Comm, reason: str) -> None:
    if comm.rank == 0:
        logger.warning("%s: is not sealed: %s", folder, reason)


def seal_last(engine: Any) -> None:
    """Try a last time to seal the previous save, before the next one (collective)."""
    save = find_state(engine).unsealed
    if save is not None:
        _seal(engine, save, is_last=True)


def seal_late(engine: Any) -> None:
    """Retry an unsealed save's seal after 1, 2, 4, 8, … steps (collective)."""
    save = find_state(engine).unsealed
    if save is not None:
        save.steps += 1
        if save.steps & (save.steps - 1) == 0:
            _seal(engine, save)
