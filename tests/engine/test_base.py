"""The base class of all targets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ucp.engine import engines
from deepspeed_ucp.engine.base import dtype_name, flatten
from deepspeed_ucp.engine.engines import OffloadOnlyTarget, Zero12Target
from deepspeed_ucp.extensions.nvme import Nvme
from deepspeed_ucp.model.storage import strip_compiled
from tests.support.reshard import FakeTarget
from tests.synth import Model, Param, Topology


def test_a_target_reports_names_dtypes_and_memory() -> None:
    assert strip_compiled("_orig_mod.layer._orig_mod.weight") == "layer.weight"
    assert dtype_name(torch.bfloat16) == "bfloat16"
    tensor = torch.zeros(2, 3, requires_grad=True)
    flat = flatten(tensor)
    flat[4] = 1
    assert tensor[1, 1] == 1
    assert flatten(torch.zeros(3, 2).t()).shape == (2, 3)


def test_prefetched_partitions_are_released() -> None:
    """The load fills the file on NVMe. A partition in memory would replace it and is never written back."""
    target = FakeTarget(Model((Param("a", (2, 3)), Param("b", (4,)))), Topology(3), 0)
    released: list[Any] = []
    for status, param in zip(("AVAILABLE", "NOT_AVAILABLE"), target.params.values(), strict=True):
        swapper = SimpleNamespace(
            synchronize_reads=lambda: released.append("waited"), remove_partition_and_release_buffers=released.extend
        )
        param.nvme_swapper = swapper
        param.ds_tensor = SimpleNamespace(final_location="nvme", status=PartitionedParamStatus[status])
    target.extensions = [Nvme()]
    target.prepare()
    assert len(released) == 2 and released[0] == "waited" and released[1] is target.params["a"]


class Copies(TorchDispatchMode):
    """Records the number of elements of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_masters_are_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to a GPU needs memory for the conversion of one piece instead of a partition."""
    flat, master = torch.zeros(22, dtype=torch.bfloat16), torch.arange(11.0)
    target: Any = Zero12Target.__new__(Zero12Target)
    target.wrapper = "zero12"
    target.wrapped = SimpleNamespace(**{name: [None] for name in Zero12Target.attributes["zero12"]})
    target.wrapped.bit16_groups_flat, target.wrapped.single_partition_of_fp32_groups = [flat], [master]
    target.wrapped.parallel_partitioned_bit16_groups = [flat.view(2, 11)]
    monkeypatch.setattr(engines.ds_comm, "get_rank", lambda group: 1)
    monkeypatch.setattr(engines, "_PIECE", 4)
    with Copies() as copies:
        target.refresh_copies()
    assert flat.tolist() == [0.0] * 11 + master.tolist()
    assert copies.sizes == [4, 4, 3]


def test_copies_on_accelerators_are_gathered_by_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed moves them to the host if torch cannot gather an accelerator's tensors."""
    calls = list[Any]()
    monkeypatch.setattr(engines.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(engines.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(engines.ds_comm, "all_gather_into_tensor", lambda *args, group: calls.extend((*args, group)))
    flat = torch.zeros(6, device="meta")
    engines.gather_in_place(flat, "group")
    whole, part, group = calls
    assert (whole is flat, part.storage_offset(), part.numel(), group) == (True, 3, 3, "group")


def test_the_partitioning_degree_of_zero_3_for_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = OffloadOnlyTarget.__new__(OffloadOnlyTarget)
    target.wrapped = SimpleNamespace(dp_process_group="group")
    monkeypatch.setattr(engines.ds_comm, "get_world_size", lambda group: {"group": 2}[group])
    assert target.dp == 2
