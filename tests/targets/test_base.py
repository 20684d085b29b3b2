"""What every target has in common."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

from deepspeed_ucp.atoms import strip_compiled
from deepspeed_ucp.targets.base import dtype_name, flatten
from tests.reshard import FakeTarget
from tests.synth import Model, Param, Topology


def test_names_dtypes_and_memory() -> None:
    assert strip_compiled("_orig_mod.layer._orig_mod.weight") == "layer.weight"
    assert dtype_name(torch.bfloat16) == "bfloat16"
    tensor = torch.zeros(2, 3, requires_grad=True)
    flat = flatten(tensor)
    flat[4] = 1
    assert tensor[1, 1] == 1
    assert flatten(torch.zeros(3, 2).t()).shape == (2, 3)


def test_partitions_that_were_fetched_ahead_go_back_to_nvme() -> None:
    """What is filled is the file; memory would hide it, and is never written back."""
    target = FakeTarget(Model((Param("a", (2, 3)), Param("b", (4,)))), Topology(3), 0)
    released: list[Any] = []
    for status, param in zip(("AVAILABLE", "NOT_AVAILABLE"), target.params.values(), strict=True):
        swapper = SimpleNamespace(
            synchronize_reads=lambda: released.append("waited"), remove_partition_and_release_buffers=released.extend
        )
        param.nvme_swapper = swapper
        param.ds_tensor = SimpleNamespace(final_location="nvme", status=PartitionedParamStatus[status])
    target.prepare()
    assert len(released) == 2 and released[0] == "waited" and released[1] is target.params["a"]
