"""A program forked from a template sees, does and ends as one that has started by itself."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import pytest

from tests.supervise.standins import is_running, wait_until
from tests.warm.kit import IS_WARM, LONGEST, Kit, build

SEE = '''"""Words."""
import atexit, gc, json, locale, multiprocessing, os, random, resource, signal, sys, threading, time, warnings
import numpy

def stream(each):
    raw = getattr(each.buffer, "raw", each.buffer)
    return [type(each.buffer).__name__, each.encoding, each.errors, each.line_buffering, each.write_through, each.mode,
            each.name, raw.name, each.newlines, each.fileno(), each.isatty(),
            each is getattr(sys, "__%s__" % raw.name[1:-1])]

def link(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
    except OSError:
        return None

def inherits(number):
    return link(number) is not None and os.get_inheritable(number)

def read(name):
    return open(f"/proc/self/{name}", errors="surrogateescape").read()

main = sys.modules["__main__"]
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "executable": sys.executable, "flags": repr(sys.flags),
    "warnoptions": sys.warnoptions, "xoptions": sys._xoptions, "path": sys.path, "filters": repr(warnings.filters),
    "environment": dict(os.environ), "cwd": os.getcwd(), "umask": os.umask(0),
    "affinity": list(os.sched_getaffinity(0)),
    "descriptors": {n: link(n) for n in sorted(map(int, os.listdir("/proc/self/fd"))) if inherits(n)},
    "handlers": {int(n): repr(signal.getsignal(n)).partition(" at ")[0] for n in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "wakeup": signal.set_wakeup_fd(-1),
    "status": [line for line in read("status").splitlines() if line[:4] in ("SigB", "SigI", "SigC", "CapE", "Thre")],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT")},
    "nice": os.getpriority(0, 0), "scheduler": os.sched_getscheduler(0), "ids": [os.getresuid(), os.getgroups()],
    "main": {n: str(v).partition(" at 0x")[0] for n, v in vars(main).items() if n[:2] == "__" and "warn" not in n},
    "loader": vars(main)["__loader__"].path,
    "same": [main is sys.modules["__mp_main__"], main.__dict__ is globals()], "threads": threading.active_count(),
    "first": threading.current_thread() is threading.main_thread(), "collects": gc.isenabled(),
    "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)], "locale": locale.setlocale(locale.LC_ALL),
    "command": read("cmdline"), "started with": sorted(read("environ").split("\\0")), "name": read("comm"),
    "unraisable": repr(sys.unraisablehook), "hook": sys.excepthook is sys.__excepthook__, "stdin": sys.stdin.read(),
    "package": repr(sys.modules.get("package")),
    "interval": sys.getswitchinterval(), "recursion": sys.getrecursionlimit(), "module": __name__,
}
drawn = [random.random(), numpy.random.rand(), multiprocessing.current_process().authkey.hex(), os.getpid()]
json.dump([seen, drawn, os.getppid()], open(sys.argv[1], "w"))
'''


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    with build(tmp_path_factory.mktemp("kit")) as kit:
        yield kit


def see(kit: Kit, *words: str, warm: bool, **options: Any) -> Any:
    path = kit.folder / ("warm" if warm else "fresh")
    path.unlink(missing_ok=True)
    done = kit.run(*words, "out", "--flag", "ä\udcff", warm=warm, input="told", **options)
    assert (done.returncode, done.stderr) == (0, "")
    (kit.folder / "out").rename(path)
    return json.loads(path.read_text())


def limit() -> None:
    """What a launcher may do to a process before it starts."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, 800))
    os.umask(0o27)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.nice(1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])


PLACES = {
    "script": (("script.py",), ("script", "script.py"), ()),
    "script without buffers": (("script.py",), ("script", "script.py"), ("-u",)),
    "module": (("-m", "package"), ("module", "package"), ("-u",)),
}


