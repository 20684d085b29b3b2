"""What the ranks do in the tests of refusals, arguments, saves and of the hook itself. Imported on the ranks only."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed.runtime.engine as deepspeed_engine
import torch
import torch.distributed as dist

import deepspeed_ucp
from deepspeed_ucp.targets import Instance, Place, find_place, gathering, open_target
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import CLIENT_STATE, saved_state
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.curriculum import make_sampler
from tests.support.engines.cases import make_engine, train, train_engine
from tests.support.held import without_collector

Training = Callable[[], Generator[Any, None, None]]
"""Makes an engine and yields it, then the loss of each step that it trains."""


@dataclass(frozen=True)
class Load:
    """One of the loads that an engine makes one after the other.

    Attributes:
        folder: one for all ranks, or one for each.
        arguments: further arguments of `load_checkpoint`.
        rename: load through a `custom_load_fn` that renames prefixes of the saved names.
        unreadable: files whose name contains this cannot be opened on rank 1.
        before: steps that the engine trains first.
        again: save there right after it.
        steps: that the engine trains then.
    """

    folder: str | tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    rename: dict[str, str] | None = None
    unreadable: str = ""
    before: int = 0
    again: str = ""
    steps: int = 0

    def run(self, engine: Any) -> Any:
        """What `load_checkpoint` returns."""
        rank = dist.get_rank()
        folder = self.folder if isinstance(self.folder, str) else self.folder[rank]
        renaming = {} if self.rename is None else {"custom_load_fn": _renaming(self.rename)}
        with _blocked(self.unreadable if rank == 1 else ""):
            return engine.load_checkpoint(folder, **self.arguments, **renaming)


@dataclass
class Attempt:
    """What became of a load that should be refused.

    Attributes:
        held: pieces of memory to exchange bytes in that are still there after it.
    """

    error: str = ""
    kinds: list[str] = field(default_factory=list)
    message: str = ""
    held: int = 0
    changed: list[str] = field(default_factory=list)
    loss: float = float("nan")


def attempt_each(training: Training, loads: Sequence[Load]) -> list[Attempt]:
    """Try to load into one engine: the errors, what each changed and held, and the loss of a step at last."""
    steps = training()
    engine = next(steps)
    found = [_attempt(engine, each) for each in loads]
    loss = next(steps)  # the engine still works
    for each in found:
        each.loss = loss
    engine.destroy()
    return found


def _attempt(engine: Any, load: Load) -> Attempt:
    before, result = fingerprint(engine), Attempt()
    held = _list_held()
    with without_collector():
        try:
            load.run(engine)
        except Exception as error:  # noqa: BLE001 - the error is what the test looks at
            result.error, result.message = type(error).__name__, str(error)
            result.kinds = [kind.__name__ for kind in type(error).__mro__]
        result.held = len(_list_held() - held)
    after = fingerprint(engine)
    result.changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return result


def _list_held() -> set[str]:
    """Memory to exchange bytes in, by inode; what another test of this process has left waits for the collector."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:deepspeed_ucp" in line}


def initialize_error(ds_config: dict[str, Any]) -> tuple[str, str]:
    """The error of `deepspeed.initialize`, or two empty strings."""
    try:
        make_engine(ds_config, "plain").destroy()
    except Exception as error:  # noqa: BLE001 - the error is what the test looks at
        return type(error).__name__, str(error)
    return "", ""


