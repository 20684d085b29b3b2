"""Complete the gathers of ZeRO 3 in old releases before their use; preloaded on the ranks of tests.

These releases wait only for the last of several gathers. gloo does not complete them in order, so engines on CPUs read
unfilled memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from . import find_reason


def settle(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gather that is complete when it returns its handle."""

    def call(*args: Any, **options: Any) -> Any:
        handle = gather(*args, **options)
        if handle is not None:
            handle.wait()
        return handle

    return call


def gather_all(
    _: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """Replace `TorchBackend.all_gather_coalesced` by consecutive gathers."""
    gather = settle(torch.distributed.all_gather_into_tensor)
    handles = [gather(o, i, group=group, async_op=True) for o, i in zip(outputs, inputs, strict=True)]
    return handles[-1] if async_op else None


if find_reason("gathers"):
    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(TorchBackend, name, settle(getattr(TorchBackend, name)))
    TorchBackend.all_gather_coalesced = gather_all
