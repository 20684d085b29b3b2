"""What the ranks do in the tests of refusals, arguments, saves and of the hook itself. Imported on the ranks only."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed.runtime.engine as deepspeed_engine
import torch
import torch.distributed as dist
from engine_cases import make_engine, train, train_engine

import deepspeed_ucp
from deepspeed_ucp.testing.capture import EngineState, capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import saved_state, start
from deepspeed_ucp.testing.ranks import train as train_steps


@dataclass
class Attempt:
    """What became of a load that should be refused."""

    error: str = ""
    kinds: list[str] = field(default_factory=list)
    message: str = ""
    seconds: float = 0.0
    changed: list[str] = field(default_factory=list)
    loss: float = float("nan")


def attempt(
    ds_config: dict[str, Any],
    folders: list[str],
    options: dict[str, Any],
    arguments: dict[str, Any] | None = None,
    unreadable: str = "",
) -> Attempt:
    """Try to load, and note the error, how long it took, and what it changed in the engine.

    Args:
        folders: one for all ranks, or one for each.
        arguments: further arguments of `load_checkpoint`.
        unreadable: files whose name contains this cannot be opened on rank 1.
    """
    training, engine = start(_train(options), ds_config)
    before, result = fingerprint(engine), Attempt()
    folder = folders[dist.get_rank() % len(folders)]
    begin = time.monotonic()
    try:
        with _blocked(unreadable if dist.get_rank() == 1 else ""):
            engine.load_checkpoint(folder, **(arguments or {}))
    except Exception as error:  # noqa: BLE001 - the error is what the test looks at
        result.error, result.message = type(error).__name__, str(error)
        result.kinds = [kind.__name__ for kind in type(error).__mro__]
    result.seconds = time.monotonic() - begin
    after = fingerprint(engine)
    result.changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    result.loss = train_steps(training, 1)[0]  # the engine still works
    engine.destroy()
    return result


def initialize_error(ds_config: dict[str, Any]) -> tuple[str, str]:
    """The error of `deepspeed.initialize`, or two empty strings."""
    try:
        make_engine(ds_config, "plain").destroy()
    except Exception as error:  # noqa: BLE001 - the error is what the test looks at
        return type(error).__name__, str(error)
    return "", ""


def _train(options: dict[str, Any]) -> Any:
    return lambda ds_config: train(ds_config, **options)


@contextmanager
def _blocked(part: str) -> Iterator[None]:
    """Files with `part` in their name cannot be opened."""
    if not part:
        yield
        return
    real_open, real_os_open = open, os.open

    def refuse(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and part in os.path.basename(os.fspath(path)):
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
class Loaded:
    """What a load gave: its return value and the engine's state after it."""

    path: str | None
    client_state: dict[str, Any] | None
    before: EngineState
    state: EngineState
    direct: bool | None
    bytes_read: int = 0
    state_bytes: int = 0


def load(
    ds_config: dict[str, Any],
    folder: str,
    options: dict[str, Any],
    arguments: dict[str, Any] | None = None,
    rename: dict[str, str] | None = None,
) -> Loaded:
    """Make an engine and load a checkpoint into it.

    Args:
        arguments: further arguments of `load_checkpoint`.
        rename: load through a `custom_load_fn` that renames prefixes of the saved names.
    """
    engine = make_engine(ds_config, **options)
    before = capture(engine)
    arguments = dict(arguments or {})
    if rename is not None:
        arguments["custom_load_fn"] = _renaming(rename)
    path, client_state = engine.load_checkpoint(folder, **arguments)
    report = getattr(engine, "ucp_report", None)
    loaded = Loaded(path, client_state, before, capture(engine), None if report is None else report.direct)
    if report is not None:
        loaded.bytes_read, loaded.state_bytes = report.bytes_read, report.state_bytes
    engine.destroy()
    return loaded


def _renaming(rename: dict[str, str]) -> Any:
    def load_renamed(src: dict[str, Any], dst: Any) -> None:
        for old, new in rename.items():
            src = {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in src.items()}
        dst.load_state_dict(src)

    return load_renamed


