"""Functions of the tests of trainers with FSDP that run on the ranks. Imported on the ranks only.

FSDP2 runs on gloo. So does FSDP1 under Accelerate except for FULL_STATE_DICT, where a hook of torch ends the process
(``_state_dict_utils.py``, ``param_hook``), and under Lightning if the module wraps itself. The Trainer refuses FSDP1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from trainers_common import choose_gloo, make_config

from tests.support import fsdp_run
from tests.support.engines.cases import Case
from tests.support.engines.letters import group
from tests.support.engines.ranks import listen


@contextmanager
def choose(how: str) -> Iterator[None]:
    """Choose gloo; at the end restore the environment, which Accelerate changes."""
    with mock.patch.dict(os.environ), choose_gloo("MULTI_CPU" if how == "deepspeed" else "MULTI_GPU"):
        yield


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step)).unbind()
    return x, y[:, :5]


# -- Accelerate -------------------------------------------------------------------------------------------------------


def accelerate(
    how: str, steps: range, *, load: str = "", save: str = "", warm: bool = False
) -> tuple[list[float], list[float], int]:
    """Train in a loop under Accelerate; return the losses, the final rates and the first random number.

    Args:
        how: ``deepspeed``, or the version of FSDP and the kind of its state dicts.
        warm: take a step before the load, so that the optimizer has states.
    """
    with choose(how):
        accelerator = _make_accelerator(how)
        net, optimizer = fsdp_run.build(seed=1 if load else 0)
        prepared = accelerator.prepare(net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
        if warm:
            _step(accelerator, *prepared, step=100)
        if load:
            accelerator.load_state(load)
        drawn = int(torch.randint(1 << 30, (1,)))
        losses = [_step(accelerator, *prepared, step=step) for step in steps]
        if save:
            torch.manual_seed(dist.get_rank() + 11)
            accelerator.save_state(save)
        rates = [group["lr"] for group in prepared[1].param_groups]
        if how == "deepspeed":
            prepared[0].destroy()
    return losses, rates, drawn


def _make_accelerator(how: str) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin

    if how == "deepspeed":
        sizes = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        plugin = DeepSpeedPlugin(hf_ds_config=make_config(2, **sizes, zero_allow_untested_optimizer=True))
        return Accelerator(deepspeed_plugin=plugin, step_scheduler_with_optimizer=False)
    version, kind = how.split()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(version),
        state_dict_type=f"{kind}_STATE_DICT",
        cpu_ram_efficient_loading=False,
        use_orig_params=True if version == "1" else None,
    )
    return Accelerator(fsdp_plugin=plugin, step_scheduler_with_optimizer=False)


def _step(accelerator: Any, net: Any, optimizer: Any, scheduler: Any, *, step: int) -> float:
    x, y = batch(step)
    loss = (net(x) - y).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return float(loss.item())


# -- Hugging Face's Trainer -------------------------------------------------------------------------------------------


def make_llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


def make_adapted() -> Any:
    """Make `make_llama`'s model with an adapter that also trains a whole module."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["model.norm"])
    return get_peft_model(make_llama(), config)


def train(
    how: str, folder: str, *, steps: int, save: int = 0, resume: str | None = None, lora: bool = False
) -> dict[int, float]:
    """Run the Trainer with four samples a step; return the losses by step.

    Args:
        how: ``deepspeed``, or FSDP2's kind of state dicts.
        save: step after which to save.
    """
    from transformers import Trainer, TrainingArguments

    with choose(how):
        fsdp = {"version": 2, "state_dict_type": f"{how}_STATE_DICT", "cpu_ram_efficient_loading": False}
        chosen: dict[str, Any] = {"fsdp": True, "fsdp_config": fsdp}
        if how == "deepspeed":
            chosen = {"deepspeed": make_config(2, gradient_clipping=1.0)}
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            save_strategy="steps" if save else "no",
            save_steps=save or 1,
            per_device_train_batch_size=4 // dist.get_world_size(),
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **chosen,
        )
        drawn = [torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(number)) for number in range(64)]
        data: Any = [{"input_ids": each, "labels": each} for each in drawn]
        trainer = Trainer(model=make_adapted() if lora else make_llama(), args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        if how == "deepspeed":
            trainer.deepspeed.destroy()
    return losses


@dataclass(frozen=True)
class LlamaCase(Case):
    """An engine of `make_llama`."""

    def make(self, seed: int) -> Any:
        model = make_llama(seed)
        optimizer = torch.optim.AdamW(group(model), lr=1e-2)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=self.ds_config)[0]


