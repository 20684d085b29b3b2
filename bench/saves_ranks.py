"""What ranks do in `saves.py`: an engine that saves in every way there is, and engines that resume."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import psutil
import torch
import torch.distributed as dist
from cold import list_files
from meters import AnonymousPeak
from peers import FlashSaver, Peer, TorchSaver, start_flash
from ranks import release_free_memory
from torch import nn

import deepspeed_ucp
import deepspeed_ucp.load.resume  # what a process's first load imports is not timed
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.saves.saver import finish_saves, keep_memory

WIDTH, ROWS = 2048, 8
Figures = dict[str, float]
"""By what was measured: seconds, or bytes."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and where.

    Attributes:
        memory: folder in memory; it may name variables.
        folder: on the disk.
        flash: folder that DLRover is installed in; empty: it is left out.
        run: a name that nothing else has.
        options: further ones of saves.
    """

    params_m: float
    rounds: int
    memory: str
    folder: str
    flash: str = ""
    run: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def universal(self) -> dict[str, Any]:
        return {"save": {"memory": self.memory, **self.options}}


def make_engine(params_m: float, stage: int, universal: Mapping[str, Any] | bool) -> Any:
    """An engine in bf16 over square layers, with torch's AdamW."""
    layers = max(1, round(params_m * 1e6 / WIDTH**2))
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    module = module.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1 / WIDTH)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"universal": universal},
    }
    return deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(module.parameters()), config=config)[0]


def run_passes(engine: Any, count: int) -> None:
    """Forward and backward passes of so many micro batches, the last one's with the reduction of gradients."""
    for number in range(count):
        engine.set_gradient_accumulation_boundary(number == count - 1)
        engine.backward(engine(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)).float().square().mean())


def list_state(engine: Any, *, weights: bool) -> list[torch.Tensor]:
    """This rank's masters and moments, and the 16-bit weights that it holds."""
    found = []
    for master, states in engine.optimizer.optimizer.state.items():
        found += [master, *(each for each in states.values() if each.dim())]
    if weights:
        found += [getattr(each, "ds_tensor", each) for each in engine.module.parameters()]
    return [each.detach() for each in found]


