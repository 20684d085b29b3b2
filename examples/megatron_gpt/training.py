"""Engines for the GPT in any topology, and a training step with equal results in all of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from gpt import GPT, make_pipeline
from metadata import megatron_arguments, universal_checkpoint_info
from parallel import ParallelState
from text import draw_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from config import Degrees, GPTConfig


class Trainer:
    """An engine and its training on the text.

    Collective: all ranks create it and call its methods together.

    Args:
        config: the model.
        degrees: the topology.
        ds_config: DeepSpeed's configuration as a dict.

    Attributes:
        engine: DeepSpeed's engine.
        parallel: this rank's groups.
    """

    def __init__(self, config: GPTConfig, degrees: Degrees, ds_config: Mapping[str, Any]) -> None:
        stage = ds_config.get("zero_optimization", {}).get("stage", 0)
        degrees.check(config, stage)
        self.config, self.degrees = config, degrees
        self.parallel = ParallelState(degrees.tp, degrees.pp, degrees.sp, degrees.ep)
        mpu = None if degrees.pipeline or config.deepspeed_moe else self.parallel.make_mpu()
        if degrees.pipeline:
            model: torch.nn.Module = make_pipeline(config, self.parallel, degrees.partition_method)
        else:
            with zero_init(stage, ds_config, mpu):
                model = GPT(config, self.parallel)
        decay = ds_config.get("optimizer", {}).get("params", {}).get("weight_decay", 0.0)
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=group_parameters(model, decay), config=dict(ds_config), mpu=mpu
        )

    @property
    def step(self) -> int:
        """Optimizer steps taken so far, those before a resume included."""
        return int(self.engine.global_steps)

    def train_step(self, order: torch.Tensor | None = None) -> float:
        """Take one optimizer step; return the loss over the whole global batch.

        Args:
            order: a permutation of the batch's samples. It only changes the order in which numbers are summed.
        """
        samples = draw_batch(self.config.seed, self.step + 1, self.engine.train_batch_size(), self.config.context)
        mine = (samples if order is None else samples[order]).chunk(self.parallel.data.size)[self.parallel.data.rank]
        micros = mine.split(self.engine.train_micro_batch_size_per_gpu())
        pairs = [(micro[:, :-1], micro[:, 1:]) for micro in micros]
        if self.degrees.pipeline:
            return float(self.engine.train_batch(iter(pairs)))
        return self._train_plain(pairs)

    def _train_plain(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        total = torch.zeros((), dtype=torch.float64)
        line = self.parallel.sequence
        for pair in pairs:
            tokens, labels = (part.chunk(line.size, 1)[line.rank].to(self.engine.device) for part in pair)
            loss = self.engine(tokens, labels)
            self.engine.backward(loss / self._loss_divisor())
            self.engine.step()
            total += loss.detach().double().cpu() / len(pairs)
        total = total.to(self.engine.device)
        dist.all_reduce(total, group=self.parallel.sequence_data.group)
        return total.item() / self.parallel.sequence_data.size

    def _loss_divisor(self) -> int:
        """Return the divisor of the loss that makes reduced gradients a mean over the sequence.

        DeepSpeed averages over data-parallel ranks and sums over sequence-parallel ones; ZeRO 3's reduce-scatter (its
        default) averages over both.
        """
        zero = self.engine.zero_optimization_stage() == 3 and self.engine.zero_reduce_scatter()
        return 1 if zero else self.parallel.sequence.size

    def save(self, directory: str) -> None:
        """Save a checkpoint with the client state that Megatron-DeepSpeed gives it."""
        self.engine.save_checkpoint(directory, client_state=self.make_client_state())

    def load(self, directory: str) -> bool:
        """Resume from `directory`. Return False if it has no checkpoint."""
        path, _ = self.engine.load_checkpoint(directory)
        return path is not None

    def make_client_state(self) -> dict[str, Any]:
        """Return the client state of Megatron-DeepSpeed's `checkpointing.py`."""
        state = {
            "args": megatron_arguments(self.config, self.degrees),
            "iteration": self.step,
            "checkpoint_version": 3.0,
        }
        if not self.config.deepspeed_moe:  # DeepSpeed reserves the key there, and no tensor is cut
            state["universal_checkpoint_info"] = universal_checkpoint_info(self.config, self.degrees)
        return state


def zero_init(stage: int, ds_config: Mapping[str, Any], mpu: Any) -> Any:
    """Partition the model while it is built at ZeRO 3, over the ranks of sequence and data parallelism."""
    if stage < 3:
        return nullcontext()
    group = mpu.get_sequence_data_parallel_group()
    return deepspeed.zero.Init(data_parallel_group=group, config_dict_or_path=dict(ds_config), mpu=mpu)


def group_parameters(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return Megatron's two param groups: matrices, and vectors without decay. A stage may have only one of them.

    DeepSpeed needs their names to separate experts.
    """
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[len(getattr(parameter, "ds_shape", parameter.shape)) > 1].append(parameter)
    return [
        {"params": parameters, "weight_decay": decay if wide else 0.0, "name": "matrices" if wide else "vectors"}
        for wide, parameters in groups.items()
        if parameters
    ]
