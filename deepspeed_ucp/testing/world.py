"""Worlds: N processes on this machine that form one process group and run functions for a test.

Importing torch and DeepSpeed costs seconds of CPU per process. The ranks are therefore forked from a fork server that
has imported both, and a world stays alive between calls: a fresh engine in a warm world takes well under a second.
This module imports neither of them, so that a pytest plugin may import it at start-up.
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
from .ports import hold_port

DEFAULT_TIMEOUT = 180.0
"""Seconds that one call on a world may take."""

SHARED = "host"
"""The backend of ranks that share GPUs (:mod:`.sharing`)."""

_GRACE = 5.0  # seconds that the other ranks have to come back once one has failed
_ENDING = 60.0  # seconds that a rank may take to end
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
"""What the fork server imports, and its ranks need not; what you add has to be there before the first world is made.

Beside torch and deepspeed it is what every torch optimizer, every ZeRO engine and every load import when the first one
is made, which costs three seconds per process. What a release does not have is passed over."""


class WorldFailure(RuntimeError):
    """At least one rank failed.

    Attributes:
        errors: per failed rank (by number), its traceback or what else became of it.
    """

    def __init__(self, errors: Mapping[int, str]):
        super().__init__(dict(errors))
        self.errors: dict[int, str] = self.args[0]

    def __str__(self) -> str:
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(self.errors.items()))


class WorldTimeout(WorldFailure, TimeoutError):
    """The ranks named in `errors` did not come back in time; the others' errors are listed beside them."""


class World(AbstractContextManager["World"]):
    """`world_size` processes in one process group, in which DeepSpeed is initialised.

    Every call of `run` runs one function on all ranks; state of the processes (modules, globals) lives on between
    calls, the engines of one call are collected after it and DeepSpeed's parallel groups are as they were before it.
    Process groups of the same ranks are made once and shared by all engines of a world. A world in which a call failed
    is closed.
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as a launcher sets them, and
    DS_ACCELERATOR is "cpu" unless the environment says otherwise, and the group's backend gloo. With "cuda" it is NCCL
    where each rank has a GPU of its own; else ranks share GPUs, and their collectives go through host memory.

    Args:
        world_size: number of ranks, at least 1.
        timeout: seconds that a call may take unless it says otherwise.
        env: further environment variables of the ranks.
    """

    def __init__(self, world_size: int, *, timeout: float = DEFAULT_TIMEOUT, env: Mapping[str, str] | None = None):
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self.closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="ucp-world-"))
        self._held = hold_port()  # it is in names in /dev/shm, too
        self._port = int(self._held.getsockname()[1])
        self._processes: list[mp.process.BaseProcess] = []
        self._connections: list[Connection] = []
        base = {"DS_ACCELERATOR": "cpu", **os.environ, "OMP_NUM_THREADS": "1"}
        base.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._port), WORLD_SIZE=str(world_size))
        # The DeepSpeed launcher's: the number of nodes and this one's; its checkpoint writers want them.
        base.update(LOCAL_WORLD_SIZE=str(world_size), CROSS_SIZE="1", CROSS_RANK="0", **(env or {}))
        base.pop("LOCAL_SIZE", None)  # the DeepSpeed launcher's: it would switch shared-memory collectives on
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

        `fn`, its arguments and its results travel by pickle, so `fn` is a function of an importable module (or a
        `functools.partial` of one).

        Raises:
            Exception: the exception of the rank that failed first; its cause is a `WorldFailure` with the tracebacks
                of all ranks that failed.
            WorldTimeout: a rank did not come back; all ranks have been killed.
            WorldFailure: a rank died, or its exception cannot be pickled.
        """
        if self.closed:
            raise RuntimeError("this world is closed: it was left, or an earlier call on it failed")
        call = pickle.dumps((fn, args, kwargs))
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            with suppress(OSError):  # a rank that has ended is found when its answer is read
                connection.send_bytes(call)
        answers, silent = self._collect(self.timeout if timeout is None else timeout)
        if silent or any(answer.error is not None for answer in answers.values()):
            self._fail(answers, silent)
        self._signal(signal.SIGSTOP)
        return [answers[rank].result for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the ranks and remove what they left in the temporary folder and in /dev/shm. May be called twice."""
        if self.closed:
            return
        self.closed = True
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            _kill_group(process)
        for process in self._processes:
            process.join(_ENDING)
        self._held.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._port}_*"):
            left.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        """Ranks are stopped between calls: gloo's threads look a hundred times a second whether there is work."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(_get_pid(process), number)

    def _collect(self, timeout: float) -> tuple[dict[int, _Answer], list[int]]:
        """The answers by rank, and the ranks that gave none in time."""
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
        try:
            answer: _Answer = pickle.loads(connection.recv_bytes())
            return answer
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_ENDING)
            return _Answer(error=f"the process ended with exit code {process.exitcode}\n{self._log(rank)}")

    def _fail(self, answers: Mapping[int, _Answer], silent: list[int]) -> NoReturn:
        """Close the world and raise what the rank that failed first raised, or a summary where nothing tells that."""
        for rank in silent:  # faulthandler writes where it hangs; then the rank ends
            os.kill(_get_pid(self._processes[rank]), signal.SIGUSR1)
        end = time.monotonic() + _ENDING
        for rank in silent:
            self._processes[rank].join(max(0.0, end - time.monotonic()))
        failed = {rank: answer for rank, answer in answers.items() if answer.error is not None}
        errors = {rank: str(answer.error) for rank, answer in failed.items()}
        errors |= {rank: f"did not come back; it was here:\n{self._log(rank)}" for rank in silent}
        self.close()
        summary = WorldTimeout(errors) if silent else WorldFailure(errors)
        first = min(failed.values(), key=lambda answer: answer.stamp, default=None)
        if first is None or first.exception is None:
            raise summary
        raise pickle.loads(first.exception) from summary

    def _log(self, rank: int) -> str:
        path = _log_path(self._folder, rank)
        return path.read_text(errors="replace")[-_LOG_TAIL:] if path.exists() else ""


class WorldPool(AbstractContextManager["WorldPool"]):
    """Worlds by size, started when first asked for, replaced when a call broke one, closed together."""

    def __init__(self, *, timeout: float = DEFAULT_TIMEOUT, env: Mapping[str, str] | None = None):
        self._timeout = timeout
        self._env = dict(env or {})
        self._worlds: dict[int, World] = {}

    def get(self, world_size: int) -> World:
        """The live world of that size."""
        world = self._worlds.get(world_size)
        if world is None or world.closed:
            world = self._worlds[world_size] = World(world_size, timeout=self._timeout, env=self._env)
        return world

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Answer:
    """What one rank sends back: a result, or an error's text with the exception itself where it can be pickled."""

    result: Any = None
    error: str | None = None
    exception: bytes | None = None
    stamp: float = field(default_factory=time.monotonic)  # one clock for all processes of a machine


