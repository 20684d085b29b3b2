"""``python -m tests.support.signaled METHOD``: a process that protects its children, and sends them signals.

It prints a JSON object with the result of each case, and ends without its exit functions.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from deepspeed_ucp import children

LONGEST = 120.0


def send_from_elsewhere(pid: int | None) -> None:
    """Send SIGTERM from a process that is not the parent, as launchers do, and wait until it is no longer pending."""
    subprocess.run(["kill", "-TERM", str(pid)], check=True)
    until = time.monotonic() + LONGEST
    while os.path.exists(f"/proc/{pid}/status"):
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            pending = next(int(line.split()[1], 16) for line in status if line.startswith("ShdPnd"))
        if not pending & 1 << signal.SIGTERM - 1:
            return
        assert time.monotonic() < until
        time.sleep(0.01)


def answer(pipe: Connection) -> None:
    with suppress(EOFError):  # the parent has ended
        while True:
            pipe.send(globals()[pipe.recv()]())


def ping() -> str:
    return "alive"


def hang() -> None:
    while True:
        signal.pause()


def handle_signals() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))


def ignore_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_program() -> int:
    with subprocess.Popen(["sleep", "600"]) as program:
        program.terminate()
        return program.wait(LONGEST)


def end_grandchild() -> int | None:
    grandchild, _ = start(daemon=False)
    grandchild.terminate()
    grandchild.join(LONGEST)
    return grandchild.exitcode


def end_forked() -> int:
    pid = os.fork()
    if not pid:
        hang()
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start(*, daemon: bool = True) -> tuple[Any, Callable[[str], Any]]:
    """Start a child. Returns it, and a function that has it call one of the functions above."""
    context = multiprocessing.get_context(multiprocessing.get_start_method())
    ours, theirs = context.Pipe()
    child = context.Process(target=answer, args=(theirs,), daemon=daemon)  # type: ignore[attr-defined]
    child.start()

    def ask(name: str) -> Any:
        ours.send(name)
        assert ours.poll(LONGEST), name
        return ours.recv()

    return child, ask


def main() -> dict[str, Any]:
    multiprocessing.set_start_method(sys.argv[1])
    found: dict[str, Any] = {}
    early, _ = start()
    children.protect({signal.SIGTERM, signal.SIGUSR1})
    found["unprotected"] = len(children.list_unprotected())
    early.terminate()
    early.join(LONGEST)
    if sys.argv[1] == "forkserver":
        forkserver._forkserver._stop()  # type: ignore[attr-defined]

    child, ask = start(daemon=False)
    send_from_elsewhere(child.pid)
    found |= {name: ask(name) for name in ("ping", "end_program", "end_grandchild", "end_forked")}
    child.terminate()
    child.join(LONGEST)
    found["terminated"] = child.exitcode

    for name, end in {"handler": lambda child: child.terminate(), "handler elsewhere": kill}.items():
        child, ask = start()
        ask("handle_signals")
        end(child)
        child.join(LONGEST)
        found[name] = child.exitcode

    child, ask = start()
    ask("ignore_signals")
    children._EXIT_TIMEOUT = 0.2
    children._end_daemons()
    child.join(LONGEST)
    found["stubborn"] = child.exitcode

    child, ask = start()
    ask("ping")
    threading.Thread(target=ask, args=("hang",), daemon=True).start()
    send_from_elsewhere(child.pid)
    return {**found, "held": child.pid}


def kill(child: Any) -> None:
    subprocess.run(["kill", "-TERM", str(child.pid)], check=True)


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
    os._exit(0)
