"""ZeRO 3's gathers of old releases, made to end before they are used; preloaded on the ranks of tests.

These releases wait for the last of several gathers alone. gloo does not end them in order, so that on CPUs an engine
trains on, and a test looks at, memory that is not filled yet. It is none of what is tested here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from . import find_reason


def settle(gather: Callable[..., Any]) -> Callable[..., Any]:
    """A gather that has ended when it returns its handle."""

    def call(*args: Any, **options: Any) -> Any:
        handle = gather(*args, **options)
        if handle is not None:
            handle.wait()
        return handle

    return call


def gather_all(
    _: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """`TorchBackend.all_gather_coalesced`, one gather after the other."""
    gather = settle(torch.distributed.all_gather_into_tensor)
    handles = [gather(o, i, group=group, async_op=True) for o, i in zip(outputs, inputs, strict=True)]
    return handles[-1] if async_op else None


if find_reason("gathers"):
    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(TorchBackend, name, settle(getattr(TorchBackend, name)))
    TorchBackend.all_gather_coalesced = gather_all