def differences(folder: str, state: EngineState, optimizer_states: bool = True) -> list[str]:
    """What differs between the source of `folder` and a captured state."""
    return compare(saved_state(folder), state, optimizer_states=optimizer_states)[1]


def resume_and_save(ds_config: dict[str, Any], folder: str, again: str, options: dict[str, Any]) -> None:
    """Load, and save right away."""
    engine = make_engine(ds_config, **options)
    engine.load_checkpoint(folder)
    assert engine.ucp_report.direct
    engine.save_checkpoint(again, client_state={"deepspeed_ucp_testing": "again"})
    engine.destroy()


class Sampler:
    """Stands for DeepSpeed's curriculum data sampler, which wants index files of a data set."""

    def __init__(self) -> None:
        self.consumed = 0

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["consumed_samples"]


def train_with_helpers(ds_config: dict[str, Any], folder: str, load: bool) -> dict[str, Any]:
    """Save or load with a random-LTD scheduler and a data sampler; their states at the end."""
    engine = make_engine(ds_config, "plain")
    sampler = Sampler()
    engine.training_dataloader = SimpleNamespace(data_sampler=sampler)
    engine.curriculum_learning_enabled = lambda: True
    if load:
        engine.load_checkpoint(folder)
        assert engine.ucp_report.direct
    else:
        train_steps(train_engine(engine), 3)
        sampler.consumed = 180
        engine.save_checkpoint(folder)
    found = {"random_ltd": engine.random_ltd_scheduler.state_dict(), "data_sampler": sampler.state_dict()}
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


def load_without_plugin(ds_config: dict[str, Any], folder: str, reference: str, options: dict[str, Any]) -> list[str]:
    """DeepSpeed's own load of `folder`; what differs from what `reference` saved."""
    with uninstalled():
        loaded = load(ds_config, folder, options)
    assert loaded.direct is None
    return differences(reference, loaded.state)


def load_plain(ds_config: dict[str, Any], folder: str, options: dict[str, Any], arguments: dict[str, Any]) -> Loaded:
    """DeepSpeed's own load, without the plugin."""
    with uninstalled():
        return load(ds_config, folder, options, arguments)


def save(ds_config: dict[str, Any], folder: str, options: dict[str, Any], steps: int, plugin: bool) -> None:
    """Train a little and save, with the plugin or without it."""
    with ExitStack() as stack:
        if not plugin:
            stack.enter_context(uninstalled())
        training, engine = start(_train(options), ds_config)
        train_steps(training, steps)
        engine.save_checkpoint(folder, client_state={"mine": 1})
        engine.destroy()


def calls_of_own_load(ds_config: dict[str, Any], folder: str, model: str = "plain") -> dict[str, Any]:
    """How often DeepSpeed's own load ran, what was logged, and the plugin's report."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("deepspeed_ucp")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    engine = make_engine(ds_config, model)
    kind = deepspeed_engine.DeepSpeedEngine
    own = mock.Mock(side_effect=kind._load_checkpoint, name="_load_checkpoint")
    try:
        with mock.patch.object(kind, "_load_checkpoint", lambda *a, **k: own(*a, **k)):  # noqa: PLW0108 - binds self
            path, _ = engine.load_checkpoint(folder)
    finally:
        log.removeHandler(handler)
    report = getattr(engine, "ucp_report", None)
    engine.destroy()
    return {
        "calls": own.call_count,
        "path": path,
        "info": [record.getMessage() for record in records if record.levelno == logging.INFO],
        "direct": None if report is None else report.direct,
        "reason": "" if report is None else report.reason,
    }


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
        error = str(raised)
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
        for path in sorted(Path(folder).rglob("*.pt"))
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
    return sorted(str(name) for name in names if not _same(_read(Path(left) / name), _read(Path(right) / name)))


def _read(path: Path) -> Any:
    if not path.exists():
        return path
    return torch.load(path, weights_only=False, map_location="cpu") if path.suffix == ".pt" else path.read_bytes()


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if torch.is_tensor(left):
        return left.dtype == right.dtype and left.equal(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right) or (hasattr(left, "__dict__") and _same(vars(left), vars(right)))


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
