"""Functions of the tests of Lightning that run on the ranks. Imported on the ranks only."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import trainers_common
from lightning.fabric.accelerators import CPUAccelerator as FabricAccelerator
from lightning.fabric.strategies import deepspeed as fabric_deepspeed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy, deepspeed
from trainers_common import finish_writes, hold_writes, list_saves, listen

from deepspeed_ucp import install, rng
from deepspeed_ucp.data import ElasticSampler

FEATURES, SAMPLES, TOTAL = 11, 51, 8
"""An epoch has six steps and three further samples."""


@dataclass(frozen=True)
class Setting:
    """The options of a script that a resume may change; a step has the same samples in every world.

    Attributes:
        frozen: freeze a layer, and exclude it from checkpoints.
        script_class: put an object of the script's class into the hyper-parameters.
    """

    stage: int
    ranks: int
    accumulation: int = 1
    elastic: bool = True
    frozen: bool = False
    script_class: bool = False

    @property
    def micro(self) -> int:
        return TOTAL // self.ranks // self.accumulation


class ScriptClass:
    """A class of the training script that runs code when it is unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@dataclass
class Trained(trainers_common.Trained):
    """One rank's part of a run, by step of the engine.

    Attributes:
        counted: Lightning's count of steps.
        drawn: first random number.
        loaded: class of the loaded hyper-parameter.
    """

    counted: dict[int, int] = field(default_factory=dict)
    drawn: dict[int, float] = field(default_factory=dict)
    error: str = ""
    loaded: str = ""


class Net(pl.LightningModule):
    def __init__(self, setting: Setting, record: Trained, save: tuple[int, str] | None) -> None:
        super().__init__()
        self.setting, self.record, self.save = setting, record, save
        self.layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 17), torch.nn.Tanh(), torch.nn.Linear(17, 1))
        self.layers[0].requires_grad_(not setting.frozen)
        self.strict_loading = not setting.frozen
        if setting.script_class:
            self.save_hyperparameters({"script_class": ScriptClass()})

    def on_fit_start(self) -> None:
        engine, world = self.trainer.strategy.deepspeed_engine, self.trainer.world_size
        if self.setting.elastic:
            self.sampler = ElasticSampler(SAMPLES, TOTAL, rank=self.global_rank, world=world, seed=3)
            self.sampler.follow(engine)
        rng.follow(engine)

    def train_dataloader(self) -> Any:
        sampler = self.sampler if self.setting.elastic else None
        numbers = range(SAMPLES)
        data = [(torch.randn(FEATURES, generator=torch.Generator().manual_seed(each)), each) for each in numbers]
        generator = torch.Generator()  # otherwise each start of a loader draws from the global generator
        return torch.utils.data.DataLoader(data, self.setting.micro, sampler=sampler, generator=generator)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, numbers = batch
        step = self.trainer.strategy.deepspeed_engine.global_steps + 1
        loss = self.layers(inputs).square().mean()
        if step not in self.record.samples:
            self.record.rates[step] = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.record.counted[step] = self.trainer.global_step
            self.record.drawn[step] = torch.rand(1).item()
        self.record.samples.setdefault(step, []).extend(numbers.tolist())
        # The mean of the micro batches:
        self.record.losses[step] = self.record.losses.get(step, 0.0) + loss.item() / self.setting.accumulation
        return loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.record.loaded = type(checkpoint.get("hyper_parameters", {}).get("script_class")).__name__

    def on_train_batch_end(self, *_: Any) -> None:
        steps = self.trainer.strategy.deepspeed_engine.global_steps
        if self.save is not None and steps == self.save[0]:
            self.trainer.save_checkpoint(self.save[1])
            self.trainer.should_stop = True


