"""A Python that has just started lets a template run its program, and stays in front of it.

It happens while ``site`` runs, before anything that takes time is imported; so this module needs little, is loaded
without its package, and a template loads it in the same way. What the process was started with goes over a Unix socket:
command line, environment, descriptors, limits. From then on this process passes signals on, and ends as its other self
does. When there is no template, or it says no, the process goes on as if nothing had been asked.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

VARIABLE = "DEEPSPEED_UCP_TEMPLATE"
"""Environment: the name of a nursery's sockets."""

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables of a rank's environment. Slurm's is not among them: a batch script has it too."""

_LAUNCHERS = ("deepspeed", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch")
"""Programs of DeepSpeed's that start ranks, and that import all of it for that."""

EXPORTS = "DS_ENV_FILE"
"""Variable that DeepSpeed's launcher reads when it is imported."""

_LATE = frozenset({
    *RANKS, VARIABLE, "DEEPSPEED_UCP_LIFELINE", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE",
    "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "HABANA_VISIBLE_MODULES", EXPORTS, "_", "OLDPWD", "SHLVL",
})  # fmt: skip
_OF_LAUNCHES = (VARIABLE, "DEEPSPEED_UCP_LIFELINE", EXPORTS, "_", "OLDPWD", "SHLVL")
_LATE_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "GLOO_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")

_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch look for GPUs without a context, which no forked process could use; newer DeepSpeed sets it itself."""

_ANSWERED = 20.0
"""Seconds for a template to answer. One that comes later finds nobody, and its child ends before the program begins."""

_MOST_DESCRIPTORS = 250  # of one message on Linux: 253

request: dict[str, Any] = {}
"""How this process was started, where it had a nursery: what the next template is made from."""


def digest(value: str | None) -> str | None:
    """Of a variable's value, which others can compare and not read."""
    import hashlib  # takes time, and few need it

    return None if value is None else hashlib.sha256(os.fsencode(value)).hexdigest()


def is_late(name: str) -> bool:
    """Whether a variable differs from rank to rank, or from launch to launch, and is read by nothing while it is
    imported (a template looks whether that is so)."""
    return name in _LATE or name.startswith(_LATE_PREFIXES)


def is_of_ranks(name: str) -> bool:
    """Whether such a variable tells one rank from another, or one launch's ranks from another's."""
    return is_late(name) and name not in _OF_LAUNCHES


def is_of_devices(name: str) -> bool:
    """Whether torch reads such a variable to count the devices that are there."""
    return name in _DEVICES


def hides_devices(name: str, value: object) -> bool:
    """Whether a variable says that no device is to be seen: then what is imported takes the processor."""
    return name in _DEVICES and value in ("", "-1")


def hand_over() -> None:
    """Let a template run this process's program, if it is a rank's or the deepspeed launcher and there is a template:
    then this does not return. Else nothing has happened.

    From a rank's environment the nursery goes: what a rank starts is no rank.
    """
    nursery = os.environ.get(VARIABLE)
    if not nursery or request:
        return
    program = find_program()
    is_launcher = program is not None and os.path.basename(program[1]) in _LAUNCHERS
    if not is_launcher:
        if not any(os.environ.get(name) for name in RANKS):
            return
        del os.environ[VARIABLE]
    request.update(nursery=nursery, is_launcher=is_launcher, program=program, **describe())
    connection = reach(nursery, "start") if program is not None and _is_plain() else None
    if connection is None:
        return
    everything = signal.valid_signals()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    descriptors = list_inheritable()
    try:
        connection.settimeout(_ANSWERED)
        send(connection, {**request, "descriptors": descriptors}, descriptors)
        answer = receive(connection)[0]
    except (OSError, ValueError, EOFError):
        answer = {}
    if "pid" not in answer:
        connection.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    _stay(connection, descriptors, mask)


def find_program() -> tuple[str, str] | None:
    """What the interpreter is to run: ``("script", path)`` or ``("module", name)``; None for anything else."""
    before = len(sys.orig_argv) - len(sys.argv)
    if before < 1 or sys.orig_argv[before + 1 :] != sys.argv[1:]:
        return None
    word = sys.orig_argv[before]
    if sys.argv[0] == "-m":
        return ("module", word) if sys.orig_argv[before - 1] == "-m" else None
    return ("script", word) if sys.argv[0] == word and os.path.isfile(word) else None


def _find_options() -> list[str]:
    """The interpreter's own options; ``-u`` is none of them, as it tells of the streams alone."""
    before = len(sys.orig_argv) - len(sys.argv)
    words = sys.orig_argv[1 : before - 1 if sys.argv[0] == "-m" else before]
    return [word for word in words if word != "-u"]


