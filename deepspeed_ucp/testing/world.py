"""Worlds: N processes on this machine that run functions in a process group.

Importing torch and DeepSpeed takes seconds of CPU per process. The ranks are therefore forked from a fork server that
has imported both, and a world stays alive between calls. This module imports neither, because a pytest plugin imports
it at start-up.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import gc
import importlib
import io
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from ..elastic_agent import die_with_parent

DEFAULT_TIMEOUT = 180.0
"""Timeout of one call on a world, in seconds."""

SHARED = "host"
"""The backend of ranks that share GPUs (:mod:`.sharing`)."""

_GRACE = 5.0  # seconds for the other ranks to answer after one has failed
_ENDING = 60.0  # seconds for a rank to exit
_LOG_TAIL = 4000  # characters of a rank's output shown with its failure
PRELOAD = [
    "torch",
    "torch.distributed",
    "deepspeed",
    "torch._dynamo",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed_ucp.hook",
    "deepspeed_ucp.testing.ranks",
]
"""Modules that the fork server imports for its ranks, if they exist. Add modules before the first world is made.

Besides torch and DeepSpeed, the first optimizer, ZeRO engine or load imports them: three seconds per process."""


def hold_port() -> socket.socket:
    """Reserve a free port of this machine as long as the returned socket is open.

    A process group's store can listen on that port at the same time, because both sockets set SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


class WorldFailure(RuntimeError):
    """At least one rank failed.

    Attributes:
        errors: failed rank → its traceback, or a description of its end.
    """

    def __init__(self, errors: Mapping[int, str]):
        super().__init__(dict(errors))
        self.errors: dict[int, str] = self.args[0]

    def __str__(self) -> str:
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(self.errors.items()))


class WorldTimeout(WorldFailure, TimeoutError):
    """Ranks did not answer in time; `errors` has these and the failed ones."""


class World(AbstractContextManager["World"]):
    """`world_size` processes in one process group, with DeepSpeed initialised.

    `run` runs one function on all ranks. The processes keep their modules and globals between calls; the engines of a
    call are collected after it, and DeepSpeed's parallel groups are restored. Engines share process groups of the same
    ranks. A failed call closes the world.

    The environment has the variables of a launcher (RANK, WORLD_SIZE, MASTER_PORT, …). DS_ACCELERATOR is "cpu" by
    default, and the backend gloo. With "cuda" it is NCCL if each rank has a GPU; otherwise ranks share GPUs, and their
    collectives go through host memory.

    Args:
        timeout: default timeout of a call, in seconds.
        env: further environment variables of the ranks.
    """

    def __init__(self, world_size: int, *, timeout: float = DEFAULT_TIMEOUT, env: Mapping[str, str] | None = None):
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self.closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="ucp-world-"))
        self._socket = hold_port()  # names in /dev/shm contain the port
        self._port = int(self._socket.getsockname()[1])
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        base = {"DS_ACCELERATOR": "cpu", **os.environ, "OMP_NUM_THREADS": "1"}
        base.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._port), WORLD_SIZE=str(world_size))
        # DeepSpeed's checkpoint writers need the launcher's number of nodes and node rank.
        base.update(LOCAL_WORLD_SIZE=str(world_size), CROSS_SIZE="1", CROSS_RANK="0", **(env or {}))
        base.pop("LOCAL_SIZE", None)  # of the DeepSpeed launcher: turns shared-memory collectives on
        context = _choose_context(base["DS_ACCELERATOR"])
        with mock.patch.dict(os.environ, DS_ACCELERATOR=base["DS_ACCELERATOR"]):
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                variables = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = (theirs, variables, str(self._folder), timeout, PRELOAD)
                process = context.Process(target=_serve, args=arguments, name=f"ucp-rank-{rank}", daemon=False)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank; return the results by rank.

        `fn`, its arguments and its results are pickled, so `fn` must be a function of an importable module (or a
        `functools.partial` of one).

        Raises:
            Exception: the exception of the rank that failed first; its cause is a `WorldFailure` with the tracebacks
                of all failed ranks.
            WorldTimeout: a rank did not answer in time; all ranks have been killed.
            WorldFailure: a rank died, or its exception cannot be pickled.
        """
        if self.closed:
            raise RuntimeError("this world is closed: its context has ended, or an earlier call failed")
        call = pickle.dumps((fn, args, kwargs))
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            with suppress(OSError):  # a dead rank is detected when its answer is read
                connection.send_bytes(call)
        answers, silent = self._collect(self.timeout if timeout is None else timeout)
        if silent or any(answer.error is not None for answer in answers.values()):
            self._fail(answers, silent)
        self._signal(signal.SIGSTOP)  # else gloo's threads would poll a hundred times a second
        return [answers[rank].result for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the ranks and remove their files; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            _kill_group(process.pid)
        for process in self._processes:
            process.join(_ENDING)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._port}_*"):
            path.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        """Send a signal to all ranks, such as SIGSTOP between calls."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _collect(self, timeout: float) -> tuple[dict[int, _Answer], list[int]]:
        """Return the answers by rank, and the ranks without one at the timeout.

        After the first error the other ranks have at most ``_GRACE`` seconds.
        """
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers, sorted(pending.values())
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[call-overload]
                answers[rank] = self._receive(rank, connection)  # type: ignore[arg-type]
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers, []

    def _receive(self, rank: int, connection: Connection) -> _Answer:
        import torch

        try:
            answer: _Answer = torch.load(io.BytesIO(connection.recv_bytes()), map_location="cpu", weights_only=False)
            return answer
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_ENDING)
            return _Answer(error=f"the process ended with exit code {process.exitcode}\n{self._read_log(rank)}")

    def _fail(self, answers: Mapping[int, _Answer], silent: list[int]) -> NoReturn:
        """Close the world and raise the exception of the rank that failed first."""
        for rank in silent:  # faulthandler writes the traceback to the log, then the rank exits
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        end = time.monotonic() + _ENDING
        for rank in silent:
            self._processes[rank].join(max(0.0, end - time.monotonic()))
        failed = {rank: answer for rank, answer in answers.items() if answer.error is not None}
        errors = {rank: str(answer.error) for rank, answer in failed.items()}
        errors |= {rank: f"did not come back; it was here:\n{self._read_log(rank)}" for rank in silent}
        self.close()
        summary = WorldTimeout(errors) if silent else WorldFailure(errors)
        first = min(failed.values(), key=lambda answer: answer.stamp, default=None)
        if first is None or first.exception is None:
            raise summary
        raise pickle.loads(first.exception) from summary

    def _read_log(self, rank: int) -> str:
        path = self._folder / f"rank{rank}.log"
        return path.read_text(errors="replace")[-_LOG_TAIL:] if path.exists() else ""