def train(
    setting: Setting,
    steps: int,
    *,
    save: tuple[int, str] | None = None,
    load: str | None = None,
    default_on: Any = True,
    **options: Any,
) -> Trained:
    """Train up to a step; return an error instead of raising it.

    Args:
        save: after which step to save and end, and where.
        default_on: options of the plugin.
    """
    record = Trained()
    torch.manual_seed(7)
    net = Net(setting, record, save)
    torch.manual_seed(100 * bool(load) + dist.get_rank())
    with _choose_cpu(default_on), listen(record.warnings):
        frozen = {"exclude_frozen_parameters": setting.frozen}
        strategy = make_strategy(DeepSpeedStrategy, setting.stage, setting.micro, **frozen)
        options = {"use_distributed_sampler": not setting.elastic, "max_steps": steps, **options}
        options["accumulate_grad_batches"] = setting.accumulation
        trainer = make_trainer(strategy, LightningEnvironment(), **options)
        try:
            trainer.fit(net, ckpt_path=load)
        except Exception as error:  # noqa: BLE001 - for the test
            record.error = "".join(traceback.format_exception(error))
    return record


def make_strategy(kind: Any, stage: int, micro: int, **options: Any) -> Any:
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": micro}
    return kind(config={**config, "zero_allow_untested_optimizer": True}, process_group_backend="gloo", **options)


def make_trainer(strategy: Any, environment: Any, **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "devices": dist.get_world_size(), **quiet, **options}
    return pl.Trainer(strategy=strategy, plugins=[environment], **options)


@contextmanager
def _choose_cpu(default_on: Any) -> Iterator[None]:
    """Let Lightning run DeepSpeed on the CPU, which it refuses (strategies/deepspeed.py, ``setup_environment``)."""
    rank, devices = str(dist.get_rank()), [torch.device("cpu", index) for index in range(dist.get_world_size())]
    with (
        mock.patch.dict(os.environ, LOCAL_RANK=rank, NODE_RANK="0"),
        mock.patch.object(CPUAccelerator, "get_parallel_devices", return_value=devices),
        mock.patch.object(FabricAccelerator, "get_parallel_devices", return_value=devices),
        mock.patch.object(deepspeed, "CUDAAccelerator", CPUAccelerator),
        mock.patch.object(fabric_deepspeed, "CUDAAccelerator", FabricAccelerator),
    ):
        install(default_on=default_on)
        try:
            yield
        finally:
            install(default_on=False)


def train_with_fabric(stage: int, micro: int, steps: int, folder: str, *, load: bool) -> list[float]:
    """Train a model under Fabric; return the losses. The state contains the step."""
    torch.manual_seed(7)
    model: torch.nn.Module = torch.nn.Linear(FEATURES, 1)
    torch.manual_seed(1)
    with _choose_cpu(True):
        fabric = _launch_fabric(stage, micro)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if load:
            fabric.load(folder, state)
        losses = []
        for step in range(state["step"], steps):
            whole = torch.randn(TOTAL, FEATURES, generator=torch.Generator().manual_seed(step))
            loss = model(whole.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            state["step"] = step + 1
        fabric.save(folder, state)
    return losses


def _launch_fabric(stage: int, micro: int) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment as Environment

    strategy = make_strategy(fabric_deepspeed.DeepSpeedStrategy, stage, micro)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=[Environment()])
    fabric.launch()
    return fabric


def split_with_fabric() -> None:
    """Give Fabric a data loader with a sampler that already splits its samples over the ranks."""
    sampler = ElasticSampler(16, 8, rank=dist.get_rank(), world=dist.get_world_size())
    with _choose_cpu(True):
        fabric, loader = _launch_fabric(1, 4), torch.utils.data.DataLoader(range(16), 4, sampler=sampler)  # type: ignore[arg-type,var-annotated]
        if fabric.setup_dataloaders(loader, use_distributed_sampler=False).sampler is not sampler:
            raise AssertionError
        fabric.setup_dataloaders(loader)


def rotate(setting: Setting, folder: str, options: dict[str, Any]) -> tuple[list[dict[str, bool]], str]:
    """Return the checkpoints at the begin of each step, of which one is kept, and an error.

    The writes of steps 4 and 6 of 8 are held back.
    """
    saves, holding = list[dict[str, bool]](), hold_writes()

    class Holder(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            saves.append(list_saves(folder))
            if trainer.global_step == 6:
                holding.__exit__(None, None, None)
                finish_writes()
                trainer.strategy.barrier()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                holding.__enter__()

    keep = ModelCheckpoint(folder, "{step}", save_top_k=1, every_n_train_steps=2)
    trained = train(setting, 8, default_on=options, enable_checkpointing=True, callbacks=[Holder(), keep])
    return [*saves, list_saves(folder)], trained.error