def gather_partitions(partition: int, *, shared: bool) -> bool:
    """Whether `gather_in_place` completes a buffer, through shared memory or without."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(size * partition, dtype=torch.float32).to(torch.bfloat16)
    flat = torch.full_like(whole, -1)
    flat.view(size, -1)[rank] = whole.view(size, -1)[rank]
    with ExitStack() as stack:
        if not shared:
            alone = [memoryview(b"") if each == rank else None for each in range(size)]
            stack.enter_context(mock.patch.object(gathering, "share_memory", return_value=alone))
        gathering.gather_in_place(flat, None)
    return flat.equal(whole)


@contextmanager
def _blocked(part: str) -> Iterator[None]:
    """Files with `part` in their name cannot be opened."""
    if not part:
        yield
        return
    real_open, real_os_open = open, os.open

    def refuse(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and part in os.path.basename(os.fspath(path)):
            time.sleep(0.2)  # the other threads begin to read meanwhile, and fail as well
            raise PermissionError(13, "Permission denied", os.fspath(path))

    def blocked_open(path: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(path)
        return real_open(path, *args, **kwargs)

    def blocked_os_open(path: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(path)
        return real_os_open(path, *args, **kwargs)

    with mock.patch("builtins.open", blocked_open), mock.patch("os.open", blocked_os_open):
        yield


def fingerprint(engine: Any) -> dict[str, str]:
    """A digest of everything of the engine that a load may change on this rank."""
    found = {f"parameter {name}": _digest(_local(p).data) for name, p in engine.module.named_parameters()}
    found |= {f"buffer {name}": _digest(buffer) for name, buffer in engine.module.named_buffers()}
    wrapper = engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    found |= {f"optimizer.{name}": _digest(value) for name, value in _tensors(vars(wrapper), "", 4)}
    for index, (key, state) in enumerate(inner.state.items()):
        found |= {f"state {index}.{name}": _digest(value) for name, value in _tensors({"": key, **state}, "", 2)}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    found["groups"] = repr(groups)
    found["counters"] = repr([engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps])
    found["scheduler"] = repr(engine.lr_scheduler.state_dict()) if engine.lr_scheduler else ""
    return found


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter; stage 3 gathers and drops the whole of it as it likes."""
    return getattr(parameter, "ds_tensor", parameter)


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if torch.is_tensor(value):
        yield name, _local(value)
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key if isinstance(key, str | int) else '?'}", depth - 1)
    elif depth and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}", depth - 1)


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return f"{tuple(tensor.shape)} {tensor.dtype}"
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()}"


