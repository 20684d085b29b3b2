"""Save with FSDP2 and resume in engines; run on the ranks of a group."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

import deepspeed_ucp  # noqa: F401
from deepspeed_ucp.errors import UcpError
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare
from tests.support import fsdp_run
from tests.support.engines.ranks import listen


def save(folder: str, steps: int) -> None:
    """Train under FSDP2 and save."""
    model, optimizer = fsdp_run.build_sharded()
    fsdp_run.train(model, optimizer, range(steps))
    fsdp_run.save_sharded(folder, model, optimizer)


def start(stage: int, **options: Any) -> Any:
    """An engine of the same model with other weights."""
    return make_engine(*fsdp_run.build(seed=1), stage, **options)


def make_engine(model: Any, optimizer: Any, stage: int, *, clip: float = 0.0, **universal: Any) -> Any:
    """An engine; ``universal``: options of the plugin."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": clip,  # 1.0 by default, which FSDP does not do
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"universal": universal or True},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def go_on(folder: str, stages: tuple[int, ...], **options: Any) -> list[tuple[CapturedEngine, list[str]]]:
    """Load into engines of some stages; return the state and the log of each."""
    found = []
    for stage in stages:
        engine = start(stage, **options)
        with listen() as heard:
            engine.load_checkpoint(folder)
        found.append((capture(engine), [text for _, text in heard]))
        engine.destroy()
    return found


def refuse(folders: list[str], stage: int) -> tuple[list[str], list[str], list[float], list[float]]:
    """Load folders that a trained engine must refuse.

    Returns:
        Error message and changes for each folder; losses of further training; losses of an untouched engine.
    """
    engine, twin = start(stage), start(stage)
    losses = [_train(each, range(2)) for each in (engine, twin)]
    before, said, changed = capture(engine), [], []
    for folder in folders:
        try:
            engine.load_checkpoint(folder)
            said.append("loaded")
        except UcpError as error:
            said.append(str(error))
        changed += compare(before, capture(engine))[1]
    losses = [_train(each, range(2, 4)) for each in (engine, twin)]
    engine.destroy()
    twin.destroy()
    return said, changed, *losses


def _train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step)).unbind()
        loss = (engine(x) - y[:, :5]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.item()))
    return losses


def save_engine(folder: str, stage: int, *, load: str = "", steps: int = 0) -> CapturedEngine:
    """Load or train, and save with DeepSpeed; return the engine's state."""
    engine = start(stage)
    if load:
        engine.load_checkpoint(load)
    _train(engine, range(steps))
    engine.save_checkpoint(folder)
    state = capture(engine)
    engine.destroy()
    return state


def load_adapter(base: str, folder: str, stages: tuple[int, ...]) -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    """Load a base and PEFT's folder into engines with an adapter; return parameters and log."""
    from tests.support.adapters import LORAS, make_peft

    found = []
    for stage in stages:
        model = make_peft(**LORAS["saved"])
        trained = [param for param in model.parameters() if param.requires_grad]
        for param in model.parameters():
            param.data.zero_()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "checkpoint": {"universal": True},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        with listen() as heard:
            engine.load_checkpoint(base)
            engine.load_checkpoint(folder)
        values = {name: each.value for name, each in capture(engine).parameters.items()}
        found.append((values, [text for _, text in heard]))
        engine.destroy()
    return found
