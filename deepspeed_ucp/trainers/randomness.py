"""Restores random states of one file per rank, also in another topology.

Files beyond the number of ranks that saved the checkpoint come from an older, larger save, and are ignored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ..comm import connect
from ..engine.parallel import find_parallel_state
from ..errors import CheckpointError, shorten
from ..load.client import read_objects
from ..model.index import SavedJob
from ..rng import (
    State,
    digest,
    find_axes,
    find_coords,
    list_generators,
    log_copies,
    make_record,
    pack_numpy,
    pack_python,
    pack_torch,
    project,
    restore_generators,
)

logger = logging.getLogger("deepspeed_ucp")

States = dict[str, State]
"""Name of a generator (:func:`deepspeed_ucp.rng.list_generators`) → state."""

_PACK: dict[str, Callable[[Any], State]] = {"python": pack_python, "numpy": pack_numpy, "torch": pack_torch}


def read_states(path: str, keys: Mapping[str, str], rank: int) -> States:
    """Read the states in a rank's file; empty if the file is missing.

    Args:
        keys: generator → key in the file's dict. The accelerator's key has a ``{}`` for the name of the device; its
            value may be a list with one state per device of the node.

    Raises:
        CheckpointError: the file is damaged, or has another form.
        UnsupportedError: the file has classes that are not known to be harmless.
    """
    if not os.path.isfile(path):
        return {}
    saved, device = read_objects(path, trust_pickle=False), get_accelerator().device_name()
    try:
        states = {name: pack(saved[keys[name]]) for name, pack in _PACK.items()}
        state = saved.get(keys["accelerator"].format(device)) if device != "cpu" else None
        if state is not None and len(state):
            states["accelerator"] = pack_torch(_choose_device(state, rank) if isinstance(state, list) else state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"has random states of an unknown form ({error!r}).", path=path) from error
    return states


def _choose_device(states: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Choose the state of a rank's device from the states of all devices it saw.

    A CUDA state is a seed and an offset of 8 bytes each. Only a device that has drawn numbers has an offset.
    Nodes may have more devices than ranks, so the rank alone does not determine the device.
    """
    drawn = [state for state in states if state.numel() == 16 and state[8:].any()]
    return drawn[0] if len(drawn) == 1 else states[rank % len(states)]


def restore_ranks(engine: Any, folder: str, job: SavedJob, read: Callable[[int], States]) -> None:
    """Restore this rank's generators from the files of a loaded job (collective).

    Raises:
        CheckpointError: a file is damaged; the same on every rank.
    """
    comm, parallel = connect(), find_parallel_state(engine)
    ranks, tensor = range(job.ranks), job.model_ranks
    digests = comm.share(ranks, lambda rank: {name: digest(state) for name, state in read(rank).items()})
    places = [(0, rank % tensor, rank // tensor) for rank in ranks]
    names = dict.fromkeys(name for by_name in digests for name in by_name)
    axes = {
        name: find_axes({at: by_name.get(name) for at, by_name in zip(places, digests, strict=True)}) for name in names
    }
    needed = {project(find_coords(parallel), along) for along in axes.values()}

    def restore() -> list[str]:
        known = [(at, read(rank)) for rank, at in zip(ranks, places, strict=True) if at in needed]
        record = make_record(known, axes, str(digests[0]), job.steps)
        wanted = {*names, "accelerator"} if names else {}  # a run on CPUs has saved no state of an accelerator
        generators = {name: generator for name, generator in list_generators().items() if name in wanted}
        return restore_generators(record, parallel, generators)

    derived = comm.gather_results(restore)
    if comm.rank == 0:
        if job.ranks == 1 < parallel.dp:
            log_copies(parallel.dp)
        if missing := [str(rank) for rank, by_name in enumerate(digests) if not by_name]:
            logger.warning("%s: the saved random states of ranks %s are missing", folder, shorten(missing))
        if new := [str(rank) for rank, is_derived in enumerate(derived) if is_derived]:
            logger.info("%s: random states derived instead of restored on ranks %s", folder, shorten(new))
