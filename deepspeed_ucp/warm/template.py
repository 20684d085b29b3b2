"""The process that ranks are forked from: a script, started by a nursery, that needs nothing of its own package.

It imports what a rank has told, looks whether a fork of it is as good as a fresh start, and then waits for processes
that hand themselves over (:mod:`deepspeed_ucp.warm.handover`). A child takes on all that its counterpart was started
with, and returns to the top level, from where the program runs and ends as any other.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder, SourceFileLoader
from types import FrameType, ModuleType, TracebackType
from typing import Any


def _load_beside(name: str) -> Any:
    """A module of this folder under its own name, without its package, which a program may not want imported."""
    full = f"deepspeed_ucp.warm.{name}"
    spec = importlib.util.spec_from_file_location(full, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(full)
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


handover = _load_beside("handover")
process = _load_beside("process")

_FREED = 30.0
"""Seconds for the template before to let go of the socket."""

_THREADS = "OMP_NUM_THREADS"
"""Variable without which libraries have as many threads as there were processors when they were loaded."""

_COUNTS = 1000

_FLAGS, _EXITING = 6, 4
"""Of what ``/proc`` tells of a thread behind its name: its flags, and that of one that is ending."""

_LOOK_AGAIN = 1.0
"""Seconds for which sources that have not changed are taken not to have."""

_TICK = 0.01
"""Seconds that the times of files may be behind the clock."""

_COUNTING = ("deepspeed", "torch")
"""Packages that count devices while they are imported, to see whether there are any (DeepSpeed: which accelerator to
take); how many there are each process counts anew."""


class Unfit(Exception):
    """No template can be had.

    Attributes:
        packages: without them there may be one.
    """

    def __init__(self, reason: str, *modules: str) -> None:
        super().__init__(reason)
        self.packages = [name.partition(".")[0] for name in modules]


class Sources:
    """The files that what was imported came from, and the folders of installed packages.

    Args:
        began: when the first one was imported, in seconds since the epoch: of what was changed since then nobody knows
            which of both was imported.
    """

    def __init__(self, began: float) -> None:
        self._looked = -_LOOK_AGAIN
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        installed = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
        paths = [path for path in files if isinstance(path, str)]
        self._stamps = {path: self._stamp(path, began - _TICK) for path in [*paths, *installed]}

    def find_changed(self) -> str | None:
        """One that is not as it was."""
        if time.monotonic() < self._looked + _LOOK_AGAIN:
            return None
        changed = next((path for path, was in self._stamps.items() if self._stamp(path) != was), None)
        self._looked = time.monotonic() if changed is None else self._looked
        return changed

    @staticmethod
    def _stamp(path: str, began: float = float("inf")) -> tuple[int, ...] | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return None if found.st_ctime > began else (found.st_mtime_ns, found.st_size, found.st_ino)


class _Reads:
    """Notes which variables are read while something is imported, and which module reads a rank's own: it would take
    another rank for this one."""

    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None
        self.names = set[str]()
        self._own = os._Environ.__getitem__

    def __enter__(self) -> _Reads:
        def read(environment: Any, name: Any) -> Any:
            self.names.add(name)
            if self.found is None and isinstance(name, str) and handover.is_of_ranks(name):
                module = _find_importing(sys._getframe(1)) or ""
                if not (handover.is_of_devices(name) and module.partition(".")[0] in _COUNTING):
                    self.found = (module, name)
            return self._own(environment, name)

        os._Environ.__getitem__ = read  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        os._Environ.__getitem__ = self._own  # type: ignore[method-assign]


def _find_importing(frame: FrameType | None) -> str | None:
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return None if frame is None else frame.f_globals.get("__name__")


def import_all(recipe: Mapping[str, Any]) -> int:
    """Import what is there of a rank's modules; how many modules there are then.

    Raises:
        Unfit: one is not as a rank would have it.
    """
    os.environ[handover.NVML] = "1"
    with process.noting_generators(), _Reads() as reads:
        for name in recipe["modules"]:
            if name in sys.modules:
                continue
            threads, late = _count_threads(), reads.found
            with contextlib.suppress(Exception, SystemExit):  # then a rank imports it itself, and sees why
                importlib.import_module(name)
            if _count_threads() > threads and _count_threads_after_fork() > threads:
                raise Unfit(f"the import of {name} starts threads", name)
            if reads.found != late and reads.found is not None:
                raise Unfit("{} reads {} when it is imported".format(*reads.found), reads.found[0], name)
    own = {name for name, value in recipe["set"].items() if os.environ.get(name) != value}
    seen = {name: value for name, value in recipe["values"].items() if name in reads.names}
    own |= {name for name, value in seen.items() if handover.digest(os.environ.get(name)) != value}
    for name in sorted(own):
        raise Unfit(f"the script sets {name} itself before it imports what reads it: set it outside of the script")
    for name, path in recipe["origins"].items():
        if name in sys.modules and (found := getattr(sys.modules[name], "__file__", None)) != path:
            raise Unfit(f"{name} is {path} for the script, and {found} here")
    return len(sys.modules)


def _count_threads() -> int:
    """Without those that are ending: one that has been joined may be there for a moment more."""
    told = (handover._read(f"/proc/self/task/{name}/stat") for name in os.listdir("/proc/self/task"))
    return sum(not int(stat.rpartition(")")[2].split()[_FLAGS]) & _EXITING for stat in told if stat)


def _count_threads_after_fork() -> int:
    """Threads of BLAS end when their process forks."""
    pid = _fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return _count_threads()


def check(seconds: float) -> None:
    """Look whether forked processes can do what fresh ones can.

    Args:
        seconds: for one of them to show that it can compute.

    Raises:
        Unfit: they cannot.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise Unfit("an import has touched the GPU")
    _end_counting()
    opened = [handover._look(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    if touched := [path for path in opened if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/davinci"))]:
        raise Unfit(f"an import has opened {touched[0]}")
    if handover._read(f"/proc/self/task/{os.getpid()}/children").strip():
        raise Unfit("an import has started a process")
    parent, pid = os.getpid(), _fork()
    if pid == 0:
        os._exit(_try(parent))
    until = time.monotonic() + seconds
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise Unfit("a forked process hangs when it computes: an import ran a parallel operation")
    if ended[1]:
        raise Unfit("a forked process cannot use the GPU" if ended[1] == 2 << 8 else "a forked process cannot compute")
    if _count_threads() > 1:
        raise Unfit("an import has started threads")


def _end_counting() -> None:
    """Have NVIDIA's library, by which torch has counted GPUs, close what it has opened; a child that counts opens it
    again."""
    with contextlib.suppress(OSError, AttributeError):  # it has not been loaded
        library = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        for _ in range(_COUNTS):
            if library.nvmlShutdown():  # as often as it was begun, then an error
                return


def _try(parent: int) -> int:
    """Of a child: the exit code; 2 where it could not use the GPU."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    try:
        process.end_with(parent)
        if numpy is not None:
            numpy.ones((300, 300)) @ numpy.ones((300, 300))
        if torch is not None:
            if getattr(torch._C, "_cuda_isInBadFork", bool)():
                return 2
            torch.ones(1 << 20).add_(1).sum().item()
    except Exception:  # noqa: BLE001 - whatever it is, fresh starts may be spared it
        return 1
    return 0


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 counts BLAS's threads before they end
        return os.fork()


def _try_to_fork() -> tuple[int | None, str | None]:
    """A child's number, 0 in the child; where there is none, why: the children that there are go on."""
    try:
        return _fork(), None
    except OSError as error:
        return None, f"no process can be forked: {error.strerror}"


class Template:
    """Waits for processes that hand themselves over.

    Args:
        nursery: whose template it is; its end is the template's, and that of all children.
        recipe: what it was made from.
        before: the environment before anything was imported.
        sources: what was imported.
    """

    def __init__(
        self, nursery: socket.socket, recipe: Mapping[str, Any], before: Mapping[str, str], sources: Sources
    ) -> None:
        self.nursery, self.recipe, self.before = nursery, recipe, before
        self.after, self.pid = dict(os.environ), os.getpid()
        self.place, self.sources = handover.describe_place(), sources
        self.processors = len(os.sched_getaffinity(0))
        self.limits = {name: resource.getrlimit(getattr(resource, name)) for name in handover._LIMITS}
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = _listen(recipe["nursery"])
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._children: dict[int, socket.socket] = {}
        self._former = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for each, hear in ((nursery, self._obey), (self._listener, self._accept), (self._woken, self._bury)):
            self._selector.register(each, selectors.EVENT_READ, hear)

    def serve(self) -> Callable[[], None]:
        """Until the nursery is done: does not return. In a child: what runs its program."""
        while self._listener is not None or self._children:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is not key:
                    continue  # what has just been done has let go of it
                run: Callable[[], None] | None = key.data()  # what hears it; only an answer, in a child, has a program
                if run is not None:
                    return run
        os._exit(0)

    def _obey(self) -> None:
        """The nursery's one word is that there is another template now; or it has gone."""
        if self.nursery.recv(1) == b"":
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        if self._listener is not None and (connection := handover.accept(self._listener)) is not None:
            self._selector.register(connection, selectors.EVENT_READ, partial(self._answer, connection))

    def _answer(self, connection: socket.socket) -> Callable[[], None] | None:
        self._selector.unregister(connection)
        connection.settimeout(5.0)
        descriptors: list[int] = []
        pid = None
        try:
            request, descriptors = handover.receive(connection)
            why = self.find_difference(request)
            if why is None:
                pid, why = _try_to_fork()
            if why is not None:
                # The nursery first: what the rank tells it later is of a start that was refused.
                handover.send(self.nursery, {"refused": why, "changed": self.sources.find_changed() is not None})
                handover.send(connection, {"refused": why})
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass  # it asked for nothing, or has gone
        if pid == 0:
            return self._become(request, descriptors, connection)
        for each in descriptors:
            os.close(each)
        if pid is None:
            connection.close()
            return None
        self._children[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, partial(self._pass_on, pid, connection))
        return None

    def find_difference(self, request: Mapping[str, Any]) -> str | None:
        """Why a process of this template would not be as it was asked for; None where it would."""
        launches = request["is_launcher"]
        for name in ("executable", "options", "cwd", *(() if launches else ("program",))):
            if request[name] != self.recipe[name]:
                return f"another {name}: {request[name]}"
        asked, held = request["environment"], self.before
        names = {name for name in (asked if launches else {*asked, *held}) if not handover.is_late(name)}
        names |= {handover.EXPORTS} if launches else set()
        if not launches:
            names |= {name for env in (asked, held) for name in env if handover.hides_devices(name, env[name])}
        if other := sorted(name for name in names if asked.get(name) != held.get(name)):
            return f"another value of {other[0]}"
        if not launches and asked.get(_THREADS) is None and len(request["affinity"]) != self.processors:
            return f"another number of processors: {len(request['affinity'])}"
        if request["place"] != self.place:
            return "another user, group, namespace, control group, capability or oom_score_adj"
        if any(number > 2 and _is_open(number) for number in request["descriptors"]):
            return "a descriptor that is in use here"
        if (path := _find_in_place_of_ours(_find_first_folders(request))) is not None:
            return f"{path} is there, and a module of that name was imported from elsewhere"
        changed = self.sources.find_changed()
        return None if changed is None else f"{changed} has changed"

    def _bury(self) -> None:
        """Tell of every child that has ended."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._children.pop(pid)
            with contextlib.suppress(OSError):
                handover.send(connection, {"status": status})
            with contextlib.suppress(KeyError):  # whose other end had gone before
                self._selector.unregister(connection)
            connection.close()

    def _pass_on(self, pid: int, connection: socket.socket) -> None:
        """Signals for a child; without who is in front of it, it ends."""
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            self._selector.unregister(connection)
        for number in numbers or [signal.SIGKILL]:
            if pid in self._children:
                os.kill(pid, number)

    def _become(self, request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> Callable[[], None]:
        """In a child: take everything on, and tell that it is done; what runs the program."""
        try:
            self._stop_listening_here()
            connection = process.take_on(request, descriptors, connection)
            process.end_with(self.pid)
            process.set_environment({**self._find_set_by_imports(request), **request["environment"]})
            process.show_as(request)
            process.reseed()
            handover.request.update({} if request["is_launcher"] else request)
            run = prepare(request)
            connection.settimeout(5.0)
            handover.send(connection, {"pid": os.getpid()})
            connection.close()
        except BaseException:  # noqa: BLE001 - the process that handed itself over goes on by itself
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, process.read_mask(request["blocked"]))
        if handover.request and (heartbeat := sys.modules.get("deepspeed_ucp.heartbeat")):
            heartbeat.note_watcher()
            heartbeat.connect()
        return run

    def _find_set_by_imports(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Variables that a fresh process would have once it has imported all of this; what a launcher's imports set has
        gone on to the ranks, and so into what this template was started with."""
        if request["is_launcher"]:
            return {name: value for name, value in self.before.items() if not handover.is_late(name)}
        return {name: value for name, value in self.after.items() if name not in self.before}

    def _stop_listening_here(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._former)
        heard = [key.fileobj for key in self._selector.get_map().values() if isinstance(key.fileobj, socket.socket)]
        self._selector.close()
        for each in (*heard, self._wake, *self._children.values()):
            each.close()


def _listen(nursery: str) -> socket.socket:
    """The socket that there is one of: the template before closes it.

    Raises:
        OSError: it does not.
    """
    listener = socket.socket(socket.AF_UNIX)
    until = time.monotonic() + _FREED
    while True:
        try:
            listener.bind(handover.name_socket(nursery, "start"))
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            listener.listen(1024)
            return listener


def _is_open(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _find_folder(request: Mapping[str, Any]) -> list[str]:
    """The folder of a program, which comes first where modules are looked for; none with ``-P``."""
    kind, name = request["program"]
    if getattr(sys.flags, "safe_path", False):
        return []
    return [os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(name))]


def _find_first_folders(request: Mapping[str, Any]) -> list[str]:
    """The folders in which a program's modules are looked for before those of the interpreter."""
    at = sys.path.index(library) if (library := os.path.dirname(os.__file__)) in sys.path else 0
    return [*_find_folder(request), *sys.path[:at]]


def _find_in_place_of_ours(folders: Sequence[str]) -> str | None:
    """A file that has come into one of the folders, and that a fresh process would import in the place of what has been
    imported here."""
    left = {
        name: getattr(sys.modules[name], "__file__", None) for name in sys.modules.keys() - {"__main__", "__mp_main__"}
    }
    for folder in filter(os.path.isdir, folders):
        for name in {entry.partition(".")[0] for entry in os.listdir(folder)} & left.keys():
            spec = PathFinder.find_spec(name, [folder])
            if spec is None or spec.loader is None or spec.origin is None:
                continue
            own = left.pop(name)
            if own is not None and os.path.exists(own) and not os.path.samefile(own, spec.origin):
                return spec.origin
    return None


def prepare(request: Mapping[str, Any]) -> Callable[[], None]:
    """Make ``__main__``, ``sys.argv`` and ``sys.path`` those of a program; what runs it.

    Raises:
        OSError: it cannot be read.
    """
    kind, name = request["program"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if "__mp_main__" in sys.modules:  # multiprocessing's name for it
        sys.modules["__mp_main__"] = main
    bare = {"__package__": None, "__loader__": None, "__spec__": None, "__builtins__": builtins}
    vars(main).update({**bare, **({"__annotations__": {}} if sys.version_info < (3, 14) else {})})
    sys.orig_argv[:] = request["orig_argv"]
    is_module = kind == "module"
    sys.argv[:] = ["-m" if is_module else name, *request["argv"]]
    sys.path[:0] = _find_folder(request)
    if is_module:
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # else runpy warns that it has been imported
        return lambda: runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    path = os.path.abspath(name)
    with io.open_code(path) as stream:
        source = stream.read()
    vars(main).update(__loader__=SourceFileLoader("__main__", path), __file__=path, __cached__=None)
    return lambda: exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def serve() -> Callable[[], None]:
    """A template's life; in a child: what runs its program."""
    nursery = socket.socket(fileno=int(sys.argv[1]))
    recipe = json.load(sys.stdin.buffer)
    del sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1]
    with contextlib.suppress(OSError):  # another machine's processors
        os.sched_setaffinity(0, recipe["affinity"])
    began, clock, before = time.monotonic(), time.time(), dict(os.environ)
    try:
        with process.in_background():
            count = import_all(recipe)
            check(recipe["trial"])
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        gc.collect()
        gc.freeze()
    except Exception as error:  # noqa: BLE001 - whatever an import has done, fresh starts are left
        reason = str(error) if isinstance(error, Unfit) else repr(error)
        handover.send(nursery, {"unfit": reason, "packages": getattr(error, "packages", [])})
        os._exit(0)
    told = {"modules": count, "seconds": round(time.monotonic() - began, 2), **process.measure()}
    handover.send(nursery, {"built": list(sys.modules)})  # and the one before lets go of the socket
    template = Template(nursery, recipe, before, Sources(clock))
    handover.send(nursery, {"ready": told})
    return template.serve()


def main() -> None:
    """Serve; in a child, run the program, whose tracebacks begin with itself."""
    run = serve()
    try:
        run()
    except BaseException:
        hook = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            sys.excepthook = hook
            hook(kind, error.with_traceback(_strip(trace)), _strip(trace))

        sys.excepthook = show
        raise


def _strip(trace: TracebackType | None) -> TracebackType | None:
    """Without this file's frames, which come first."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