class WorldPool(AbstractContextManager["WorldPool"]):
    """Worlds by size, started on demand and replaced after a failed call."""

    def __init__(self, *, timeout: float = DEFAULT_TIMEOUT, env: Mapping[str, str] | None = None):
        self._make = functools.partial(World, timeout=timeout, env=dict(env or {}))
        self._worlds: dict[int, World] = {}

    def get(self, world_size: int) -> World:
        world = self._worlds.get(world_size)
        if world is None or world.closed:
            world = self._worlds[world_size] = self._make(world_size)
        return world

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Answer:
    """A rank's result, or its error's text and, if it can be pickled, the exception."""

    result: Any = None
    error: str | None = None
    exception: bytes | None = None
    stamp: float = field(default_factory=time.monotonic)  # all processes of a machine share this clock


def _choose_context(accelerator: str) -> Any:
    """Fork ranks on CPUs; spawn them on GPUs, as a forked process cannot use CUDA."""
    if accelerator != "cpu":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _serve(connection: Connection, variables: dict[str, str], folder: str, timeout: float, modules: list[str]) -> None:
    """Join the group, then answer calls until the connection is closed."""
    gc.freeze()  # keeps the modules of the fork server out of collections, and their memory shared
    gc.set_threshold(20_000, 20, 50)  # there is a collection after each call
    os.setsid()  # a process group that can be killed together with the rank's child processes
    if sys.platform == "linux":
        die_with_parent()  # a stopped rank does not notice the end of its connection
        with suppress(OSError):  # a sandbox may not allow it
            # When a thread of gloo wakes another one, let it first release the lock of the connection, which the other
            # one would poll: that took a quarter of the time of four ranks on two cores.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ.clear()
    os.environ.update(variables)
    _redirect_output(f"{folder}/rank{variables['RANK']}.log")
    for name in modules:  # no-ops in a forked rank
        with suppress(ImportError):
            importlib.import_module(name)
    try:
        _join_group(folder, timeout)
    except Exception:  # noqa: BLE001 - the log has the traceback
        traceback.print_exc()
        os._exit(1)
    groups = _copy_groups()
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        connection.send_bytes(_execute_call(call))
        for name, value in groups.items():
            setattr(sys.modules["deepspeed.utils.groups"], name, copy.copy(value))
        gc.collect()  # engines are cycles
        gc.freeze()  # keeps the rest out of DeepSpeed's collections


