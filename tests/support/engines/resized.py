"""Engines whose models have other vocabularies than the saved one; run on ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed_ucp  # noqa: F401
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from tests.support.engines.cases import allow_fp16_on_cpu, enable, forget_autocast
from tests.support.engines.going_on import take_step

ROWS = 11
"""Of the saved vocabulary; batches and losses know no others."""


class Speaker(nn.Module):
    """Tokens to scores of tokens."""

    def __init__(
        self, rows: int, layers: int = 2, *, tied: bool = False, value: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.head = nn.Linear(6, rows)
        if tied:
            self.head.weight = self.embed.weight
        if value:
            self.value = nn.Linear(6, 1)
        for each in (self.embed, self.head) if frozen else ():
            each.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Kind:
    """An engine: its model, ZeRO stage and precision, and what its rules say."""

    stage: int = 1
    precision: str = "fp32"
    rows: int = ROWS
    options: dict[str, Any] = field(default_factory=dict)
    offload: bool = False
    patterns: Any = None
    seed: int = 1

    def start(self) -> Any:
        """The engine, and the losses of its steps."""
        torch.manual_seed(self.seed)
        return self.make(Speaker(self.rows, **self.options))

    def make(self, model: nn.Module) -> Any:
        """An engine of a model."""
        allow_fp16_on_cpu()
        forget_autocast()
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "checkpoint": {"universal": {"patterns": self.patterns}},
            **enable(self.precision),
        }
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.8, 0.95))
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine


def train(engine: Any, steps: range) -> list[float]:
    """Losses, each of the scores of the saved vocabulary alone."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(ROWS, (8, 5), generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
        told = engine(batch[:, :4])
        scores = told if isinstance(told, Tensor) else told.logits[:, -1]
        losses.append(take_step(engine, nn.functional.cross_entropy(scores[:, :ROWS].float(), batch[:, 4])))
    return losses


def save(kind: Kind, folder: str) -> tuple[CapturedEngine, list[float]]:
    """Train, save and go on: what was saved, and the losses after it."""
    return _save(kind.start(), folder)


def _save(engine: Any, folder: str) -> tuple[CapturedEngine, list[float]]:
    train(engine, range(3))
    engine.save_checkpoint(folder)
    state = capture(engine)
    losses = train(engine, range(3, 5))
    engine.destroy()
    return state, losses


@dataclass
class Loaded:
    """An engine before a load and after it, its losses, and what was logged; of a refusal its text."""

    before: CapturedEngine
    after: CapturedEngine
    lines: list[str]
    losses: list[float] = field(default_factory=list)
    refusal: str = ""


def load(kinds: Sequence[Kind], folders: Sequence[str]) -> list[list[Loaded]]:
    """Engines that take all folders, one after the other, and train after each."""
    return [_load(kind.start(), folders, after=2 if kind.rows >= ROWS else 0) for kind in kinds]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _load(engine: Any, folders: Sequence[str], after: int = 2) -> list[Loaded]:
    found = []
    for folder in folders:
        heard, before, refusal = _Lines(), capture(engine), ""
        logging.getLogger("deepspeed_ucp").addHandler(heard)
        try:
            engine.load_checkpoint(folder)
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            refusal = str(error)
        finally:
            logging.getLogger("deepspeed_ucp").removeHandler(heard)
        loaded = capture(engine)
        losses = [] if refusal else train(engine, range(3, 3 + after))
        found.append(Loaded(before, loaded, heard.lines, losses, refusal))
    engine.destroy()
    return found