def _choose_context(accelerator: str) -> Any:
    """How ranks start: forked; on GPUs new, as a fork of what has looked for a GPU can use none."""
    if accelerator != "cpu":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _serve(connection: Connection, variables: dict[str, str], folder: str, timeout: float, modules: list[str]) -> None:
    """The life of a rank: join the group, then answer calls until the other end goes away."""
    gc.freeze()  # what the fork server has imported is nobody's garbage, and shared as long as it is not touched
    gc.set_threshold(20_000, 20, 50)  # what a call leaves is collected after it
    os.setsid()  # a group of its own, so that what it starts (a checkpoint writer's process) can be killed with it
    if sys.platform == "linux":
        die_with_parent()  # the fork server: a stopped rank does not notice that its connection ends
    _finish_before_others_wake()
    os.environ.clear()
    os.environ.update(variables)
    _redirect_output(_log_path(Path(folder), int(variables["RANK"])))
    for name in modules:  # they are there already in a rank that was forked
        with suppress(ImportError):
            importlib.import_module(name)
    try:
        _join_group(folder, timeout)
    except Exception:  # noqa: BLE001 - whatever it was, the log has it and the other end sees the exit code
        traceback.print_exc()
        os._exit(1)
    groups = _copy_groups()
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        connection.send_bytes(_answer(call))
        _restore_groups(groups)
        gc.collect()  # engines are cycles
        gc.freeze()  # modules and what they keep, more with each call: DeepSpeed's own collections walk it no more


