"""Functions of the ranks in `saves.py`: an engine that saves in every way, and engines that resume."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from engines import Engine
from meters import release_free_memory, watch_anonymous
from torch.distributed.checkpoint import _async_process_executor, async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import deepspeed_ucp
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.saves.saver import finish_saves, keep_memory

Figures = dict[str, float]
"""Seconds or bytes, by name."""


@dataclass(frozen=True)
class Plan:
    """The size of a measurement and its folders: in memory, and on the disk."""

    params_m: float
    rounds: int
    memory: str
    folder: str

    def make_engine(self, stage: int, *, with_memory: bool = True) -> Any:
        """Make a trained engine in bf16 at ZeRO 1, or an untrained one to resume."""
        universal = {"save": {"memory": self.memory}} if with_memory else True
        return Engine(dist.get_world_size(), stage, {"universal": universal}).make(self.params_m, trains=True)


def measure(work: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done the work (collective)."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def run_on_first(work: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        work()


def wait_for_file(file: Path) -> None:
    while not file.exists():
        time.sleep(0.002)


def list_state(engine: Any, *, with_weights: bool) -> list[torch.Tensor]:
    """List this rank's masters and moments, and its 16-bit weights."""
    state = []
    for master, states in engine.optimizer.optimizer.state.items():
        state += [master, *(each for each in states.values() if each.dim())]
    if with_weights:
        state += [getattr(each, "ds_tensor", each) for each in engine.module.parameters()]
    return [each.detach() for each in state]


def copy_state(engine: Any, *, with_weights: bool) -> float:
    """Copy a rank's state into memory that is in use; return the seconds (collective)."""
    state = list_state(engine, with_weights=with_weights)
    copies = [each.clone() for each in state]
    return measure(lambda: [copy.copy_(each) for copy, each in zip(copies, state, strict=True)])


class Saves:
    """One engine, and the ways to save it; each method adds its figures of the round to `figures`."""

    def __init__(self, plan: Plan) -> None:
        self.folder, self.number, self.figures = plan.folder, 0, Figures()
        made = plan.make_engine(1)
        self.engine = made.engine
        for _ in range(2):  # the first steps allocate memory
            made.step()

    def run_round(self, number: int) -> Figures:
        """Run all methods in an order that is drawn for the round; each starts without files of the others."""
        self.figures = Figures()
        methods = [self.copy, self.save_by_deepspeed, self.save, self.save_by_torch]
        for method in random.Random(number).sample(methods, len(methods)):
            method()
            run_on_first(self._remove_files)
            dist.barrier()
        return self.figures

    def _remove_files(self) -> None:
        for folder in Path(self.folder).iterdir():
            shutil.rmtree(folder)
        os.sync()

    def _save_checkpoint(self, name: str) -> Path:
        self.number += 1
        self.engine.save_checkpoint(f"{self.folder}/{name}", tag=f"step{self.number}")
        return Path(self.folder, name, f"step{self.number}")

    def copy(self) -> None:
        self.figures["copy"] = copy_state(self.engine, with_weights=dist.get_rank() == 0)

    def save_by_deepspeed(self) -> None:
        deepspeed_ucp.uninstall()
        try:
            saved = measure(lambda: self._save_checkpoint("deepspeed"))
        finally:
            deepspeed_ucp.install()
        self.figures["deepspeed"] = saved + measure(lambda: run_on_first(os.sync))

    def save_by_torch(self) -> None:
        """Measure the second `async_save` of torch; the first one allocates memory.

        This is its fastest configuration: a process, and shared memory that is kept. By default it stages each save
        into new memory, and copies that again for its process.
        """
        rank, kind = dist.get_rank(), AsyncCheckpointerType.PROCESS
        tensors = list_state(self.engine, with_weights=rank == 0)
        state = {f"{rank}.{number}": tensor for number, tensor in enumerate(tensors)}
        stager = DefaultStager(StagingOptions(False, True, False, False))
        for number in range(2):
            options = {"checkpoint_id": f"{self.folder}/torch{number}", "async_checkpointer_type": kind}
            pending = list[Any]()
            self.figures["torch"] = measure(
                lambda pending=pending, options=options: pending.append(
                    async_save(dict(state), **options, async_stager=stager)
                )
            )
            pending[0].result()
            dist.barrier()
        stager.close()
        _async_process_executor._CHECKPOINT_PROCESS = None  # ends the process
        release_free_memory()

    def save(self) -> None:
        """Measure the third save: two allocate memory, as the last complete save stays during the next one."""
        for _ in range(2):
            self._save_checkpoint("ours")
            finish_saves(self.engine)
        folders = list[Path]()
        with watch_anonymous() as own, watch_anonymous(self._find_writer()) as writer:
            self.figures["stall"] = measure(lambda: folders.append(self._save_checkpoint("ours")))
            self.figures["durable"] = measure(lambda: run_on_first(lambda: wait_for_file(folders[0] / "ucp_seal.json")))
        self.figures |= {"extra": own.peak - own.before, "writer": writer.peak}
        finish_saves(self.engine)
        self.figures["cp"] = measure(lambda: run_on_first(self._copy_files))
        run_on_first(self._free_memory)
        release_free_memory()

    def _find_writer(self) -> int | str:
        """Return the process id of the writer on rank 0, whose figures are reported."""
        job = find_state(self.engine).saver.job.folder
        found = (each.pid for each in psutil.process_iter(["cmdline"]) if job in (each.info["cmdline"] or ()))
        return next(found) if dist.get_rank() == 0 else "self"

    def _copy_files(self) -> None:
        """Copy the last save from memory to the disk."""
        subprocess.run(["cp", "-r", find_state(self.engine).saver.folder, f"{self.folder}/cp"], check=True)
        os.sync()

    def _free_memory(self) -> None:
        job = find_state(self.engine).saver.job
        for save in job.list_saves():
            save.remove()
        shutil.rmtree(job.spare, ignore_errors=True)


def measure_saves(plan: Plan) -> list[Figures]:
    """Measure all ways to save; return this rank's figures by round (collective)."""
    deepspeed_ucp.install()
    saves = Saves(plan)
    figures = [saves.run_round(number) for number in range(plan.rounds)]
    find_state(saves.engine).saver.close()
    saves.engine.destroy()
    return figures


def save_once(plan: Plan) -> None:
    """Leave a save in memory and on the disk (collective)."""
    deepspeed_ucp.install()
    made = plan.make_engine(1)
    made.step()
    made.save(plan.folder)
    finish_saves(made.engine)
    keep_memory()  # for the resumes
    find_state(made.engine).saver.close()
    made.engine.destroy()


def resume(plan: Plan, stage: int, *, from_memory: bool) -> Figures:
    """Measure a load, and a copy of the state that it fills (collective).

    Raises:
        RuntimeError: it was loaded from another place.
    """
    deepspeed_ucp.install()
    engine = plan.make_engine(stage, with_memory=from_memory).engine
    release_free_memory()
    paths = list[Any]()
    seconds = measure(lambda: paths.append(engine.load_checkpoint(plan.folder)[0]))
    if not paths[0] or paths[0].startswith(plan.folder) is from_memory or engine.global_steps != 1:
        raise RuntimeError(f"loaded {paths[0]} of step {engine.global_steps}")
    again = copy_state(engine, with_weights=True)
    engine.destroy()
    return {"seconds": seconds, "again": again}
