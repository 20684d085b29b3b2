"""Cases in which plain DeepSpeed resumes wrongly or fails in an unchanged topology, and the plugin's result.

    make proofs                        all cases
    make proofs CASES="tag muon"       some of them

Two ranks train a small model, save, and continue; a resume must reproduce these losses. Then they create the engine
again with other weights and resume, once with plain DeepSpeed and once with ``"universal": true``. NVMe needs
DeepSpeed's ``async_io`` operator, which is compiled with libaio's headers (Debian: ``libaio-dev``).
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch import Tensor, nn

import deepspeed_ucp  # noqa: F401 - enables the plugin if the ds_config asks for it

RANKS, BATCH, WIDTH = 2, 8, 16
BEFORE = 3
"""Optimizer steps before the save."""

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
MUON = {"type": "Muon", "params": {"lr": 0.02, "muon_lr": 0.05, "momentum": 0.9}}
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}


@dataclass(frozen=True)
class Case:
    """An engine, the change of its script, and the arguments of its load.

    Attributes:
        description: text for the output.
        config: ds_config.
        reordered: the resuming script defines two layers of equal shapes in another order.
        scheduler: the script passes a scheduler that keeps a reference to ``optimizer.param_groups``.
        arguments: arguments of ``load_checkpoint``.
        after: number of compared steps.
        needs_aio: needs the operator ``async_io``.
    """

    description: str
    config: dict[str, Any]
    reordered: bool = False
    scheduler: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    after: int = 3
    needs_aio: bool = False


def make_cases(nvme: str) -> dict[str, Case]:
    """All cases by name; swap files go to the folder ``nvme``."""
    swapped = {**ZERO3, "offload_optimizer": {"device": "nvme", "nvme_path": nvme}}
    muon = {**ZERO3, "reduce_scatter": False, "save_muon_momentum_buffer_in_memory": True}
    writer = {"writer": {"type": "python", "data_parallel": "replica"}}  # the other type needs a GPU
    return {
        "nvme": Case(
            "ZeRO 3, optimizer states on NVMe",
            {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "zero_optimization": swapped},
            needs_aio=True,
        ),
        "muon": Case(
            "ZeRO 3, Muon's momentum in memory",
            {"optimizer": MUON, "zero_optimization": muon, "bf16": {"enabled": True}},
        ),
        "writer": Case(
            "ZeRO 1, checkpoint.writer",
            {"optimizer": ADAM, "zero_optimization": {"stage": 1}, "checkpoint": writer},
        ),
        "tag": Case(  # one step, since the optimizer is fresh
            "ZeRO 3, the weights of an earlier tag",
            {"optimizer": ADAM, "zero_optimization": ZERO3},
            arguments={"tag": "first", "load_optimizer_states": False},
            after=1,
        ),
        "reordered": Case(
            "stage 0, layers defined in another order",
            {"optimizer": ADAM, "zero_optimization": {"stage": 0}},
            reordered=True,
        ),
        "scheduler": Case(
            "ZeRO 1, a scheduler that keeps optimizer.param_groups",
            {"optimizer": ADAM, "zero_optimization": {"stage": 1}},
            scheduler=True,
        ),
    }


class Scheduler:
    """Halves the learning rates in each step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = optimizer.param_groups

    def step(self) -> None:
        for group in self.groups:
            group["lr"] /= 2

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.groups]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the rates are the optimizer's."""


class Model(nn.Module):
    """Two layers of equal shapes, and a last one."""

    def __init__(self, *, reordered: bool) -> None:
        super().__init__()
        for name in ("second", "first") if reordered else ("first", "second"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


def make_engine(case: Case, *, seed: int, universal: bool, reordered: bool = False) -> Any:
    torch.manual_seed(seed)
    model = Model(reordered=reordered)
    checkpoint = {**case.config.get("checkpoint", {}), **({"universal": True} if universal else {})}
    config = {"train_batch_size": BATCH, **case.config, "checkpoint": checkpoint}
    schedule = Scheduler if case.scheduler else None
    parameters = model.parameters()
    return deepspeed.initialize(model=model, model_parameters=parameters, lr_scheduler=schedule, config=config)[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Train for some steps; return the losses over all ranks."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(BATCH // RANKS, WIDTH, generator=torch.Generator().manual_seed(step * RANKS + dist.get_rank()))
        output = engine(x.to(next(engine.module.parameters()).dtype)).float()
        loss = (output - x.sum(1, keepdim=True).sin()).pow(2).mean()
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / RANKS)
    return losses


def save_and_continue(case: Case, folder: str) -> list[float]:
    """Save twice. Return the losses between both saves, which a resume from the first must reproduce."""
    engine = make_engine(case, seed=0, universal=False)
    train(engine, 0, BEFORE)
    engine.save_checkpoint(folder, tag="first")
    losses = train(engine, BEFORE, case.after)
    if "tag" in case.arguments:  # make another tag the latest
        train(engine, BEFORE + case.after, BEFORE)
        engine.save_checkpoint(folder, tag="latest_one")
    engine.destroy()
    return losses


def resume(case: Case, folder: str, *, universal: bool) -> list[float] | str:
    """Return the losses of a resumed run, or a description of its failure."""
    engine = make_engine(case, seed=1, universal=universal, reordered=case.reordered)
    try:
        path, _ = engine.load_checkpoint(folder, **case.arguments)
    except Exception as error:  # noqa: BLE001 - the error is the result
        return f"fails: {str(error).splitlines()[0]:.90}"
    if path is None:
        return "finds no checkpoint"
    losses = train(engine, BEFORE, case.after)
    engine.destroy()
    return losses


def describe(result: list[float] | str, expected: list[float]) -> str:
    if isinstance(result, str):
        return result
    text = " ".join(f"{loss:.6f}" for loss in result)
    return f"{text} {'the same' if result == expected else 'WRONG'}"


def work(names: list[str], folder: str) -> None:
    """Run the cases on a rank."""
    deepspeed.init_distributed("gloo")
    logging.getLogger("deepspeed_ucp").setLevel(logging.ERROR)
    show: Callable[[str], None] = print if dist.get_rank() == 0 else lambda _: None
    cases = make_cases(os.path.join(folder, "nvme"))
    for name in names or cases:
        case, saves = cases[name], os.path.join(folder, name)
        show(f"\n{name}: {case.description}")
        if case.needs_aio and not AsyncIOBuilder().is_compatible(verbose=False):
            show("  left out: DeepSpeed's operator async_io cannot be built here (Debian: apt-get install libaio-dev)")
            continue
        expected = save_and_continue(case, saves)
        show(f"  not interrupted     {' '.join(f'{loss:.6f}' for loss in expected)}")
        for label, universal in (("plain DeepSpeed", False), ("with deepspeed_ucp", True)):
            show(f"  {label:19} {describe(resume(case, saves, universal=universal), expected)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*make_cases(""), []], metavar="CASE")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        work(options.cases, options.folder)
        return 0
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", __file__, *options.cases]
    # The fast writer needs the number of machines and this one's; torchrun does not set them.
    environment = {"OMP_NUM_THREADS": "1", "CROSS_SIZE": "1", "CROSS_RANK": "0", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, "--folder", folder]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
