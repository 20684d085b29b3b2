"""What a forked process takes on of the one that handed itself over: descriptors, limits, signals, streams, names."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SET_DEATH_SIGNAL, _SET_MM, _SET_MM_MAP = 1, 35, 14
"""Of Linux's ``prctl``."""

_SYS_NICE = 23
"""The capability to raise a priority."""


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Give way to whatever else runs, where there is a way back: a forked process would keep the priority."""
    former = os.getpriority(os.PRIO_PROCESS, 0)
    if not _may_raise(former):
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, former)


def _may_raise(nice: int) -> bool:
    with open("/proc/self/status", encoding="utf-8") as stream:
        held = next((int(line.split()[1], 16) for line in stream if line.startswith("CapEff")), 0)
    return bool(held >> _SYS_NICE & 1) or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - nice


def measure() -> dict[str, float]:
    """This process's memory in MB: its share, and what it holds alone."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError), open("/proc/self/smaps_rollup", encoding="ascii") as stream:
        for line in stream:
            name, _, value = line.partition(":")
            if value.strip().endswith("kB"):
                sizes[name] = int(value.split()[0])
    alone = sizes.get("Private_Clean", 0) + sizes.get("Private_Dirty", 0)
    return {"megabytes": round(sizes.get("Pss", 0) / 1000), "megabytes_alone": round(alone / 1000)}


def read_mask(text: str) -> list[int]:
    """Signals of a mask in hexadecimal, as ``/proc`` has it."""
    return [number + 1 for number in range(64) if int(text, 16) >> number & 1]


def take_on(request: Mapping[str, Any], descriptors: Sequence[int], connection: socket.socket) -> socket.socket:
    """Take on descriptors, session, limits, place and signals; the connection, out of the way of the descriptors.

    Raises:
        OSError: it is not allowed to.
        ValueError: a limit cannot be had.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid()
    numbers = request["descriptors"]
    above = max(numbers) + 1
    kept = socket.socket(fileno=fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, above))
    connection.close()
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for source, number in zip(moved, numbers, strict=True):
        os.dup2(source, number)
        os.close(source)
    for name, values in request["limits"].items():
        if resource.getrlimit(getattr(resource, name)) != tuple(values):
            resource.setrlimit(getattr(resource, name), tuple(values))
    if os.getpriority(os.PRIO_PROCESS, 0) != request["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.sched_setaffinity(0, request["affinity"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    _ignore(set(read_mask(request["ignored"])))
    _renew_streams(unbuffered=request["unbuffered"])
    return kept


def _ignore(ignored: set[int]) -> None:
    """Ignore these signals; those that an import handles stay."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler = signal.getsignal(number)
        if number in ignored:
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, signal.SIG_IGN)
        elif handler == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _renew_streams(*, unbuffered: bool) -> None:
    """Make the standard streams as Python does when it starts; the objects stay, as imports may have kept them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream: Any = getattr(sys, f"__{name}__")
        encoding, errors = stream.encoding, stream.errors
        bare = unbuffered and mode == "w"
        buffer: Any = open(number, f"{mode}b", buffering=0 if bare else -1, closefd=False)  # noqa: SIM115
        raw = buffer if isinstance(buffer, io.FileIO) else buffer.raw
        raw.name = f"<{name}>"
        lines = not unbuffered and (raw.isatty() or name == "stderr")
        stream.__init__(buffer, encoding, errors, "\n", line_buffering=lines, write_through=unbuffered)
        stream.mode = mode


def end_with(parent: int) -> None:
    """End when a parent does (Linux).

    Raises:
        PermissionError: the system does not let it.
        ProcessLookupError: it has ended.
    """
    if ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        raise PermissionError("prctl")
    if os.getppid() != parent:
        raise ProcessLookupError(parent)


def set_environment(variables: Mapping[str, str]) -> None:
    """These variables, and no others."""
    os.environ.clear()
    os.environ.update(variables)


_generators: list[random.Random] = []
"""Of Python's, those that imports have seeded with the system's randomness."""


@contextlib.contextmanager
def noting_generators() -> Iterator[None]:
    """Note generators that are to draw something else in each process (:func:`reseed`), as that of Hugging Face's
    datasets, which names files."""
    former = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        former(self, a, version)
        _generators[:] = [each for each in _generators if each is not self] + ([self] if a is None else [])

    random.Random.seed = seed  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = former  # type: ignore[method-assign]


def reseed() -> None:
    """Let what draws by itself draw as in a fresh process; :mod:`random` sees to its own generator itself."""
    for each in _generators:
        each.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if multiprocessing := sys.modules.get("multiprocessing.process"):
        multiprocessing.current_process()._config["authkey"] = multiprocessing.AuthenticationString(os.urandom(32))


class _Map(ctypes.Structure):
    """Of ``linux/prctl.h``: ``struct prctl_mm_map``."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    ]  # fmt: skip


_kept: list[mmap.mmap] = []
"""Where the command line lies that others see."""


def show_as(request: Mapping[str, Any]) -> None:
    """Have ``ps`` and ``/proc`` show the command line, the environment and the name of the process that handed itself
    over; where the system does not let it, they show the template's."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as stream:
        stream.write(request["name"])
    words = b"".join(os.fsencode(word) + b"\0" for word in request["orig_argv"])
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in request["environment"].items())
    area = mmap.mmap(-1, len(words) + len(variables) + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[: len(words) + len(variables)] = words + variables
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    _kept.append(area)
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stream:
        fields = stream.read().rpartition(")")[2].split()
    places = {"start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47}
    told = {name: int(fields[at - 3]) for name, at in places.items()}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    between = start + len(words)
    layout = _Map(
        **told, brk=libc.sbrk(0), arg_start=start, arg_end=between, env_start=between, env_end=between + len(variables),
        auxv=0, auxv_size=0, exe_fd=-1,
    )  # fmt: skip
    size = ctypes.c_ulong(ctypes.sizeof(layout))
    libc.prctl(_SET_MM, ctypes.c_ulong(_SET_MM_MAP), ctypes.byref(layout), size, ctypes.c_ulong(0))
