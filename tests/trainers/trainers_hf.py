"""Functions of the tests of Hugging Face's Trainer that run on the ranks. Imported on the ranks only."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
import trainers_common
from trainers_common import choose_gloo, finish_writes, gather_weights, hold_writes, list_saves, listen

from deepspeed_ucp import preemption
from deepspeed_ucp.saves.saver import list_savers

FEATURES = 11


class Net(torch.nn.Module):
    """Records its training samples; more than ``most`` in a micro batch are an out-of-memory error."""

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
    """Accepts and ignores any keyword, like T5."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return super().forward(x, labels, number)


class Sums(Net):
    """Divides by the number of items in a step, like causal language models."""

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor, **options: Any
    ) -> dict[str, torch.Tensor]:
        made = super().forward(x, labels, number)
        items = options.get("num_items_in_batch")
        assert items is None or not isinstance(items, int)
        return made if items is None else {**made, "loss": made["loss"] * len(labels) / items.to(labels.device)}


def make_samples(size: int) -> Any:
    drawn = [torch.randn(FEATURES + 1, generator=torch.Generator().manual_seed(number)) for number in range(size)]
    return [{"x": each[:FEATURES], "labels": each[FEATURES], "number": number} for number, each in enumerate(drawn)]


@dataclass
class Trained(trainers_common.Trained):
    """One rank's part of a run.

    Attributes:
        epochs: step → epochs at its end.
        random: step → digest of the random states at its begin.
        sizes: per-device batch, accumulation, total batch of the engine.
        judged: step → loss of the evaluation.
        folders: checkpoints at the begin of each step, and whether the engine's state is complete.
        code: exit code, if the run has exited early.
    """

    epochs: dict[int, float] = field(default_factory=dict)
    random: dict[int, str] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    best: str | None = None
    judged: dict[int, float] = field(default_factory=dict)
    folders: list[dict[str, bool]] = field(default_factory=list)
    code: object = None


def make_notes(
    net: Net, record: Trained, folder: str, stop: int | None, held: tuple[int, ...], signal_at: int | None
) -> Any:
    """Make a callback that records the run of a rank, ends it, delays its writes, and sends SIGTERM in a step."""
    from transformers import TrainerCallback

    class Notes(TrainerCallback):  # type: ignore[misc]
        trainer: Any = None
        holding: Any = None

        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            torch.manual_seed(100 + args.process_index)
            if signal_at is not None:
                preemption.follow(self.trainer.deepspeed, f"{folder}/preempted")

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            states = (random.getstate(), torch.get_rng_state().tolist())
            record.random[state.global_step + 1] = hashlib.sha256(repr(states).encode()).hexdigest()
            record.folders.append(list_saves(folder))
            net.seen.clear()
            if state.global_step + 1 == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if self.holding is not None and state.global_step == held[-1]:
                self.holding.__exit__(None, None, None)
                self.holding = None
                finish_writes()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record.samples[state.global_step] = list(net.seen)
            control.should_training_stop |= state.global_step == stop
            if held and state.global_step == held[0]:
                self.holding = hold_writes()
                self.holding.__enter__()

    return Notes()


def lose_saves(holding: Any) -> None:
    """Simulate the loss of the machine with its pending saves."""
    if holding is not None:
        for saver in list_savers():
            shutil.rmtree(saver.job.folder, ignore_errors=True)
        holding.__exit__(None, None, None)


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
    signal_at: int | None = None,
    **options: Any,
) -> Trained:
    """Run the Trainer, by default for three epochs.

    Args:
        most: samples that fit into the memory of a rank.
        held: first and last step between which writes are held back; if the run ends in between, they are lost.
        signal_at: step in which this rank gets SIGTERM; it saves to ``folder/preempted``.
    """
    record = Trained()
    with choose_gloo(), listen(record.warnings):
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
        notes = make_notes(net, record, folder, stop, held, signal_at)
        data = {"train_dataset": make_samples(size), "eval_dataset": make_samples(8)}
        trainer = notes.trainer = Trainer(model=adapted or net, args=args, callbacks=[notes], **data)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except SystemExit as end:
            record.code = end.code
            trainer.deepspeed.destroy()
            return record
        lose_saves(notes.holding)
        history = trainer.state.log_history
        for name, values in (("learning_rate", record.rates), ("epoch", record.epochs), ("loss", record.losses)):
            values.update({entry["step"]: entry[name] for entry in history if "loss" in entry})
        record.judged = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
        engine = trainer.deepspeed
        record.sizes = (args.per_device_train_batch_size, args.gradient_accumulation_steps, engine.train_batch_size())
        record.best, record.weights = trainer.state.best_model_checkpoint, gather_weights(engine)
        engine.destroy()
    return record
