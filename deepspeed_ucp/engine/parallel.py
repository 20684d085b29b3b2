"""A live engine's ranks in its parallel groups, and its model's tensor cuts.

DeepSpeed gets model parallelism from a Megatron-like ``mpu``, the grid of a ``PipelineModule``, or AutoTP (whose mpu is
``deepspeed.utils.groups``). All have the methods named in ``deepspeed/utils/bwc.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from deepspeed import comm as ds_comm
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

from ..model.flat import Shape
from ..model.storage import strip_compiled
from ..tensor_parallel.metadata import INFO
from .coverage import UnknownLayoutError

CUT_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes")
"""Megatron's attributes of a parameter (``core/tensor_parallel/layers.py``; sizes of unequal parts: ``core/ssm``)."""

_PIPE_RANKS = ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank")


@dataclass(frozen=True, slots=True)
class ParallelState:
    """A rank's numbers in its parallel groups, and the sizes of these.

    Attributes:
        tp_rank, tp: tensor-parallel rank and degree.
        pp_rank, pp: pipeline stage and number of stages.
        dp_rank, dp: rank and size of ZeRO's data-parallel group, including sequence-parallel ranks; at stage 0 of the
            replicas.
    """

    tp_rank: int
    tp: int
    pp_rank: int
    pp: int
    dp_rank: int
    dp: int

    @property
    def mp_rank(self) -> int:
        """Model-parallel rank in DeepSpeed's file names: ``pp_rank * tp + tp_rank``."""
        return self.pp_rank * self.tp + self.tp_rank


def find_parallel_state(engine: Any) -> ParallelState:
    """Return the ranks and degrees of this rank of ``engine``.

    Raises:
        UnknownLayoutError: model-parallel ranks are not numbered by pipeline stage, then tensor rank.
    """
    group = engine.seq_data_parallel_group
    dp_rank, dp = ds_comm.get_rank(group=group), ds_comm.get_world_size(group=group)
    if engine.mp_world_size <= 1:  # including an mpu for sequence parallelism only
        return ParallelState(0, 1, 0, 1, dp_rank, dp)
    mpu = engine.mpu
    tp, pp = int(bwc_tensor_model_parallel_world_size(mpu)), int(bwc_pipeline_parallel_world_size(mpu))
    find_stage = next((getattr(mpu, name) for name in _PIPE_RANKS if hasattr(mpu, name)), None)
    if pp > 1 and find_stage is None:
        raise UnknownLayoutError(f"the mpu has several pipeline stages but no stage number: give it {_PIPE_RANKS[0]}()")
    stage = int(find_stage()) if pp > 1 and find_stage else 0
    parallel = ParallelState(int(bwc_tensor_model_parallel_rank(mpu)), tp, stage, pp, dp_rank, dp)
    numbered = mpu.get_model_parallel_rank()  # the rank in file names
    if tp * pp != engine.mp_world_size or parallel.mp_rank != numbered:
        raise UnknownLayoutError(
            f"model-parallel rank {numbered} of {engine.mp_world_size} has pipeline stage "
            f"{parallel.pp_rank} of {pp} and tensor rank {parallel.tp_rank} of {tp}; expected rank {parallel.mp_rank} "
            f"of {tp * pp}. Number the ranks by pipeline stage, then tensor rank (topology axes pipe, data, model)"
        )
    return parallel


@dataclass(frozen=True, slots=True)
class Instance:
    """One stage's copy of a tensor that several pipeline stages have under one name.

    Attributes:
        ordinal: index of this stage among these stages.
        count: number of these stages.
        tied: DeepSpeed keeps the copies equal (``tied_weight_attr``); other copies are independent.
        is_filed: DeepSpeed's load of a pipeline's layers restores this copy.
    """

    ordinal: int
    count: int
    tied: bool
    is_filed: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks that hold the same distributed parameters.

    Only some data-parallel ranks hold a distributed parameter.

    Attributes:
        degree: number of such sets of ranks.
        ranks: of the pipeline stage; None if these are all data-parallel peers.
        unsharded: tensor-parallel ranks do not cut the parameters, and may be among the ranks.
        is_first_replica: this rank is the first of them.
    """

    degree: int
    ranks: range | None
    unsharded: bool
    is_first_replica: bool

    def name_parts(self, name: str, shape: Shape) -> dict[str, Shape]:
        """Map a rank's parameter to the whole model's parameters in it, with shapes."""
        return {name: shape}


def live_attributes(engine: Any) -> dict[str, dict[str, Any]]:
    """Return Megatron's attributes of the live parameters, by name.

    AutoTP marks cut parameters with ``tensor_model_parallel`` too, but without a dimension. Such marks are omitted;
    :func:`live_universal_info` returns AutoTP's own description.
    """
    attributes = {}
    for name, param in engine.module.named_parameters():
        marks = {key: getattr(param, key) for key in CUT_ATTRIBUTES if hasattr(param, key)}
        if marks and not (marks.get("tensor_model_parallel") and "partition_dim" not in marks):
            attributes[strip_compiled(name)] = marks
    return attributes


def live_universal_info(engine: Any) -> dict[str, Any] | None:
    """Return the model's ``universal_checkpoint_info`` as plain data, or None.

    Objects in it, such as ``SubparamShape`` and ``ParamAffineMap``, become dicts of their fields and ``"__class__"``;
    sets become sorted lists.
    """
    info = getattr(engine.module, INFO, None)
    if callable(info):
        info = info()
    return {str(key): _make_plain(value) for key, value in info.items()} if isinstance(info, Mapping) else None


def _make_plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (torch.Tensor, np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _make_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_make_plain, value)) if type(value) in (list, tuple) else list(map(_make_plain, value))
    if isinstance(value, (set, frozenset)):
        return sorted(map(_make_plain, value))
    names = vars(value) if hasattr(value, "__dict__") else getattr(value, "__slots__", ())
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    plain = {name: _make_plain(getattr(value, name)) for name in names if hasattr(value, name)}
    return {"__class__": type(value).__name__, **plain}
