"""What trainers need to run DeepSpeed on the CPU: the backend and the device are chosen for them, nothing else.

Imported on the ranks only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def choose_gloo(kind: str = "MULTI_CPU") -> Iterator[None]:
    """Accelerate leaves DeepSpeed out where it finds no accelerator (accelerate/state.py, ``_prepare_backend``), and
    FSDP where the ranks' ``kind`` is not MULTI_GPU.
    """
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType[kind])),
        mock.patch.object(PartialState, "set_device", set_device),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield
