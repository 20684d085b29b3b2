"""Work of the ranks: train, save, load, refuse, and report the engine's state. Imported on the ranks only."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

import deepspeed_ucp
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.io.store import list_tree
from deepspeed_ucp.saves.publishing import WRITTEN
from deepspeed_ucp.testing.capture import capture
from deepspeed_ucp.testing.ranks import CLIENT_STATE
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.held import without_collector
from tests.support.until import wait_until

Training = Callable[[], Generator[Any, None, None]]
"""Makes an engine and yields it, then the loss of each step that it trains."""

Folder = str | tuple[str, ...]
"""One folder for all ranks, or one for each rank."""


@dataclass(frozen=True)
class Load:
    """One of the loads that an engine makes one after the other.

    Attributes:
        unreadable: files whose name contains this cannot be opened on rank 1.
        before: steps that the engine trains before the load.
        again: folder of a save right after the load.
    """

    folder: Folder
    arguments: dict[str, Any] = field(default_factory=dict)
    unreadable: str = ""
    before: int = 0
    again: str = ""
    steps: int = 0


def _pick(folder: Folder) -> str:
    return folder if isinstance(folder, str) else folder[dist.get_rank()]


@contextmanager
def _blocked(part: str) -> Iterator[None]:
    """Context manager in which files with `part` in their name cannot be opened."""
    if not part:
        yield
        return

    def block(real: Any) -> Any:
        def blocked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and part in os.path.basename(os.fspath(path)):
                time.sleep(0.2)  # other threads begin to read in this time and fail, too
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return real(path, *args, **kwargs)

        return blocked

    with mock.patch("builtins.open", block(open)), mock.patch("os.open", block(os.open)):
        yield


# --- saves and loads


@dataclass
class Local:
    """The engine of one rank after a save or a load.

    Attributes:
        state: captured, or read by the function that the test passes; None after a refusal.
        before: state before the load, if requested.
        error: type and message of a refusal, if the test catches it; ``kinds``: names of the type and its bases.
        held: blocks of exchange memory that are still mapped after a refusal.
        changed: parts of the engine that a refusal changed.
        direct: None without the plugin.
        log: level and text of each message of the plugin.
    """

    state: Any
    before: Any = None
    error: str = ""
    kinds: list[str] = field(default_factory=list)
    held: int = 0
    changed: list[str] = field(default_factory=list)
    path: str | None = None
    client_state: dict[str, Any] | None = None
    calls: int = 0
    direct: bool | None = None
    reason: str = ""
    bytes_read: int = 0
    state_bytes: int = 0
    log: list[tuple[str, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def list_messages(self, level: str, part: str = "") -> list[str]:
        return [text for logged, text in self.log if logged == level and part in text]


def describe(engine: Any, read: Callable[[Any], Any] = capture) -> Local:
    """Return the state of an engine, read by `read`, and the report of its load; collective."""
    local, report = Local(read(engine)), getattr(engine, "ucp_report", None)
    if report is not None:
        for name in ("direct", "reason", "bytes_read", "state_bytes"):
            setattr(local, name, getattr(report, name))
    return local


def save(
    training: Training,
    folder: Folder,
    steps: Sequence[int] = (2,),
    *,
    after: int = 0,
    client_state: Mapping[str, Any] | None = None,
    plugin: bool = True,
    read: Callable[[Any], Any] = capture,
) -> Local:
    """Train, save and continue, with or without the plugin.

    Args:
        steps: trained before each save.
        after: steps after the last save.

    Returns:
        The engine at the last save, and the losses after it.
    """
    with nullcontext() if plugin else uninstalled():
        trained = training()
        engine = next(trained)
        for count in steps:
            train_steps(trained, count)
            state = dict(client_state or make_client_state(engine))
            engine.save_checkpoint(_pick(folder), client_state=dict(state))
        local = describe(engine, read)
        local.client_state = state
        local.losses = train_steps(trained, after)
        trained.close()
        engine.destroy()
    return local


def make_client_state(engine: Any) -> Mapping[str, Any]:
    return getattr(engine, "make_client_state", lambda: CLIENT_STATE)()  # type: ignore[no-any-return]


def load_each(
    training: Training,
    loads: Sequence[Load],
    plugin: bool = True,
    *,
    read: Callable[[Any], Any] = capture,
    read_before: bool = False,
    catch: bool = False,
) -> list[Local]:
    """Make an engine, with or without the plugin, and the loads in it.

    Args:
        read_before: read the state before each load, too.
        catch: report errors of loads instead of raising them. After refusals the engine still trains a step.
    """
    with nullcontext() if plugin else uninstalled():
        trained = training()
        engine = next(trained)
        found = []
        for load in loads:
            train_steps(trained, load.before)
            before = read(engine) if read_before else None
            found.append(_load(trained, engine, load, read, catch))
            found[-1].before = before
        if any(each.error for each in found):
            train_steps(trained, 1)
        trained.close()
        engine.destroy()
    return found


def _load(trained: Generator[Any, None, None], engine: Any, load: Load, read: Any, catch: bool) -> Local:
    error, path, client_state, refusal = "", None, None, {}
    before, memory = (_fingerprint(engine), _list_exchange_memory()) if catch else ({}, set())
    real = DeepSpeedEngine._load_checkpoint
    counted = mock.patch.object(DeepSpeedEngine, "_load_checkpoint", autospec=True, side_effect=real)
    with listen() as log, counted as own, without_collector():
        try:
            with _blocked(load.unreadable if dist.get_rank() == 1 else ""):
                path, client_state = engine.load_checkpoint(_pick(load.folder), **load.arguments)
        except Exception as raised:
            if not catch:
                raise
            error = "\n".join([f"{type(raised).__name__}: {raised}", *getattr(raised, "__notes__", ())])
            refusal["kinds"] = [kind.__name__ for kind in type(raised).__mro__]
        held = len(_list_exchange_memory() - memory)
    if error:
        after = _fingerprint(engine)
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        refusal |= {"held": held, "changed": changed}
    local = Local(None) if error else describe(engine, read)
    local.error, local.path, local.client_state, local.log, local.calls = error, path, client_state, log, own.call_count
    vars(local).update(refusal)
    if load.again:
        engine.save_checkpoint(load.again, client_state=make_client_state(engine))
    local.losses = [] if error else train_steps(trained, load.steps)
    return local


@contextmanager
def listen() -> Iterator[list[tuple[str, str]]]:
    """Collect level and text of the plugin's messages."""
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


@contextmanager
def uninstalled() -> Iterator[None]:
    """Context manager for DeepSpeed without the plugin."""
    deepspeed_ucp.uninstall()
    try:
        yield
    finally:
        deepspeed_ucp.install()


def on_nodes(work: Callable[..., Any], memory: str, *args: Any, **options: Any) -> Any:
    """Call `work` as if each rank were a node with a separate memory folder."""
    memory = os.path.join(memory, f"node{os.environ['RANK']}")
    with mock.patch.dict(os.environ, LOCAL_RANK="0", NODE_MEMORY=memory):
        return work(*args, **options)


def with_options(options: dict[str, Any], work: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call `work` with these options of the plugin for all engines."""
    with mock.patch.dict(os.environ, DEEPSPEED_UCP=json.dumps(options)):
        return work(*args, **more)


# --- saves through memory


def close(engine: Any) -> None:
    """End an engine like a preempted process: its saves stay in memory for the next load."""
    saver = find_state(engine).saver
    if saver is not None:
        saver.keeps_memory = True
        saver.close()
    engine.destroy()


def wait_for_marks(place: object) -> None:
    """Wait until the nodes' coordination files are removed, shortly after all saves are complete."""
    wait_until(lambda: not any(WRITTEN in name for name in list_tree(str(place))))


# --- refused loads


def _list_exchange_memory() -> set[str]:
    """List inodes of mapped exchange memory; blocks of other tests may wait for the garbage collector."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:deepspeed_ucp" in line}


def _fingerprint(engine: Any) -> dict[str, str]:
    """Return a digest of each part of the engine that a load may change on this rank."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    parts = {
        "parameter": dict(engine.module.named_parameters()),
        "buffer": dict(engine.module.named_buffers()),
        "optimizer": getattr(engine.optimizer, "__dict__", {}),
        "state": list(getattr(inner, "state", {}).items()),
    }
    found = {name: _digest(value) for name, value in walk(parts) if torch.is_tensor(value)}
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in getattr(inner, "param_groups", ())
    ]
    counters = [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps]
    scheduler = engine.lr_scheduler.state_dict() if engine.lr_scheduler else ""
    return {**found, "groups": repr(groups), "counters": repr(counters), "scheduler": repr(scheduler)}


def walk(value: Any, name: str = "", depth: int = 5) -> Iterator[tuple[str, Any]]:
    """Yield a value, and all values of containers in it, by name."""
    yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for number, (key, item) in enumerate(items if depth else ()):
        yield from walk(item, f"{name}.{key if isinstance(key, str | int) else number}", depth - 1)


def _digest(tensor: torch.Tensor) -> str:
    tensor = getattr(tensor, "ds_tensor", tensor)  # this rank's part: stage 3 gathers and drops the whole at any time
    if tensor.is_meta:
        return f"{tuple(tensor.shape)} {tensor.dtype}"
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()}"


# --- files


def edit(path: Path, change: Callable[[Any], object]) -> None:
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


def files_that_differ(left: object, right: object) -> list[str]:
    """List files that only one folder has, or whose contents differ.

    Compares contents because DeepSpeed's stage 3 never pickles the same bytes twice.
    """
    roots = Path(str(left)), Path(str(right))
    names = {path.relative_to(root) for root in roots for path in root.rglob("*") if path.is_file()}
    return sorted(str(name) for name in names if not is_same(_read(roots[0] / name), _read(roots[1] / name)))


def _read(path: Path) -> Any:
    if not path.exists():
        return path
    return torch.load(path, weights_only=False, map_location="cpu") if path.suffix == ".pt" else path.read_bytes()


def is_same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if torch.is_tensor(left):  # uninitialised memory, such as stage 3's padding, may be NaN
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        return is_alike and left.flatten().view(torch.uint8).equal(right.flatten().view(torch.uint8))
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right) or (hasattr(left, "__dict__") and is_same(vars(left), vars(right)))