@dataclass
class Local:
    """What one rank tells after a load or a save.

    Attributes:
        before: the engine's state before its first load, where it was asked for.
        direct: None without the plugin.
        log: what the plugin said, with the level.
        layers: of this pipeline stage.
        instances: which of the stages that hold a parameter this one is.
    """

    place: Place
    state: CapturedEngine
    layers: tuple[int, int] = (0, 0)
    instances: dict[str, Instance] = field(default_factory=dict)
    before: CapturedEngine | None = None
    path: str | None = None
    client_state: dict[str, Any] | None = None
    direct: bool | None = None
    reason: str = ""
    bytes_read: int = 0
    state_bytes: int = 0
    log: list[tuple[str, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def tell(engine: Any) -> Local:
    """Where this rank stands and what it holds; collective."""
    module, report = engine.module, getattr(engine, "ucp_report", None)
    layers = (module._local_start, module._local_stop) if hasattr(module, "_local_start") else (0, 0)
    local = Local(find_place(engine), capture(engine), layers, open_target(engine).instances())
    if report is not None:
        local.direct, local.reason = report.direct, report.reason
        local.bytes_read, local.state_bytes = report.bytes_read, report.state_bytes
    return local


def load_each(
    training: Training, loads: Sequence[Load], plugin: bool = True, *, tell_before: bool = False
) -> list[Local]:
    """Make an engine, with the plugin or without it, and let it make the loads."""
    with nullcontext() if plugin else uninstalled():
        steps = training()
        engine = next(steps)
        before = capture(engine) if tell_before else None
        found = [_load(steps, engine, each) for each in loads]
        engine.destroy()
    for local in found:
        local.before = before
    return found


def _load(steps: Generator[Any, None, None], engine: Any, load: Load) -> Local:
    train_steps(steps, load.before)
    with listen() as log:
        path, client_state = load.run(engine)
    local = tell(engine)
    local.path, local.client_state, local.log = path, client_state, log
    if load.again:
        engine.save_checkpoint(load.again, client_state=make_client_state(engine))
    local.losses = train_steps(steps, load.steps)
    return local


def make_client_state(engine: Any) -> Mapping[str, Any]:
    """What a save takes along: the training's own, where it has put it to the engine."""
    return getattr(engine, "make_client_state", lambda: CLIENT_STATE)()  # type: ignore[no-any-return]


@contextmanager
def listen() -> Iterator[list[tuple[str, str]]]:
    """What the plugin says, with the level."""
    found: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    log = logging.getLogger("deepspeed_ucp")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _renaming(rename: dict[str, str]) -> Any:
    def load_renamed(src: dict[str, Any], dst: Any) -> None:
        for old, new in rename.items():
            src = {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in src.items()}
        dst.load_state_dict(src)

    return load_renamed


def differences(folder: str, state: CapturedEngine, optimizer_states: bool = True) -> list[str]:
    """What differs between the source of `folder` and a captured state."""
    return compare(saved_state(folder), state, optimizer_states=optimizer_states)[1]


def train_with_helpers(ds_config: dict[str, Any], folder: str, load: bool) -> dict[str, Any]:
    """Save or load with a random-LTD scheduler and a data sampler; their states at the end."""
    engine = make_engine(ds_config, "plain")
    sampler = make_sampler(Path(f"{folder}_clusters"), dist.get_rank())
    engine.training_dataloader = SimpleNamespace(data_sampler=sampler)
    engine.curriculum_learning_enabled = lambda: True
    if load:
        engine.load_checkpoint(folder)
        assert engine.ucp_report.direct
    else:
        train_steps(train_engine(engine), 3)
        sampler.consumed_samples = 180
        engine.save_checkpoint(folder)
    found = {"random_ltd": engine.random_ltd_scheduler.state_dict(), "data_sampler": sampler.consumed_samples}
    engine.destroy()
    return found


@contextmanager
def uninstalled() -> Iterator[None]:
    """DeepSpeed as it is without the plugin."""
    deepspeed_ucp.uninstall()
    try:
        yield
    finally:
        deepspeed_ucp.install()


def save(
    training: Training,
    folder: str,
    steps: Sequence[int] = (2,),
    *,
    after: int = 0,
    client_states: Mapping[str, Mapping[str, Any]] | None = None,
    plugin: bool = True,
) -> Local | None:
    """Train and save, with the plugin or without it, and go on.

    Args:
        steps: that are trained before each save.
        after: steps that are trained then.
        client_states: save each time once with each of them, into a folder of its name.

    Returns:
        What the engine held at the last save, and the losses after it; None for experts.
    """
    with nullcontext() if plugin else uninstalled():
        trained = training()
        engine = next(trained)
        for count in steps:
            train_steps(trained, count)
            for name, state in (client_states or {"": make_client_state(engine)}).items():
                engine.save_checkpoint(os.path.join(folder, name), client_state=dict(state))
        local = None if engine.has_moe_layers else tell(engine)
        if local is not None:
            local.losses = train_steps(trained, after)
        engine.destroy()
    return local


def train_with_load_universal(ds_config: dict[str, Any], **options: Any) -> Generator[Any, None, None]:
    """As `cases.train`, as `ds_ucp run` has a script whose ds_config says `load_universal`."""
    deepspeed_ucp.install(default_on=True)
    try:
        yield from train({**ds_config, "checkpoint": {"load_universal": True}}, **options)
    finally:
        deepspeed_ucp.install(default_on=False)


def watch_own_load(training: Training, folder: str) -> dict[str, Any]:
    """How often DeepSpeed's own load runs in a load, what the plugin says, and its report."""
    engine = next(training())
    kind = deepspeed_engine.DeepSpeedEngine
    own = mock.Mock(side_effect=kind._load_checkpoint)
    with listen() as log, mock.patch.object(kind, "_load_checkpoint", lambda *a, **k: own(*a, **k)):  # noqa: PLW0108
        path, _ = engine.load_checkpoint(folder)
    report, state = getattr(engine, "ucp_report", None), capture(engine)
    engine.destroy()
    return {
        "calls": own.call_count,
        "state": state,
        "path": path,
        "info": [message for level, message in log if level == "INFO" and "differs from the saved" not in message],
        "changes": [(level, message) for level, message in log if "differs from the saved one" in message],
        "direct": None if report is None else report.direct,
        "reason": "" if report is None else report.reason,
    }


def on_nodes(work: Callable[..., Any], training: Training, folder: str, turn: int = 0) -> Any:
    """`work` as if every rank were a node of its own, with a folder of its own; `turn`: of another node's."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        return work(training, os.path.join(folder, f"node{(rank + turn) % world}"))


def load_one(training: Training, folder: str) -> Local:
    """As :func:`load_each`, of one."""
    return load_each(training, [Load(folder, steps=1)])[0]


def install_twice_and_uninstall() -> list[bool]:
    """Whether the class's method is DeepSpeed's own: before, after two installs, after an uninstall, after another."""
    kind = deepspeed_engine.DeepSpeedEngine

    def is_own() -> bool:
        return kind.load_checkpoint.__module__ == kind.__module__ and not hasattr(kind.load_checkpoint, "__wrapped__")

    found = []
    deepspeed_ucp.uninstall()
    found.append(is_own())
    deepspeed_ucp.install()
    once = kind.load_checkpoint
    deepspeed_ucp.install()
    found.append(kind.load_checkpoint is once and not is_own())
    deepspeed_ucp.uninstall()
    found.append(is_own())
    deepspeed_ucp.uninstall()
    found.append(is_own())
    deepspeed_ucp.install()
    return found


def two_engines(on: dict[str, Any], off: dict[str, Any], folder: str) -> dict[str, Any]:
    """One engine with the plugin and one without, in one process, load the same checkpoint of another size."""
    first, second = make_engine(on, "plain"), make_engine(off, "plain")
    error = ""
    try:
        second.load_checkpoint(folder)
    except Exception as raised:  # noqa: BLE001 - the error is what the test looks at
        error = "\n".join([str(raised), *getattr(raised, "__notes__", [])])
    first.load_checkpoint(folder)
    found = {"differences": differences(folder, capture(first)), "error": error}
    found["reports"] = [first.ucp_report.direct, getattr(second, "ucp_report", None)]
    first.destroy()
    second.destroy()
    return found


def batch_sizes(ds_config: dict[str, Any]) -> tuple[int, int, int]:
    """train_batch_size, micro batch and gradient accumulation steps of an engine."""
    engine = make_engine(ds_config, "plain")
    sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    engine.destroy()
    return sizes


def structure(folder: str) -> dict[str, Any]:
    """File → the keys, types, shapes and dtypes in it."""
    return {
        str(path.relative_to(folder)): describe(torch.load(path, weights_only=False, map_location="cpu"))
        for path in sorted(Path(folder).rglob("*_states.pt"))
    }


def describe(value: Any) -> Any:
    """The shape of a nested value, without its contents."""
    if torch.is_tensor(value):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items() if key != "ds_config"}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return type(value).__name__


def files_that_differ(left: str, right: str) -> list[str]:
    """Files that only one folder has, or whose contents differ. (DeepSpeed's stage 3 never pickles the same twice.)"""
    names = {path.relative_to(folder) for folder in (left, right) for path in Path(folder).rglob("*") if path.is_file()}
    return sorted(str(name) for name in names if not is_same(_read(Path(left) / name), _read(Path(right) / name)))


def _read(path: Path) -> Any:
    if not path.exists():
        return path
    return torch.load(path, weights_only=False, map_location="cpu") if path.suffix == ".pt" else path.read_bytes()


def is_same(left: Any, right: Any) -> bool:
    """Whether two files' contents are, to the bit."""
    if type(left) is not type(right):
        return False
    if torch.is_tensor(left):
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        return is_alike and (left.equal(right) or _has_bits(left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right) or (hasattr(left, "__dict__") and is_same(vars(left), vars(right)))


def _has_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether one has the other's bits: what nobody has written to, as stage 3's padding, may be NaN."""
    return left.flatten().view(torch.uint8).equal(right.flatten().view(torch.uint8))


def plant_code(path: str, marker: str) -> None:
    """Put an object into a model-states file that creates `marker` when it is unpickled."""
    saved = torch.load(path, weights_only=False, map_location="cpu")
    saved["planted"] = _Planted(marker)
    torch.save(saved, path)


class _Planted:
    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)
