"""What the ranks do in the tests of Hugging Face's Trainer. Imported on the ranks only."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from trainers_gloo import choose_gloo
from trainers_references import MovesBetas

from deepspeed_ucp import preemption

FEATURES = 11


class Net(torch.nn.Module):
    """Notes the samples that it is trained on, of which it takes at most ``most`` at once."""

    most = 1 << 30

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(FEATURES, 17)
        self.head = torch.nn.Linear(17, 1)
        self.dropout = torch.nn.Dropout(0.0)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            if len(number) > self.most:
                raise RuntimeError("CUDA out of memory.")
            self.seen.extend(number.tolist())
        made = self.head(self.dropout(torch.tanh(self.base(x.to(self.head.weight.dtype))))).squeeze(-1).float()
        return {"loss": (made - labels).square().mean(), "logits": made}


class Means(Net):
    """Takes any keyword, and looks at none, as T5 does."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return super().forward(x, labels, number)


class Sums(Net):
    """Divides by the number of items in a step, as causal language models do."""

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor, **told: Any
    ) -> dict[str, torch.Tensor]:
        made = super().forward(x, labels, number)
        items = told.get("num_items_in_batch")
        assert items is None or not isinstance(items, int)
        return made if items is None else {**made, "loss": made["loss"] * len(labels) / items.to(labels.device)}


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Drawn by their number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        drawn = torch.randn(FEATURES + 1, generator=torch.Generator().manual_seed(number))
        return {"x": drawn[:FEATURES], "labels": drawn[FEATURES], "number": number}


@dataclass
class Trained:
    """One rank's part of a run.

    Attributes:
        samples: of every step.
        log: what the trainer logged, of all steps.
        random: by step a digest of the random states with which it began.
        weights: at the end, those that are trained.
        sizes: per-device batch, accumulation, the engine's total batch.
        best: the checkpoint that was the best one.
        judged: by step the evaluation's loss.
        warnings: of the plugin, on this rank.
        folders: checkpoints that were there as a step ended, and whether the engine's state was in them.
        code: with which it ended before its time.
    """

    samples: dict[int, list[int]] = field(default_factory=dict)
    log: dict[int, dict[str, float]] = field(default_factory=dict)
    random: dict[int, str] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    best: str | None = None
    judged: dict[int, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    folders: list[dict[str, bool]] = field(default_factory=list)
    code: object = None


def make_notes(net: Net, told: Trained, stop: int | None) -> Any:
    """A callback that fills in what a rank tells, and ends the run where it is to be interrupted."""
    from transformers import TrainerCallback

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.manual_seed(100 + args.process_index)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            states = (random.getstate(), torch.get_rng_state().tolist())
            told.random[state.global_step + 1] = hashlib.sha256(repr(states).encode()).hexdigest()
            net.seen.clear()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            told.samples[state.global_step] = list(net.seen)
            control.should_training_stop |= state.global_step == stop

    return Notes()


def make_follower(trainer: Any, folder: str, told_at: int) -> Any:
    """A callback that has this package save on SIGTERM, which comes in a step."""
    from transformers import TrainerCallback

    class Follower(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            preemption.follow(trainer.deepspeed, folder)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step + 1 == told_at:
                os.kill(os.getpid(), signal.SIGTERM)

    return Follower()


def train(
    folder: str,
    ds_config: dict[str, Any],
    *,
    resume: str | bool | None = None,
    stop: int | None = None,
    size: int = 40,
    lora: bool = False,
    model: str = "Net",
    most: int = 1 << 30,
    held: tuple[int, ...] = (),
    told_at: int | None = None,
    betas: bool = False,
    **options: Any,
) -> Trained:
    """A run of the Trainer: three epochs by default; each step is logged.

    Args:
        model: name of its class.
        most: samples for which a rank has memory.
        held: from and to which step nothing is written from memory; what is held at the end is lost.
        told_at: step in which this rank is told to go, and saves to ``folder/preempted``.
        betas: with a scheduler that holds references to param groups, and moves their betas.
    """
    told = Trained()
    with (
        choose_gloo(),
        listen(told.warnings),
        mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True),
    ):
        from transformers import Trainer, TrainingArguments

        torch.manual_seed(5)
        net: Net = globals()[model]()
        net.most, adapted = most, None
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        if lora:
            from peft import LoraConfig, get_peft_model

            adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["base"]))
        chosen: dict[str, Any] = {
            "num_train_epochs": 3,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "remove_unused_columns": False,
            "disable_tqdm": True,
            "seed": 3,
            **options,
        }
        args = TrainingArguments(output_dir=folder, deepspeed=ds_config, **chosen)

        class MovingBetas(Trainer):  # type: ignore[misc]
            def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
                self.lr_scheduler, self._created_lr_scheduler = MovesBetas(optimizer or self.optimizer), True
                return self.lr_scheduler

        trainer = (MovingBetas if betas else Trainer)(
            model=adapted or net,
            args=args,
            train_dataset=Samples(size),
            eval_dataset=Samples(8),
            callbacks=[make_notes(net, told, stop)],
        )
        holder = None
        if held:
            from trainers_held import make_holder

            holder = make_holder(folder, held, told.folders)
            trainer.add_callback(holder)
        if told_at is not None:
            trainer.add_callback(make_follower(trainer, f"{folder}/preempted", told_at))
        try:
            trainer.train(resume_from_checkpoint=resume)
        except SystemExit as end:
            told.code = end.code
            trainer.deepspeed.destroy()
            return told
        if holder is not None:
            holder.lose()
        told.log = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
        told.judged = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        engine = trainer.deepspeed
        told.sizes = (args.per_device_train_batch_size, args.gradient_accumulation_steps, engine.train_batch_size())
        told.best, told.weights = trainer.state.best_model_checkpoint, gather_weights(engine)
        engine.destroy()
    return told


@contextmanager
def listen(warnings: list[str]) -> Iterator[None]:
    """Note what the plugin warns of."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logger, notes = logging.getLogger("deepspeed_ucp"), Notes(logging.WARNING)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)


def gather_weights(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    named = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    with deepspeed.zero.GatheredParameters([param for _, param in named]):
        return {name: param.detach().clone() for name, param in named}


def attempt(*args: Any, **options: Any) -> tuple[str, str]:
    """The error of a run, or two empty strings."""
    try:
        train(*args, **options)
    except Exception as error:  # noqa: BLE001 - the error is what the test looks at
        return type(error).__name__, str(error)
    return "", ""
