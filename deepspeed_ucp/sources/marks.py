"""What the files of one save have alike although nothing in them says which save they are of.

DeepSpeed gives a save no identity, and ``torch.save`` writes none: its ``.data/serialization_id`` is a hash of the
records' names and checksums, its zip entries have no times. So everything is compared that every rank of a launch
writes alike: the ds_config, DeepSpeed's version, the form of torch's archive, the scheduler, the client's strings.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..torchsave.objects import PickledObject, has_more_parts
from .findings import FAULT, WARNING

WRITER = "the form of its archive"
"""It differs between torch releases and DeepSpeed's writers. Model states are rewritten by hand now and then."""

SCHEDULER, CLIENT = "its lr_scheduler", "its client state"
"""Model states alone have them."""

_VERSION, _CONFIG = "ds_version", "its whole ds_config"

MARKS = {_VERSION: FAULT, WRITER: FAULT, _CONFIG: WARNING, SCHEDULER: WARNING, CLIENT: WARNING}
"""Each mark, and how much it weighs that a file's differs: a client may well give each rank strings of its own."""

DEEPSPEEDS = frozenset(
    [
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_config"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version"),
        *("checkpoint_parallel_dimensions", "num_experts", "autotp_config"),
    ]
)
"""Keys of a model-states file that DeepSpeed writes (engine.py ``_common_checkpoint_state`` and kin)."""

_LIMIT = 20_000
"""Values that are looked at; what is larger gets no mark."""


def read_marks(tree: Mapping[Any, Any], writer: str) -> dict[str, str]:
    """The marks of a state file, each a few bytes.

    Args:
        tree: its object tree.
        writer: the form of its archive.
    """
    marks = {_VERSION: str(tree.get("ds_version") or ""), WRITER: writer}
    marks[_CONFIG] = _digest(tree.get("ds_config"), str)
    marks[SCHEDULER] = _digest(tree.get("lr_scheduler"), str)
    client = {key: value for key, value in tree.items() if key not in DEEPSPEEDS and key != "optimizer_state_dict"}
    marks[CLIENT] = _digest(client, _keep_letters)
    return {name: mark for name, mark in marks.items() if mark}


def _keep_letters(value: Any) -> str:
    """A string without its digits (``cuda:0``, ``node17``); nothing of other values, which may be a rank's own."""
    return re.sub(r"\d+", "", value) if isinstance(value, str) else ""


def _digest(value: Any, tell: Callable[[Any], str]) -> str:
    """A short hash of plain data; empty where there is none, or too much of it."""
    if not value or has_more_parts(value, _LIMIT):
        return ""
    found, todo = hashlib.sha256(), [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            found.update(b"{")
            todo += [part for pair in each.items() for part in pair]
        elif isinstance(each, (list, tuple)):
            found.update(b"[")
            todo += each
        elif isinstance(each, PickledObject):
            found.update(each.kind.encode("utf-8", "replace"))
        elif each is None or isinstance(each, (bool, int, float, str)):
            found.update(tell(each).encode("utf-8", "replace") + b";")
    return found.hexdigest()[:16]