def _execute_call(call: bytes) -> bytes:
    import torch

    try:
        fn, args, kwargs = pickle.loads(call)
        data = io.BytesIO()
        torch.save(_Answer(fn(*args, **kwargs)), data)
    except BaseException as error:  # noqa: BLE001 - the answer has it
        text, data = traceback.format_exc(), io.BytesIO()
        traceback.print_exc()
        torch.save(_Answer(error=text, exception=_pickle_error(error)), data)
    return data.getvalue()


def _pickle_error(error: BaseException) -> bytes | None:
    """Pickle an exception; None if that fails or if it is no `Exception`."""
    with suppress(Exception):  # the answer then only has the text
        data = pickle.dumps(error)
        if isinstance(pickle.loads(data), Exception):
            return data
    return None


def _join_group(folder: str, timeout: float) -> None:
    import deepspeed
    import torch

    backend = importlib.import_module("deepspeed.comm.torch")  # the attribute deepspeed.comm.torch is torch itself
    torch.set_num_threads(1)
    # Without the shared-memory op DeepSpeed uses gloo: no compilation of a minute, no 69 MB per rank in /dev/shm.
    if hasattr(backend, "build_shm_op"):
        vars(backend)["build_shm_op"] = lambda: None
    _share_gloo_device()
    with suppress(ImportError, AttributeError):  # DeepSpeed's CPU optimizers query it often, for a second each
        cpuinfo = vars(importlib.import_module("cpuinfo.cpuinfo"))
        cpuinfo["get_cpu_info_json"] = functools.cache(cpuinfo["get_cpu_info_json"])
    chosen = _choose_backend(int(os.environ["WORLD_SIZE"]))
    options: dict[str, Any] = {
        "init_method": f"file://{folder}/store",
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "timeout": timedelta(seconds=timeout),
    }
    if chosen == SHARED:  # DeepSpeed would bind the group to a device
        torch.distributed.init_process_group(chosen, **options)
    deepspeed.init_distributed(dist_backend=chosen, verbose=False, **options)
    _share_groups()


def _choose_backend(ranks: int) -> str:
    """Choose gloo, the accelerator's backend, or the backend of shared GPUs."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    if device.device_name() == "cpu":
        return "gloo"
    if device.device_name() != "cuda" or ranks <= device.device_count():
        return str(device.communication_backend_name())
    from .sharing import share_gpus

    share_gpus(SHARED)
    return SHARED


def _share_gloo_device() -> None:
    """Let all gloo groups of this process share a device, whose thread polls."""
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    device, made = gloo.create_default_device(), list[Any]()

    class SharedGloo(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any):
            options = gloo._Options()
            options._timeout, options._devices = timeout, [device]
            for name, value in more.items():  # of later releases
                setattr(options, name, value)
            super().__init__(store, rank, size, options)
            made.append(self)  # torch returns this object, with its class, while it is alive

    vars(distributed_c10d)["ProcessGroupGloo"] = SharedGloo


def _share_groups() -> None:
    """Let `new_group` return one group for the same ranks: engines destroy none."""
    import torch.distributed

    make, made = torch.distributed.new_group, dict[object, Any]()

    def new_group(ranks: Iterable[int] | None = None, *args: Any, **options: Any) -> Any:
        listed = None if ranks is None else sorted(ranks)
        if args or options.keys() - {"backend"}:
            return make(listed, *args, **options)
        key = (None if listed is None else tuple(listed)), options.get("backend")
        if key not in made:
            made[key] = make(listed, **options)
        return made[key]

    torch.distributed.new_group = new_group


def _copy_groups() -> dict[str, Any]:
    """Copy DeepSpeed's globals of parallel groups, which engines with an mpu change."""
    from deepspeed.utils import groups

    names = [name for name in vars(groups) if name in ("mpu", "mesh_device") or name.lstrip("_").isupper()]
    return {name: copy.copy(getattr(groups, name)) for name in names}


def _redirect_output(path: str) -> None:
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)  # the default action ends the process


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group exists once the rank has called setsid
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
