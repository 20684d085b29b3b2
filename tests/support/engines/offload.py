"""Engines that keep their states elsewhere, and stand-ins for what they need of an accelerator. On the ranks only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters

from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines.cases import make_engine, train_engine
from tests.support.engines.models import MODELS, param_groups

ON_GPU = get_accelerator().device_name() == "cuda"
"""Then nothing has a stand-in."""


def split() -> AbstractContextManager[Any]:
    """An accelerator by name: partial offload then steps its share of the sub-groups with a second optimizer."""
    if ON_GPU:
        return nullcontext()
    return mock.patch.object(get_accelerator(), "_name", "cpu:0")


@contextmanager
def superoffload() -> Iterator[None]:
    """A stream to be waited for, which there is none of on a CPU, and no question for the accelerator's name."""
    from deepspeed.runtime.superoffload import superoffload_stage3

    if ON_GPU:
        yield
        return
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda _other: None)
    with (
        mock.patch.object(superoffload_stage3, "_validate_superoffload_accelerator"),
        mock.patch.object(get_accelerator(), "current_stream", return_value=stream),
    ):
        yield


class Quantizer:
    """Symmetric 8-bit quantization in plain torch for DeepSpeed's kernel, which has no build for the CPU."""

    Symmetric = 0

    def quantize(self, tensor: torch.Tensor, groups: int, bits: int, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = tensor.detach().float().view(groups, -1)
        scales = rows.abs().amax(dim=1).clamp(min=1e-8) / (2 ** (bits - 1) - 1)
        return (rows / scales.view(groups, 1)).round().to(torch.int8).view(tensor.shape), scales

    def dequantize(self, tensor: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int) -> torch.Tensor:
        return (tensor.view(groups, -1).float() * scales.view(groups, 1)).view(tensor.shape).half()


def quantized() -> AbstractContextManager[Any]:
    if ON_GPU:
        return nullcontext()
    partition_parameters.CUDAQuantizer.quantizer_cuda_module = Quantizer()
    return nullcontext()


STAND_INS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "split": split,
    "superoffload": superoffload,
    "quantized": quantized,
}


def train(ds_config: dict[str, Any], stand_in: str = "", **options: Any) -> Generator[Any, None, None]:
    """As `cases.train`, of an engine with a stand-in."""
    with STAND_INS[stand_in]():
        engine = make_engine(ds_config, **options)
        yield engine
        yield from train_engine(engine)


def train_zenflow(ds_config: dict[str, Any]) -> Generator[Any, None, None]:
    """ZenFlow makes its optimizers itself."""
    module = MODELS["columns"]()
    engine, *_ = deepspeed.initialize(model=module, model_parameters=param_groups(module), config=ds_config)
    yield engine
    yield from train_engine(engine)


def save(training: Callable[[], Generator[Any, None, None]], folder: str, count: int = 2) -> CapturedEngine:
    """Train and save; what was held then."""
    steps = training()
    engine = next(steps)
    train_steps(steps, count)
    engine.save_checkpoint(folder)
    state = capture(engine)
    steps.close()
    engine.destroy()
    return state


def train_away(ds_config: dict[str, Any], **options: Any) -> Generator[Any, None, None]:
    """As `train`, of an engine that has trained and moved its states away, and that moves them back to go on."""
    engine = make_engine(ds_config, **options)
    train_steps(train_engine(engine), 1)
    engine.offload_states()
    yield engine
    engine.reload_states()
    yield from train_engine(engine)


def save_away(ds_config: dict[str, Any], folders: tuple[str, str], **options: Any) -> list[CapturedEngine]:
    """Save an engine whose states are away, and once more when they are back and it has trained on."""
    engine = make_engine(ds_config, **options)
    trained = train_engine(engine)
    train_steps(trained, 2)
    engine.offload_states()
    engine.save_checkpoint(folders[0])
    engine.reload_states()
    states = [capture(engine)]
    train_steps(trained, 1)
    engine.save_checkpoint(folders[1])
    states.append(capture(engine))
    for each in (held for state in states for held in state.parameters.values()):
        each.tensors = {name: tensor for name, tensor in each.tensors.items() if not name.endswith("_offload_buffer")}
    engine.destroy()
    return states