def _is_plain() -> bool:
    """No memory policy (numactl), which a forked process would not have; the standard streams are open; no terminal is
    to be asked for commands afterwards."""
    try:
        with open("/proc/self/numa_maps", encoding="ascii") as stream:
            policy = (stream.readline().split() or ["", "default"])[1]
    except OSError:
        policy = "default"
    return policy == "default" and not sys.flags.inspect and {0, 1, 2} <= set(list_inheritable())


def describe() -> dict[str, Any]:
    """This process as it was started."""
    umask = os.umask(0)
    os.umask(umask)
    masks = dict(line.split(":\t") for line in _read("/proc/self/status").splitlines() if line.startswith("Sig"))
    return {
        "argv": sys.argv[1:],
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "options": _find_options(),
        "unbuffered": bool(getattr(sys.stdout, "write_through", False)),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": umask,
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "ignored": masks["SigIgn"],
        "blocked": masks["SigBlk"],
        "name": _read("/proc/self/comm").strip(),
        "place": describe_place(),
    }


_LIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE")


def describe_place() -> list[Any]:
    """What a forked process has from its parent for good: whose it is, what it may do, in which groups and namespaces
    it is, and when the kernel takes it for want of memory."""
    spaces = [_look(f"/proc/self/ns/{name}") for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")]
    root = os.stat("/")
    status = dict(line.split(":\t", 1) for line in _read("/proc/self/status").splitlines() if ":\t" in line)
    return [
        *(list(os.getresuid()), list(os.getresgid()), sorted(os.getgroups()), os.sched_getscheduler(0)),
        *(spaces, [root.st_dev, root.st_ino], _read("/proc/self/cgroup")),
        *(
            status.get(name)
            for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters")
        ),
        *(_read(f"/proc/self/{name}") for name in ("attr/current", "loginuid", "personality", "oom_score_adj")),
    ]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    except OSError:
        return ""


def _look(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def list_inheritable() -> list[int]:
    """Descriptors that a program is started with."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # of the listing itself
            continue
    return sorted(found)


def reach(nursery: str, what: str) -> socket.socket | None:
    """A connection to a nursery's socket; None where nobody is there, or somebody else."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(name_socket(nursery, what))
        if is_own(connection):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def name_socket(nursery: str, what: str) -> bytes:
    """An abstract name, of this network namespace: nothing of it lies in a folder. ``start``, ``learn``."""
    return f"\0ds_ucp/{nursery}/{what}".encode()


def is_own(connection: socket.socket) -> bool:
    """Whether the other end is this user's: names of that kind have no permissions."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", told)[1] == os.geteuid())


def accept(server: socket.socket) -> socket.socket | None:
    """A connection that has come, None where it is not this user's. It is to be heard when it says something: who has
    come may stand still, and others are not to wait for that.

    Raises:
        OSError: it fails.
    """
    connection, _ = server.accept()
    if is_own(connection):
        return connection
    connection.close()
    return None


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send an object, with descriptors; as far as the system takes it at once, none of it comes without the rest.

    Raises:
        OSError: the other end has gone, or there are too many.
    """
    data = json.dumps(message).encode()
    if len(descriptors) > _MOST_DESCRIPTORS:
        raise OSError(f"{len(descriptors)} descriptors")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    data = struct.pack("!I", len(data)) + data
    if rest := data[connection.sendmsg([data], rights) :]:  # who has it all may have done its work, and gone
        connection.sendall(rest)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What :func:`send` sent.

    Raises:
        EOFError: the other end has gone.
        OSError: it fails.
        ValueError: it is nothing of that kind.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, 4, _MOST_DESCRIPTORS)
    data = b""
    length = struct.unpack("!I", head)[0] if len(head) == 4 else 1
    while len(data) < length:
        more = connection.recv(length - len(data)) if len(head) == 4 else b""
        if not more:
            _close(descriptors)
            raise EOFError
        data += more
    return dict(json.loads(data)), list(descriptors)


def _close(descriptors: Iterable[int]) -> None:
    for each in descriptors:
        os.close(each)


def _stay(connection: socket.socket, descriptors: Sequence[int], mask: Iterable[int]) -> NoReturn:
    """Stand in front of the process that runs the program now."""

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            connection.send(bytes([number]))

    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in descriptors:  # whose other ends are to see it when the program closes them
        if each < 3:
            os.dup2(nothing, each)
        else:
            os.close(each)
    connection.settimeout(None)
    try:
        status = int(receive(connection)[0]["status"])
    except (OSError, ValueError, EOFError):
        status = int(signal.SIGKILL)  # with the template its children end
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    ended_by = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if ended_by != signal.SIGKILL:
        signal.signal(ended_by, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [ended_by])
    os.kill(os.getpid(), ended_by)
    os._exit(128 + ended_by)
