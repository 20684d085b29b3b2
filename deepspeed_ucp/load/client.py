"""Scheduler state, client state and the like: real objects, unpickled with torch's own restricted unpickler."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import pathlib
import pickle
import re
from typing import Any

import numpy as np
import torch

from ..comm import Comm
from ..errors import CheckpointError
from ..targets import pickled_classes
from ..torchsave.records import is_zip

EXTRA_STATES = "deepspeed_ucp.extra_states"
"""Key under which the modules' extra states are returned."""

_BULKY = ("module", "optimizer", "frozen_param_fragments")
"""Tensors of the model that the index reads; they do not belong to the client."""


def read_client_objects(path: str, comm: Comm, *, trust_pickle: bool) -> dict[str, Any]:
    """Read everything but the model's tensors from a model-states file, on rank 0, and tell all ranks; collective.

    Args:
        path: the file.
        trust_pickle: allow any class (``weights_only=False``).

    Raises:
        CheckpointError: the client state holds a class that torch does not unpickle safely.
    """
    found: dict[str, Any] = {}
    with comm.together():
        if comm.rank == 0:
            found = _read(path, trust_pickle)
    return comm.broadcast(found)  # type: ignore[no-any-return]


def _read(path: str, trust_pickle: bool) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(safe_classes()):
            # A zip is mapped, so that the model's own bytes are not read.
            saved = torch.load(path, map_location="cpu", mmap=is_zip(path), weights_only=not trust_pickle)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: the client state or scheduler holds an object that is not unpickled without your consent "
            f"({_shorten_reason(str(error))}). If you trust the file, allow the class with "
            'torch.serialization.add_safe_globals or set "checkpoint": {"universal": {"trust_pickle": true}}.'
        ) from error
    kept = {key: value for key, value in saved.items() if key not in _BULKY}
    module = saved.get("module")
    if isinstance(module, dict):
        kept[EXTRA_STATES] = {key: value for key, value in module.items() if str(key).endswith("_extra_state")}
    return copy.deepcopy(kept)  # so that nothing refers to the mapped file any more


def _shorten_reason(text: str) -> str:
    """What torch says about the object, without its advice and colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    if blocked := re.search(r"Trying to load unsupported GLOBAL \S+[^\n]*", plain):
        return blocked[0]
    reason = plain.split("WeightsUnpickler error:")[-1]
    return re.split(r"\. Please use|\n\s*\n|Check the documentation", reason.strip())[0].strip().rstrip(".")


def safe_classes() -> list[Any]:
    """Classes without side effects that client states and DeepSpeed's own headers commonly hold."""
    found: list[Any] = [
        argparse.Namespace,
        collections.OrderedDict,
        collections.Counter,
        datetime.datetime,
        datetime.timedelta,
        datetime.timezone,
        datetime.date,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        set,
        frozenset,
        slice,
        complex,
        bytearray,
        torch.Size,
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?c"},
    ]
    core = getattr(np, "_core", None) or np.core
    found += [core.multiarray._reconstruct, core.multiarray.scalar]
    return [*found, *pickled_classes()]
