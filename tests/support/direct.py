"""A stand-in engine, and whole direct loads into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.load import transfer
from deepspeed_ucp.load.context import LoadContext, LoadReport
from deepspeed_ucp.load.destinations import FillPlan
from deepspeed_ucp.load.direct import load_direct
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.plan import planning
from tests.support.contents import check_content
from tests.support.ranks import World
from tests.support.reshard import SENTINEL, FakeTarget, Loaded
from tests.synth import Local, Model, Param, Run, State, Topology, random_state, write_checkpoint

ZERO1 = Topology(1, 3)
PLAIN = Model((Param("a", (7, 13)), Param("b", (5, 7), group=1), Param("frozen", (3, 3), frozen=True)))
STATES = "mp_rank_00_model_states.pt"
REFUSED = {"refused": True}
"""A state that `Scheduler` refuses."""


class Scheduler:
    def __init__(self) -> None:
        self.loaded: Any = None

    def load_state_dict(self, state: Any) -> None:
        if state == REFUSED:
            raise KeyError("of another kind")
        self.loaded = state


class Restored(Scheduler):
    """A class whose code runs when a pickle restores it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Lion(torch.optim.Optimizer):
    """An optimizer with one moment, a step that is a plain number, and a note."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("exp_avg", torch.zeros_like(param))
                    state["step"] = state.get("step", 0) + 1


class Eager(Lion):
    """Creates its state at construction, like torch's Adagrad before, and requires it."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, lr)
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["sum"] = torch.zeros_like(param)

    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["sum"].add_(param.grad)


class UpstreamEngine:
    """The part of an engine that a load uses before its buffers."""

    optimizer = lr_scheduler = None

    def load_universal_checkpoint(self) -> bool:
        return False

    use_node_local_storage = load_universal_checkpoint

    def step(self) -> str:
        return "stepped"


def make_job(engine: object, comm: Comm, **options: Any) -> LoadContext:
    config = UniversalConfig(**options)
    return LoadContext(engine, comm, config, LoadReport(False, ""), from_config(config.patterns))


class FakeEngine:
    """The part of an engine that the end of a load uses."""

    lr_scheduler: Any
    random_ltd_scheduler: Any = None
    training_dataloader: Any = None
    module = torch.nn.Module()

    def __init__(self, target: FakeTarget, steps: int = 0) -> None:
        self.optimizer, self.lr_scheduler = target.wrapped, Scheduler()
        self.global_steps, self.global_samples, self.skipped_steps = steps, 0, 0
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None

    def random_ltd_enabled(self) -> bool:
        return self.random_ltd_scheduler is not None

    def train_batch_size(self) -> int:
        return 4


def write(
    folder: Path, topology: Topology, model: Model = PLAIN, run: Run | None = None, seed: int = 0
) -> tuple[Path, State]:
    state = random_state(model, seed, precision=topology.precision)
    return write_checkpoint(folder, model, state, topology, run=run or Run(garbage=float("nan"))), state


def start(folder: Path, source: Topology = ZERO1, run: Run | None = None) -> tuple[Path, State, FakeTarget]:
    """Write a checkpoint, and create the target of a single rank under ZeRO 2."""
    path, state = write(folder, source, run=run)
    return path, state, FakeTarget(PLAIN, Topology(2), 0)


def run_load(
    index: AtomicIndex,
    target: FakeTarget,
    comm: Comm | None = None,
    config: UniversalConfig | None = None,
    module: torch.nn.Module | None = None,
    engine: FakeEngine | None = None,
    **arguments: Any,
) -> tuple[FakeEngine, LoadReport, dict[str, Any]]:
    engine, report, config = engine or FakeEngine(target), LoadReport(True, "test"), config or UniversalConfig()
    engine.module = module or engine.module
    job = LoadContext(engine, comm or Comm(), config, report, from_config(config.patterns), **arguments)
    return engine, report, load_direct(job, index, target)


def check_loaded(targets: list[FakeTarget], state: State, local: Mapping[int, Local] | None = None) -> None:
    fill_plan = FillPlan(planning.make_index([]))
    check_content([Loaded(target, fill_plan, target.extras(), counted=False) for target in targets], state, local)


def have_memory(monkeypatch: pytest.MonkeyPatch, much: bool) -> None:
    """Set if buffers that cannot be recomputed are filled in separate memory, or in a second pass."""
    monkeypatch.setattr(transfer, "measure_available", lambda: 1 << 40 if much else 0)


def check_untouched(target: FakeTarget) -> None:
    for flat in target.flats:
        assert flat.data.eq(SENTINEL).all()
    for extra in target.extras():
        if not extra.is_buffer:
            assert extra.data.eq(SENTINEL).all()
    if target.wrapped:
        assert not target.wrapped.state
        assert all(group["lr"] == 0.125 for group in target.wrapped.param_groups)


def run_refused(
    index: AtomicIndex, targets: list[FakeTarget], config: UniversalConfig | None = None, *, changed: bool = False
) -> tuple[type, str]:
    """Return the one error that a load raises on all ranks; check that the engines are unchanged."""
    results = World(len(targets)).run(lambda rank, comm: run_load(index, targets[rank], comm, config))
    for target in () if changed else targets:
        check_untouched(target)
    ((kind, text),) = {(type(result), str(result)) for result in results}
    return kind, text


def change_file(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)