# -- Lightning --------------------------------------------------------------------------------------------------------


def fit(how: str, folder: str, *, steps: int = 3, load: str | None = None) -> list[float]:
    """Train under Lightning up to a step, and save; return the losses.

    Args:
        how: ``1`` for FSDPStrategy, ``2`` for ModelParallelStrategy, or ``deepspeed``.
        folder: of the save; empty for none.
    """
    import lightning.pytorch as pl
    import trainers_lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = fsdp_run.build()

        def configure_model(self) -> None:
            self.net = _shard(self.net, how, self.device_mesh)

        def training_step(self, _: Any, number: int) -> torch.Tensor:
            x, y = batch(number)
            loss = (self.net(x) - y).square().mean()
            losses.append(float(loss.item()))
            return loss

        def configure_optimizers(self) -> Any:
            named = list(self.net.named_parameters())  # parameters of FSDP1 have one dimension
            decayed = [param for name, param in named if "norm" not in name and name.endswith("weight")]
            others = [param for name, param in named if "norm" in name or name.endswith("bias")]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(list(range(16)), batch_size=2)

    with (
        mock.patch.dict(os.environ, GROUP_RANK="0", TORCHELASTIC_RUN_ID="x"),
        trainers_lightning._choose_cpu(True) if how == "deepspeed" else nullcontext(),
    ):
        trainer = trainers_lightning.make_trainer(_make_strategy(how), TorchElasticEnvironment(), max_steps=steps)
        trainer.fit(Module(), ckpt_path=load, weights_only=False)
        if folder:
            trainer.save_checkpoint(folder)
    return losses


def _make_strategy(how: str) -> Any:
    import trainers_lightning
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

    class OnCpu(FSDPStrategy):
        """A subclass, because Lightning refuses `FSDPStrategy` itself on CPUs."""

    if how == "deepspeed":
        return trainers_lightning.make_strategy(DeepSpeedStrategy, 2, 2)
    if how == "1":
        return OnCpu(state_dict_type="sharded", process_group_backend="gloo")
    return ModelParallelStrategy(process_group_backend="gloo")


def _shard(net: Any, how: str, mesh: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if how == "2":
        fully_shard(net, mesh=mesh["data_parallel"])
    elif how == "1" and not isinstance(net, FullyShardedDataParallel):
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return net


# -- Every trainer with every format ----------------------------------------------------------------------------------


def attempt_all(trainer: str, folders: list[str], **options: Any) -> list[tuple[Any, list[str]]]:
    """Resume under DeepSpeed from each folder; return the results or errors, and the logs."""
    found = list[tuple[Any, list[str]]]()
    for folder in folders:
        with listen() as heard:
            try:
                result = _RESUMES[trainer](folder, **options)
            except Exception as error:  # noqa: BLE001 - the error is what the test looks at
                result = f"{type(error).__name__}: {error}"
        found.append((result, [text for _, text in heard]))
    return found


_RESUMES: dict[str, Any] = {
    "trainer": lambda folder, **options: train("deepspeed", f"{folder}-out", steps=4, resume=folder, **options),
    "accelerate": lambda folder: accelerate("deepspeed", range(3, 5), load=folder),
    "lightning": lambda folder: fit("deepspeed", "", steps=5, load=folder),
}