def timed(work: Callable[[], object]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def copy_state(engine: Any, *, weights: bool) -> tuple[float, float]:
    """Seconds of copying a rank's state into new memory, and into memory that was there before."""
    state, held = list_state(engine, weights=weights), list[torch.Tensor]()
    fresh = timed(lambda: held.extend(each.clone() for each in state))
    again = timed(lambda: [to.copy_(each) for to, each in zip(held, state, strict=True)])
    return fresh, again


def largest(value: float) -> float:
    """Of all ranks'."""
    told = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def on_first(work: Callable[[], object]) -> Callable[[], object]:
    """What only rank 0 does."""
    return work if dist.get_rank() == 0 else lambda: None


class Saves:
    """One engine, and each way to save it: fills `found` with what it has measured in a round."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.number, self.found = plan, 0, Figures()
        if plan.flash:
            start_flash(plan.flash, plan.run)
        self.engine = make_engine(plan.params_m, 1, plan.universal)
        for _ in range(2):  # the first ones find their memory
            run_passes(self.engine, 1)
            self.engine.step()
        self.kinds: list[Callable[[], None]] = [self.copy, self.own, self.ours]
        self.torch = TorchSaver(self.name_tensors, f"{plan.folder}/torch")
        self.kinds.append(lambda: self.peer("torch", self.torch))
        if plan.flash:
            flash = FlashSaver(self.engine, f"{plan.folder}/flash")
            self.kinds.append(lambda: self.peer("flash", flash))

    def run_round(self, number: int) -> Figures:
        """All kinds, in an order that is drawn for the round."""
        self.found = Figures()
        for kind in random.Random(number).sample(self.kinds, len(self.kinds)):
            kind()
            on_first(self.tidy)()
            dist.barrier()
        return self.found

    def tidy(self) -> None:
        """Nothing that a kind has written is left, or waits to go to the disk, when the next one begins."""
        for folder in Path(self.plan.folder).iterdir():
            shutil.rmtree(folder)
        os.sync()

    def note(self, name: str, work: Callable[[], object]) -> None:
        self.found[name] = timed(work)

    def next_tag(self) -> str:
        self.number += 1
        return f"step{self.number}"

    def name_tensors(self) -> dict[str, torch.Tensor]:
        rank = dist.get_rank()
        return {f"{rank}.{number}": each for number, each in enumerate(list_state(self.engine, weights=rank == 0))}

    # -- kinds

    def copy(self) -> None:
        _, self.found["copy"] = copy_state(self.engine, weights=dist.get_rank() == 0)

    def own(self) -> None:
        deepspeed_ucp.uninstall()
        try:
            self.note("own", lambda: self.engine.save_checkpoint(f"{self.plan.folder}/own", tag=self.next_tag()))
        finally:
            deepspeed_ucp.install()
        self.note("own sync", on_first(lambda: sync_files(f"{self.plan.folder}/own")))

    def peer(self, name: str, peer: Peer) -> None:
        """Its second save: the first one finds memory."""
        for _ in range(2):
            self.next_tag()
            self.note(name, lambda: peer.save(self.number))
            peer.finish()
            dist.barrier()
        peer.free()
        release_free_memory()

    def ours(self) -> None:
        """Two saves find memory, as the newest whole one stays while the next one is made."""
        place = f"{self.plan.folder}/ours"
        for _ in range(2):
            self.engine.save_checkpoint(place, tag=self.next_tag())
            finish_saves(self.engine)
        self.save_eagerly(place)
        self.copy_files()
        self.free()

    def save_eagerly(self, place: str) -> None:
        tag, writer = self.next_tag(), self.find_writer()
        seal = Path(place, tag, "ucp_seal.json")
        with AnonymousPeak() as own, AnonymousPeak(writer) as writers:
            self.note("eager", lambda: self.engine.save_checkpoint(place, tag=tag))
            self.note("durable", on_first(lambda: wait_for_file(seal)))
        self.found["extra"] = largest(own.peak - own.before)
        self.found["writer"] = largest(writers.peak if dist.get_rank() == 0 else 0)
        finish_saves(self.engine)

    def find_writer(self) -> int | str:
        """The number of the writer's process, on rank 0."""
        job = find_state(self.engine).saver.job.folder
        found = (each.pid for each in psutil.process_iter(["cmdline"]) if job in (each.info["cmdline"] or ()))
        return next(found) if dist.get_rank() == 0 else "self"

    def copy_files(self) -> None:
        """What was saved last, from memory to the disk."""
        folder, to = find_state(self.engine).saver.folder, f"{self.plan.folder}/cp"

        def copy() -> None:
            subprocess.run(["cp", "-r", folder, to], check=True)
            sync_files(to)

        self.note("cp", on_first(copy))

    def free(self) -> None:
        """Give the memory of our saves back."""
        if dist.get_rank() == 0:
            job = find_state(self.engine).saver.job
            for save in job.list_saves():
                save.remove()
            shutil.rmtree(job.spare, ignore_errors=True)
        release_free_memory()


def measure_saves(plan: Plan) -> list[Figures]:
    """Measure all kinds of saves, by round."""
    saves = Saves(plan)
    found = [saves.run_round(number) for number in range(plan.rounds)]
    if saver := find_state(saves.engine).saver:
        saver.close()
    saves.torch.close()
    saves.engine.destroy()
    return found


# -- resumes


def save_once(plan: Plan) -> None:
    """Leave a save in memory, and on the disk."""
    engine = make_engine(plan.params_m, 1, plan.universal)
    run_passes(engine, 1)
    engine.step()
    engine.save_checkpoint(plan.folder)
    finish_saves(engine)
    keep_memory()  # for the resumes
    find_state(engine).saver.close()
    engine.destroy()


def resume(plan: Plan, stage: int, *, cold: bool = False) -> Figures:
    """What a load takes, from memory or from the disk, and a copy of what it fills.

    Raises:
        RuntimeError: it came from elsewhere.
    """
    engine = make_engine(plan.params_m, stage, True if cold else plan.universal)
    release_free_memory()
    found: list[Any] = []
    seconds = timed(lambda: found.append(engine.load_checkpoint(plan.folder)[0]))
    if not found[0] or found[0].startswith(plan.folder) is not cold or engine.global_steps != 1:
        raise RuntimeError(f"loaded {found[0]} of step {engine.global_steps}")
    read = sum(count for path, (count, _) in engine.ucp_report.files.items() if path.startswith(plan.folder))
    fresh, again = copy_state(engine, weights=True)
    engine.destroy()
    return {"seconds": seconds, "storage": float(read), "fresh": fresh, "again": again}


def on_node(work: Callable[..., Any], memory: str, *args: Any, **options: Any) -> Any:
    """`work` as if every rank were a node of its own, whose memory is another folder."""
    node = os.path.join(memory, f"node{dist.get_rank()}")
    with mock.patch.dict(os.environ, LOCAL_RANK="0", NODE_MEMORY=node):
        return work(*args, **options)


# -- files


def sync_files(folder: str) -> None:
    subprocess.run(["sync", *map(str, list_files(Path(folder)))], check=True)


def wait_for_file(file: Path) -> None:
    while not file.exists():
        time.sleep(0.002)
