"""Scheduler state, client state and the like: real objects, unpickled with torch's own restricted unpickler."""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import pickle
from typing import Any

import numpy as np
import torch

from ..comm import Comm
from ..errors import CheckpointError
from ..targets import pickled_classes

_BULKY = ("module", "optimizer", "frozen_param_fragments")
"""Tensors of the model that the index reads; they do not belong to the client."""


def read_client_objects(path: str, comm: Comm, *, trust_pickle: bool, is_zip: bool) -> dict[str, Any]:
    """Read everything but the model's tensors from a model-states file, on rank 0, and tell all ranks; collective.

    Args:
        path: the file.
        trust_pickle: allow any class (``weights_only=False``).
        is_zip: the zip format can be mapped, so that the model's bytes are not read.

    Raises:
        CheckpointError: the client state holds a class that torch does not unpickle safely.
    """
    found: dict[str, Any] = {}
    with comm.together():
        if comm.rank == 0:
            found = _read(path, trust_pickle, is_zip)
    return comm.broadcast(found)  # type: ignore[no-any-return]


def _read(path: str, trust_pickle: bool, is_zip: bool) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(safe_classes()):
            saved = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=not trust_pickle)
    except pickle.UnpicklingError as error:
        reason = str(error).split("Please file")[0].split("\n\n")[0].strip()
        raise CheckpointError(
            f"{path}: the client state or scheduler holds an object that is not unpickled without your consent "
            f"({reason}). If you trust the file, allow the class with torch.serialization.add_safe_globals or set "
            '"checkpoint": {"universal": {"trust_pickle": true}}.'
        ) from error
    return {key: _own(value) for key, value in saved.items() if key not in _BULKY}


def _own(value: Any) -> Any:
    """Copies of mapped tensors, so that nothing refers to the file any more."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_own(item) for item in value)
    return value


def safe_classes() -> list[Any]:
    """Classes without side effects that client states and DeepSpeed's own headers commonly hold."""
    found: list[Any] = [
        argparse.Namespace,
        collections.OrderedDict,
        collections.defaultdict,
        collections.Counter,
        collections.deque,
        datetime.datetime,
        datetime.timedelta,
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
