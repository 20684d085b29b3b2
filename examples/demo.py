"""Run the three programs of `make demo` at the same time, and report which of them succeed.

The third program waits for most of its time, so the others can use the processors. Exits with 1 if a program fails.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILE = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
OPERATOR = "deepspeed_shm_comm"
LAUNCHED = "torchrun"
PROGRAMS = {
    "kill and resume": ("byte_gpt/demo.py",),
    "TP, PP, ZeRO": ("megatron_gpt/figures.py", "demo", "--out", str(HERE.parent / "demo_out")),
    LAUNCHED: ("elastic_restart/demo.py",),
}
DESCRIPTION = f"""\
make demo: about two minutes on two quiet cores. If DeepSpeed's operator {OPERATOR} is
not compiled yet, its compilation adds one to two minutes, once. Three programs run at the same time:
  kill and resume  a GPT trains on 4 ranks, is killed, resumes on 2 ranks, is killed, and resumes on 3
  TP, PP, ZeRO     a GPT of TP 2 and PP 2 resumes under other TP, PP, SP and ZeRO
  {LAUNCHED}         two jobs lose an agent, gain one, hang, and lose a process and a node with its memory
"""
CLOCK = re.compile(r" *\d+ s  ")
"""Start of a log line. Other lines of a program are printed after its end."""


class Demo:
    """The programs, and the operator that DeepSpeed compiles for the third."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.processes: list[subprocess.Popen[str]] = []

    def say(self, name: str, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {name:15}  {text}", flush=True)

    def start(self, command: list[str], niceness: int = 0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        self.processes.append(process)
        return process

    def compile(self) -> int:
        """Compile DeepSpeed's shared-memory operator unless that was done before; return an exit code."""
        folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
        for lock in folder.rglob(f"{OPERATOR}/lock"):
            self.say(LAUNCHED, f"waits for {lock}; remove it if nothing is compiling: a killed compilation leaves it")
        if any(folder.rglob(f"{OPERATOR}.so")):
            return 0
        self.say(LAUNCHED, f"compiling DeepSpeed's operator {OPERATOR} into {folder}: one to two minutes, once")
        process = self.start(["-c", COMPILE])
        output = process.communicate()[0]
        self.say(LAUNCHED, "compiled" if not process.returncode else f"the compilation failed:\n{output}")
        return process.returncode

    def run(self, name: str) -> bool:
        """Run a program, print its log lines at once and its other lines at the end. Returns True if it succeeded."""
        if name == LAUNCHED and self.compile():
            return False
        script, *arguments = PROGRAMS[name]
        # The heartbeats and timers of the launched jobs must not wait for the others.
        process, rest = self.start([str(HERE / script), *arguments], 0 if name == LAUNCHED else 15), list[str]()
        for line in process.stdout or ():
            if clock := CLOCK.match(line):
                self.say(name, line[clock.end() :].rstrip())
            else:
                rest.append(line)
        code = process.wait()
        title = f"{name}: {'succeeded' if not code else f'FAILED with exit code {code}'}"
        print(f"\n===== {title} =====\n{''.join(rest).strip()}\n=====\n", flush=True)
        return not code

    def end(self) -> None:
        """Send SIGTERM to all programs, which remove their files and exit."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def main() -> int:
    print(DESCRIPTION, flush=True)
    demo = Demo()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ThreadPoolExecutor(len(PROGRAMS)) as pool:
            try:
                verdicts = dict(zip(PROGRAMS, pool.map(demo.run, PROGRAMS), strict=True))
            finally:
                demo.end()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    for name, succeeded in verdicts.items():
        print(f"{'succeeded' if succeeded else 'FAILED'}: {name}")
    print(f"{time.monotonic() - demo.began:.0f} s in total. Pictures: {HERE.parent / 'demo_out'}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
