"""Functions of the tests of Accelerate that run on the ranks. Imported on the ranks only."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from trainers_common import MovesBetas, choose_gloo, finish_writes, gather_weights, hold_writes, list_saves, listen
from trainers_hf import Net, Samples

from deepspeed_ucp.errors import StorageError


@dataclass
class Trained:
    """One rank's part of a run.

    Attributes:
        samples, rates, losses, random: of every step; a loss is the mean of the rank's micro batches.
        steps: of the engine, at the end.
        custom: what the registered object counts.
        warnings: warnings of the plugin.
    """

    samples: dict[int, list[int]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    random: dict[int, list[int]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 0
    custom: int = 0
    accumulation: int = 0
    warnings: list[str] = field(default_factory=list)


class Count:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


STEPS, SIZE, TOTAL = 12, 32, 8
"""Steps of a run of three epochs, samples, and samples of a step."""


def make_scheduler(kind: str, optimizer: Any, ranks: int) -> Any:
    """``scaled`` counts as Accelerate steps it, ``plain`` as two ranks step it, ``cosine`` is saved whole, ``betas``
    holds references."""
    from torch.optim import lr_scheduler

    most = STEPS * (ranks if kind in ("scaled", "one-cycle") else 2)
    if kind == "betas":
        return MovesBetas(optimizer)
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=most)
    if kind == "one-cycle":
        return lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=most)
    return lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / most))


def train(
    folder: str,
    ds_config: dict[str, Any],
    *,
    micro: int,
    accumulation: int = 1,
    scheduler: str = "scaled",
    save: dict[int, str] | None = None,
    resume: str | None = None,
) -> Trained:
    """Train in a loop like that of Accelerate's users, which continues at the restored step.

    Args:
        save: by micro batch (of all epochs, from 1 on) a folder.
    """
    record = Trained()
    with choose_gloo(), listen(record.warnings):
        accelerator, count, net, prepared = _prepare(ds_config, micro, accumulation, scheduler)
        if resume is not None:
            accelerator.load_state(resume)
        record.random[count.steps + 1] = torch.get_rng_state().tolist()
        _train(record, accelerator, count, net, *prepared, save or {})
        record.steps, record.custom = prepared[0].global_steps, count.steps
        record.accumulation, record.weights = accelerator.gradient_accumulation_steps, gather_weights(prepared[0])
        prepared[0].destroy()
    return record


def _prepare(
    ds_config: dict[str, Any], micro: int, accumulation: int, scheduler: str
) -> tuple[Any, Count, Net, tuple[Any, ...]]:
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
    from accelerate.utils import set_seed

    set_seed(5)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    net, count = Net(), Count()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Samples(SIZE), batch_size=micro, shuffle=True)
    made = make_scheduler(scheduler, optimizer, accelerator.num_processes)
    prepared = accelerator.prepare(net, optimizer, loader, made)
    accelerator.register_for_checkpointing(count)
    torch.manual_seed(100 + accelerator.process_index)
    return accelerator, count, net, prepared


def _train(
    record: Trained,
    accelerator: Any,
    count: Count,
    net: Net,
    model: Any,
    optimizer: Any,
    loader: Any,
    scheduler: Any,
    save: dict[int, str],
) -> None:
    per_step, per_epoch, losses = accelerator.gradient_accumulation_steps, SIZE // TOTAL, list[float]()
    begin, done = count.steps, count.steps * per_step
    for epoch in range(begin // per_epoch, STEPS // per_epoch):
        loader.set_epoch(epoch)
        first = (begin % per_epoch) * per_step if epoch == begin // per_epoch else 0
        for batch in accelerator.skip_first_batches(loader, first) if first else loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                rate = scheduler.get_last_lr()[0]
                scheduler.step()
                optimizer.zero_grad()
            done += 1
            losses.append(loss.item())
            if accelerator.sync_gradients:
                count.steps += 1
                record.samples[count.steps], record.rates[count.steps] = list(net.seen), rate
                record.losses[count.steps] = sum(losses) / len(losses)
                net.seen.clear()
                losses.clear()
            if done in save:
                accelerator.save_state(save[done])


def rotate(folder: str, ds_config: dict[str, Any]) -> tuple[list[dict[str, bool]], int]:
    """Save with automatic names and a limit of one; the writes of the second and third save are held back.

    Returns:
        The checkpoints after each save, and the steps that a load of the last one restores.
    """
    from accelerate.utils import ProjectConfiguration

    saves = list[dict[str, bool]]()
    with choose_gloo():
        accelerator, count, _, (model, optimizer, loader, scheduler) = _prepare(ds_config, 4, 1, "plain")
        accelerator.project_configuration = ProjectConfiguration(
            folder, automatic_checkpoint_naming=True, total_limit=1
        )
        holding = hold_writes()
        for number, batch in enumerate(loader):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            count.steps += 1
            if number == 1:
                holding.__enter__()
            accelerator.save_state()
            saves.append(list_saves(os.path.join(folder, "checkpoints")))
            if number == 2:
                holding.__exit__(None, None, None)
                finish_writes()
                accelerator.wait_for_everyone()
        count.steps = 0
        accelerator.load_state()
        saves.append(list_saves(os.path.join(folder, "checkpoints")))
        model.destroy()
    return saves, count.steps


def save_twice(folder: str, ds_config: dict[str, Any]) -> str:
    """Return the error of the second save to a folder, while writes are held back."""
    with choose_gloo():
        accelerator, _, _, prepared = _prepare(ds_config, 8, 1, "plain")
        accelerator.save_state(folder)
        with hold_writes():
            try:
                accelerator.save_state(folder)
            except StorageError as error:
                return str(error)
            finally:
                prepared[0].destroy()
    return ""
