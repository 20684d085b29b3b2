"""Random states that a trainer writes to a file per rank: of any world into any other, as in :mod:`deepspeed_ucp.rng`.

Only as many files count as the checkpoint was saved by ranks: what lies there beyond is of an older, larger save.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator

from ..atoms import SavedJob
from ..comm import connect
from ..errors import CheckpointError, shorten
from ..load.client import read_objects
from ..rng import (
    State,
    digest,
    find_axes,
    find_coords,
    list_generators,
    make_record,
    pack_numpy,
    pack_python,
    pack_torch,
    project,
    take,
)
from ..targets import find_place

logger = logging.getLogger("deepspeed_ucp")

States = dict[str, State]
"""By generator (:func:`deepspeed_ucp.rng.list_generators`)."""

_PACK: dict[str, Callable[[Any], State]] = {"python": pack_python, "numpy": pack_numpy, "torch": pack_torch}


def read_states(path: str, keys: Mapping[str, str], rank: int) -> States:
    """What a rank's file holds; nothing where there is no file.

    Args:
        path: of the file, a dict as ``torch.save`` writes it.
        keys: by generator the key in that dict; the accelerator's has a ``{}`` for the device's name. There it may be a
            list, of all devices of a node.
        rank: whose file it is.

    Raises:
        CheckpointError: it is damaged, or of another form.
        UnsupportedError: it holds classes that are not known to be harmless.
    """
    if not os.path.isfile(path):
        return {}
    saved, device = read_objects(path, trust_pickle=False), get_accelerator().device_name()
    try:
        found = {name: pack(saved[keys[name]]) for name, pack in _PACK.items()}
        held = saved.get(keys["accelerator"].format(device)) if device != "cpu" else None
        if held is not None:
            found["accelerator"] = pack_torch(held[rank % len(held)] if isinstance(held, list) else held)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"holds no random states that this release knows ({error!r}).", path=path) from error
    return found


def restore_ranks(engine: Any, folder: str, job: SavedJob, read: Callable[[int], States]) -> None:
    """Let this rank's generators go on from what the ranks of a saved job wrote; collective.

    A rank takes what the rank wrote that stood where it stands, and what all had alike; else its state is derived from
    the saved ones, the step and its place.

    Args:
        engine: has loaded the checkpoint.
        folder: of the files, for messages.
        job: what saved them.
        read: of a rank, what its file holds.

    Raises:
        CheckpointError: a file is damaged; the same on every rank.
    """
    comm, place = connect(), find_place(engine)
    ranks, tensor = range(job.ranks), job.model_ranks
    told = comm.share(ranks, lambda rank: {name: digest(state) for name, state in read(rank).items()})
    places = [(0, rank % tensor, rank // tensor) for rank in ranks]
    names = dict.fromkeys(name for each in told for name in each)
    axes = {name: find_axes({at: each.get(name) for at, each in zip(places, told, strict=True)}) for name in names}
    wanted = {project(find_coords(place), kept) for kept in axes.values()}

    def restore() -> list[str]:
        held = [(at, read(rank)) for rank, at in zip(ranks, places, strict=True) if at in wanted]
        record = make_record(held, axes, str(told[0]), job.steps)
        return take(record, place, {name: each for name, each in list_generators().items() if name in names})

    derived = comm.each(restore)
    if comm.rank == 0:
        if lacking := [str(rank) for rank, each in enumerate(told) if not each]:
            logger.warning("%s: the saved random states of ranks %s are missing", folder, shorten(lacking))
        if new := [str(rank) for rank, each in enumerate(derived) if each]:
            logger.info("%s: random states derived, not saved ones, on ranks %s", folder, shorten(new))
