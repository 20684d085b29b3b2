"""Engines that are saved, loaded and go on, whatever they hold: what the ranks of several modules' engines do alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor

States = dict[tuple[str, str], Tensor]
"""By parameter and state, whole; ``fp32`` is the master, ``copy`` the model's own."""

Loaded = tuple[bool, States, list[float]]
"""Whether the plugin's own load ran, what was held after it, and the losses that followed."""

Train = Callable[[Any, range], list[float]]
ReadStates = Callable[[Any], States]


def save_and_go_on(
    engine: Any,
    folder: str,
    train: Train,
    read_states: ReadStates,
    steps: int = 3,
    after: int = 2,
    *,
    again: bool = False,
) -> tuple[States, list[float]]:
    """Train, save, go on, save once more where asked to: what was held at the first save, and the losses after it."""
    train(engine, range(steps))
    engine.save_checkpoint(folder)
    states = read_states(engine)
    losses = train(engine, range(steps, steps + after))
    if again:
        engine.save_checkpoint(folder)
    engine.destroy()
    return states, losses


def load_and_go_on(
    engine: Any,
    folders: Sequence[str],
    train: Train,
    read_states: ReadStates,
    steps: range,
    tag: str | None = None,
    **arguments: Any,
) -> list[Loaded | str]:
    """One engine takes them all, one after the other; of a refusal its text."""
    found: list[Loaded | str] = []
    for folder in folders:
        try:
            engine.load_checkpoint(folder, tag, **arguments)
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            found.append(f"{type(error).__name__}: {error}")
        else:
            states = read_states(engine)
            report = engine.ucp_report
            direct = report is not None and report.direct
            found.append((direct, states, train(engine, steps)))
    engine.destroy()
    return found


def load_and_report(engine: Any, folder: str) -> tuple[int, int, int]:
    """Load a checkpoint; returns this rank's bytes read and requests, and the bytes of state of all ranks."""
    engine.load_checkpoint(folder)
    report = engine.ucp_report
    engine.destroy()
    return report.bytes_read, report.requests, report.state_bytes


def mean_square(output: Tensor, _label: Tensor) -> Tensor:
    """A loss for which the labels do not matter."""
    return output.float().pow(2).mean()


def take_step(engine: Any, loss: Tensor) -> float:
    """Backward and the engine's step; the mean of the loss over all ranks."""
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total.item() / dist.get_world_size())


def train_on_noise(
    engine: Any,
    steps: range,
    shape: Sequence[int],
    part: tuple[int, int],
    loss_of: Callable[[Tensor, Tensor], Tensor] = mean_square,
    label: Callable[[Tensor], Tensor] = lambda own: own,
) -> list[float]:
    """The losses of steps whose batches are drawn by the step's number; the mean over all ranks, or a pipeline's.

    Args:
        shape: of a whole batch.
        part: which of how many parts of it this rank takes.
    """
    losses = []
    for step in steps:
        batch = torch.randn(*shape, generator=torch.Generator().manual_seed(step))
        own = batch.chunk(part[1])[part[0]].to(engine.device, next(engine.module.parameters()).dtype)
        if isinstance(engine.module, PipelineModule):
            parts = own.split(engine.train_micro_batch_size_per_gpu())
            losses.append(float(engine.train_batch(iter([(each, label(each)) for each in parts]))))
            continue
        losses.append(take_step(engine, loss_of(engine(own), label(own))))
    return losses


class Saves(dict[Any, tuple[str, States, list[float]]]):
    """By spread the folder of a run, what it held at the save, and its losses after it; saved when first asked for."""

    def __init__(self, save: Callable[[Any, int], tuple[str, States, list[float]]]):
        super().__init__()
        self._save = save

    def __missing__(self, spread: Any) -> tuple[str, States, list[float]]:
        self[spread] = self._save(spread, len(self))
        return self[spread]


def join(parts: Sequence[States]) -> States:
    """What all ranks hold; what several hold has to be equal."""
    joined: States = {}
    for part in parts:
        for key, tensor in part.items():
            assert torch.equal(joined.setdefault(key, tensor), tensor), key
    return joined
