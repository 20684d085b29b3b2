"""Stand-ins for the operators of DeepSpeed's Adams on CPU, which take minutes to compile.

The fork server of the worlds imports this module. Under `-m exhaustive` DeepSpeed compiles its operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import cpuinfo
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch import Tensor


def update(
    decoupled: bool,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    tensors: Sequence[Tensor],
) -> None:
    """Step like `ds_adam_step`: in fp32 for tensors of any dtype.

    Args:
        decoupled: AdamW instead of Adam.
        tensors: the parameter, its gradient, and the two moments.
    """
    param, grad, average, square = (tensor.float() for tensor in tensors)
    first, second = (1 - beta**step if bias_correction else 1.0 for beta in betas)
    if decoupled:
        param = param * (1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    average = betas[0] * average + (1 - betas[0]) * grad
    square = betas[1] * square + (1 - betas[1]) * grad * grad
    param = param - lr / first * average / ((square / second).sqrt() + eps)
    for held, value in zip((tensors[0], *tensors[2:]), (param, average, square), strict=True):
        held.copy_(value)


class CpuAdam:
    """``cpu_adam.cpp``, with the arguments of the operator."""

    def __init__(self) -> None:
        self.decoupled: dict[int, bool] = {}

    def create_adam(
        self, key: int, lr: float, beta1: float, beta2: float, eps: float, decay: float, decoupled: bool, log: bool
    ) -> None:
        self.decoupled[key] = decoupled

    def destroy_adam(self, key: int) -> None:
        self.decoupled.pop(key, None)

    @torch.no_grad()
    def adam_update(
        self, key: int, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float, correct: bool,
        *tensors: Tensor,
    ) -> None:  # fmt: skip
        update(self.decoupled[key], step, lr, (beta1, beta2), eps, decay, correct, tensors)


class FusedAdam:
    """``fused_adam.cpp``; gradients come first in its lists."""

    @torch.no_grad()
    def multi_tensor_adam(
        self, chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], lr: float, beta1: float, beta2: float,
        eps: float, step: int, mode: int, correct: int, decay: float,
    ) -> None:  # fmt: skip
        for grad, param, *moments in zip(*lists, strict=True):
            update(mode == 1, step, lr, (beta1, beta2), eps, decay, bool(correct), (param, grad, *moments))


STAND_INS = {"cpu_adam": CpuAdam(), **({"fused_adam": FusedAdam()} if get_accelerator().device_name() == "cpu" else {})}
OpBuilder._loaded_ops.update(STAND_INS)
cpuinfo.get_cpu_info = dict  # the vendor, which the real function finds by processes and the stand-ins ignore