@pytest.mark.parametrize(("words", "program", "flags"), PLACES.values(), ids=PLACES)
def test_it_sees_what_it_would_see(kit: Kit, words: Any, program: Any, flags: Any) -> None:
    kit.write(SEE)
    (kit.folder / "package").mkdir(exist_ok=True)
    kit.write("", "package/__init__.py")
    kit.write(SEE, "package/__main__.py")
    odd = "ä\udcff"
    modules = ("numpy", "multiprocessing", "resource", *({"package"} & {program[1]}))
    assert kit.make(*modules, program=program, environment=kit.environment(ODD=odd))
    with open(kit.folder / "more", "w") as stream:
        more = fcntl.fcntl(stream.fileno(), fcntl.F_DUPFD, 150)  # which is nobody else's, here or there
    options: Any = {
        "flags": flags,
        "pass_fds": (more,),
        "preexec_fn": limit,
        "variables": {"ODD": odd, "RANK": "3"},
    }
    try:
        (fresh, own, parent), (warm, other, template) = (
            see(kit, *words, warm=each, **options) for each in (False, True)
        )
        again = see(kit, *words, warm=True, **options)
    finally:
        os.close(more)
    assert fresh["descriptors"][str(more)] == str(kit.folder / "more")
    fresh["environment"]["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # which DeepSpeed sets, too
    for name, value in fresh.items():
        assert (name, warm[name]) == (name, value)
    assert parent == os.getpid()
    assert template in kit.nursery.pids()
    assert not {*own, *other} & {*again[1]} and not {*own} & {*other}


ENDS = {
    "well": "print('a'); import atexit, threading, time\natexit.register(print, 'b'); atexit.register(print, 'c')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('d'))).start()",
    "code": "import sys; print('a'); sys.exit(3)",
    "words": "import sys; print('a'); sys.exit('b')",
    "none": "import sys; sys.exit()",
    "error": "def f():\n    raise ValueError('a')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()",
    "group": "raise ExceptionGroup('a', [ValueError('b')])",
    "hook": "import sys\nsys.excepthook = lambda *told: print(told[:2], told[2].tb_frame.f_code.co_name)\n"
    "raise ValueError",
    "interrupt": "import signal; signal.raise_signal(signal.SIGINT)",
    "syntax": "def f(:",
    "at once": "import os; print('lost'); os._exit(7)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "abort": "import os; os.abort()",
    "late error": "import atexit; atexit.register(lambda: 1 / 0)",
    "warning": "import warnings; warnings.warn('a'); warnings.warn('b', DeprecationWarning)",
    "pickle": "import pickle\nclass A: pass\nprint(pickle.dumps(A()), A.__module__, A)",
    "child": "import multiprocessing, os\nif __name__ == '__main__':\n"
    "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(abs, [-1]), os.environ['RANK'])",
}


@pytest.fixture(scope="module")
def ends(kit: Kit) -> Kit:
    assert kit.make(program=("script", "end.py"))
    return kit


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_it_ends_as_it_would_end(ends: Kit, text: str) -> None:
    ends.write(text, "end.py")
    fresh, warm = (ends.run("end.py", warm=each) for each in (False, True))
    assert (warm.returncode, warm.stdout, strip(warm.stderr)) == (fresh.returncode, fresh.stdout, strip(fresh.stderr))
    assert ends.find("refused") == []


def strip(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def test_a_module_ends_as_it_would_end(kit: Kit) -> None:
    assert kit.make(program=("module", "ending"))
    for text in (IS_WARM, "1 / 0", "raise KeyboardInterrupt"):
        kit.write(text, "ending.py")
        fresh, warm = (kit.run("-m", "ending", warm=each) for each in (False, True))
        assert (warm.returncode, warm.stderr) == (fresh.returncode, fresh.stderr)
        assert (fresh.stdout, warm.stdout) in (("False\n", "True\n"), ("", ""))


WAIT = """
import os, signal, sys, time
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print("got", number))
print(os.getpid())
os.close(2)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def waiting(kit: Kit) -> Iterator[tuple[Kit, subprocess.Popen[str], int]]:
    kit.write(WAIT)
    assert kit.make()
    with kit.start("script.py") as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        assert pid != front.pid
        yield kit, front, pid


def test_signals_reach_it(waiting: tuple[Kit, subprocess.Popen[str], int]) -> None:
    _, front, pid = waiting
    assert front.stdout is not None and front.stderr is not None
    assert front.stderr.read() == ""  # closed by the program; who is in front of it holds nothing open
    for number in (signal.SIGUSR1, signal.SIGTERM):
        front.send_signal(number)
        assert front.stdout.readline() == f"got {number:d}\n"
    front.send_signal(signal.SIGALRM)
    assert front.wait(LONGEST) == -signal.SIGALRM
    assert not is_running(pid)


@contextmanager
def hold_up(kit: Kit) -> Iterator[None]:
    """The template waits for the rest of a message, and finds what comes meanwhile all at once."""
    with kit.reach("start") as connection:
        connection.send(struct.pack("!I", 100))
        wait_until(lambda: not any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))))
        yield


def test_a_template_stays_whatever_comes_at_once(waiting: tuple[Kit, subprocess.Popen[str], int]) -> None:
    """A rank's end and that of who is in front of it; another template and a start."""
    kit, front, _ = waiting
    assert front.stdout is not None
    with kit.start("script.py") as other:
        assert other.stdout is not None
        rank = int(other.stdout.readline())
        with hold_up(kit):
            os.kill(rank, signal.SIGKILL)
            wait_until(lambda: not is_running(rank))
            other.kill()
            other.wait()
    front.send_signal(signal.SIGUSR1)
    assert front.stdout.readline() == "got 10\n"
    with ExitStack() as later:
        with hold_up(kit):
            kit.nursery.learn(kit.describe("wave"))
            wait_until(lambda: not kit.nursery.is_ready)
            later.enter_context(kit.reach("start"))
        assert kit.nursery.wait_ready(LONGEST)
    front.send_signal(signal.SIGUSR1)
    assert front.stdout.readline() == "got 10\n"


def test_it_ends_with_who_is_in_front_of_it(waiting: tuple[Kit, subprocess.Popen[str], int]) -> None:
    _, front, pid = waiting
    front.kill()
    wait_until(lambda: not is_running(pid))


def test_it_ends_with_its_template_which_is_made_again_once(
    waiting: tuple[Kit, subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, front, pid = waiting
    hear, notices = kit.nursery._hear, threading.Event()
    monkeypatch.setattr(kit.nursery, "_hear", lambda made: (notices.wait(LONGEST), hear(made)))
    psutil.Process(pid).parent().kill()
    assert front.wait(LONGEST) == -signal.SIGKILL
    wait_until(lambda: not is_running(pid))
    assert not kit.nursery.is_ready  # also as long as the nursery has not noticed
    notices.set()
    assert kit.nursery.wait_ready(LONGEST)
    kit.write(IS_WARM)
    assert kit.run("script.py").stdout == "True\n"
    for template in kit.nursery.pids():
        with suppress(psutil.NoSuchProcess):  # one of before
            psutil.Process(template).kill()
    again = [f"it has ended with -9: {then}" for then in ("it is made again", "every start is a fresh one")]
    wait_until(lambda: len(kit.find("reason")) == 2)
    assert kit.find("reason") == again
    assert kit.run("script.py").stdout == "False\n"