def _finish_before_others_wake() -> None:
    """Have Linux let this process's threads go on when others wake; its share of the processors stays the same.

    A thread that sends by gloo wakes the one that receives, while it holds the lock of the connection. Had it to make
    room there and then, the loop of gloo in its own process would try that lock without a pause until it is back: four
    ranks on two cores spent a quarter of their time with that.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox that knows no policies
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _answer(call: bytes) -> bytes:
    try:
        fn, args, kwargs = pickle.loads(call)
        data = io.BytesIO()
        _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(_Answer(fn(*args, **kwargs)))
        return data.getvalue()
    except BaseException as error:  # noqa: BLE001 - whatever ended the function is the answer
        text = traceback.format_exc()
        traceback.print_exc()
        return pickle.dumps(_Answer(error=text, exception=_pickled(error)))


class _Pickler(pickle.Pickler):
    """Plain tensors as their bytes, to be a CPU's: torch's own way writes and reads a whole file for each of them."""

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if type(obj) is not torch.Tensor or obj.is_meta or obj.layout is not torch.strided:
            return NotImplemented
        if obj.requires_grad or vars(obj) or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return NotImplemented
        return _make_tensor, (
            obj.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(),
            obj.dtype,
            tuple(obj.shape),
        )


def _make_tensor(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _pickled(error: BaseException) -> bytes | None:
    """The exception if it survives a round trip. KeyboardInterrupt and the like do not leave the rank."""
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - any failure means that the text has to do
        return None
    return data


def _join_group(folder: str, timeout: float) -> None:
    import deepspeed
    import torch

    backend = importlib.import_module("deepspeed.comm.torch")  # deepspeed.comm's attribute torch is torch itself
    torch.set_num_threads(1)
    # Without the shared-memory op DeepSpeed falls back to gloo: nothing to compile (a minute on a fresh machine), and
    # no 69 MB per rank left in /dev/shm.
    if hasattr(backend, "build_shm_op"):
        vars(backend)["build_shm_op"] = lambda: None
    _share_device()
    _ask_for_the_processor_once()
    chosen = _choose_backend(int(os.environ["WORLD_SIZE"]))
    options: dict[str, Any] = {
        "init_method": f"file://{folder}/store",
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "timeout": timedelta(seconds=timeout),
    }
    if chosen == SHARED:  # DeepSpeed would bind it to a device, which it has not
        torch.distributed.init_process_group(chosen, **options)
    deepspeed.init_distributed(dist_backend=chosen, verbose=False, **options)
    _share_groups()


def _choose_backend(ranks: int) -> str:
    """On CPUs gloo; the accelerator's own where each rank has a device, else one that lets ranks share a GPU."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    if device.device_name() == "cpu":
        return "gloo"
    if device.device_name() != "cuda" or ranks <= device.device_count():
        return str(device.communication_backend_name())
    from .sharing import share_gpus

    share_gpus(SHARED)
    return SHARED


def _ask_for_the_processor_once() -> None:
    """DeepSpeed's CPU optimizers have py-cpuinfo start processes of its own for each answer, a second every time."""
    with suppress(ImportError, AttributeError):
        cpuinfo = vars(importlib.import_module("cpuinfo.cpuinfo"))
        cpuinfo["get_cpu_info_json"] = functools.cache(cpuinfo["get_cpu_info_json"])


def _share_device() -> None:
    """Let all gloo groups of this process go through one device.

    Each group would have one of its own, with a thread that looks a hundred times a second whether there is anything to
    do: worlds that do nothing would take a fifth of a core.
    """
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    device, made = gloo.create_default_device(), list[Any]()

    class SharedGloo(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any):
            options = gloo._Options()
            options._timeout, options._devices = timeout, [device]
            for name, value in more.items():  # those of later releases
                setattr(options, name, value)
            super().__init__(store, rank, size, options)
            made.append(self)  # as long as it lives torch gives this object back, which knows its class

    vars(distributed_c10d)["ProcessGroupGloo"] = SharedGloo


def _share_groups() -> None:
    """Let `torch.distributed.new_group` give the same group for the same ranks.

    An engine makes a dozen groups and never destroys them, and each has threads and connections.
    """
    import torch.distributed

    make, made = torch.distributed.new_group, dict[object, Any]()

    def new_group(ranks: Iterable[int] | None = None, *args: Any, **options: Any) -> Any:
        key = None if ranks is None else tuple(sorted(ranks))
        if args or options.keys() - {"backend"}:
            return make(ranks if key is None else list(key), *args, **options)
        if (key, options.get("backend")) not in made:
            made[key, options.get("backend")] = make(ranks if key is None else list(key), **options)
        return made[key, options.get("backend")]

    torch.distributed.new_group = new_group


def _copy_groups() -> dict[str, Any]:
    """DeepSpeed's globals of parallel groups: an engine with an mpu leaves its degrees to the next one's."""
    from deepspeed.utils import groups

    names = [name for name in vars(groups) if name in ("mpu", "mesh_device") or name.lstrip("_").isupper()]
    return {name: copy.copy(getattr(groups, name)) for name in names}


def _restore_groups(noted: Mapping[str, Any]) -> None:
    from deepspeed.utils import groups

    for name, value in noted.items():
        setattr(groups, name, copy.copy(value))


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)  # and the process ends


def _log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _kill_group(process: mp.process.BaseProcess) -> None:
    for kill in (os.killpg, os.kill):  # the group is only there once the rank has called setsid
        try:
            kill(_get_pid(process), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _get_pid(process: mp.process.BaseProcess) -> int:
    if process.pid is None:
        raise RuntimeError(f"{process.name} was never started")
    return process.pid
