"""Keeps a launch going: starts it, watches it, ends what it leaves, and starts it again on the hosts that answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import FrameType

from ..heartbeat import VARIABLE
from ..platforms import ALONE, SIGNALLED, find_platform
from ..warm.nursery import Nursery, choose_nursery
from .blame import examine_hang, find_first_failure
from .command import Command
from .deaths import ask_kernel
from .hosts import Hosts, Reach, find_own_address, is_alone, is_from, write_hostfile
from .log import Log
from .pace import Pace
from .policy import Attempt, RestartLimits, decide
from .preflight.asking import HERE, Preflight, ask_here
from .processes import adopt_orphans, end_everything, make_sweep, reap, start, wait_for_all
from .watch import UNHEARD, Patience, RankStatus, Watch, end_ranks, find_ended, find_silence

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go on to the ranks; after the stopping ones nothing is started again. Ignored ones (``nohup``) stay."""

_LOOK_EVERY, _ASK, _UNHEARD_AFTER = 0.1, 3.0, 300.0
"""Seconds between two looks, those that the kernel of a host is given that has answered before, and those after which a
launch without a rank is told of."""
_ENV_FILE = "DS_ENV_FILE"
_SWITCH = "DEEPSPEED_UCP"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a launch is supervised.

    Attributes:
        min_nodes: hosts without which nothing is started.
        limits: of the restarts.
        patience: after how much silence a launch hangs.
        settle: seconds for a launch to end by itself when a rank of it has failed, and to end when it is told to go.
        wait: seconds to wait for enough hosts.
        preflight: hosts are tested before each start, and this is the folder whose disk is (empty: that of temporary
            files); None: they are not.
        steps: a file that gets every step's seconds by rank (:class:`~.pace.Pace`); None for none.
        warm: ranks of this machine are forked from a process that has imported what they need.
    """

    min_nodes: int = 1
    limits: RestartLimits = field(default_factory=RestartLimits)
    patience: Patience = field(default_factory=Patience)
    settle: float = 30.0
    wait: float = 1800.0
    preflight: str | None = None
    steps: str | None = None
    warm: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a launch.

    Attributes:
        code: of its end; None where it was ended here.
        reason: in words, of the rank that failed first, or of those that let the others wait; empty where it has done
            its work.
        step: the last one of the first rank that had an error, else that any told of.
        error: the traceback of the first rank that had one.
    """

    code: int | None
    reason: str = ""
    step: int | None = None
    error: str | None = None


class Supervisor:
    """Supervises a command.

    Args:
        command: what is started.
        hosts: slots by host; None where the command runs on this machine, as it finds it.
        log: gets every event.

    Attributes:
        verdict: why it gave up, in words; empty where it did not.
    """

    def __init__(self, command: Command, hosts: Hosts | None, settings: Settings, log: Log) -> None:
        self.command, self.hosts, self.settings, self.log = command, hosts, settings, log
        self.reach = Reach(command.find("--launcher") or "pdsh", command.find("--ssh_port"))
        self._signals: list[int] = []
        self._stopped_by: int | None = None
        self._in_a_hurry = False  # Ctrl-C, a second time
        self._watch, self._pace = Watch(find_own_address(hosts or {})), Pace(log, settings.steps)
        self.verdict = ""
        self._told_unheard = False
        self._nursery: Nursery | None = None
        self._preflight: Preflight | None = None
        if settings.preflight is not None:
            ask = ask_here if is_alone(hosts or {}) else self.reach.ask
            exports = dict(line.split("=", 1) for line in _read_exports())
            self._preflight = Preflight(ask, self._watch.address, settings.preflight, log, exports)

    def run(self) -> int:
        """Until the command has done its work, or there is no point in going on; the exit code.

        To be called in the main thread: it takes the signals.

        Raises:
            OSError: there is no such program.
        """
        self._nursery = choose_nursery(self.log) if self.settings.warm else None
        taken = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        former = {number: signal.signal(number, self._note) for number in taken}
        adopt_orphans()
        try:
            return self._keep_going()
        finally:
            self._watch.close()
            if self._nursery is not None:
                self._nursery.close()
            for number, handler in former.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        self._in_a_hurry = self._in_a_hurry or (number == self._stopped_by == signal.SIGINT)
        if number in STOPPING and self._stopped_by is None:
            self._stopped_by = number

    def _keep_going(self) -> int:
        attempts: list[Attempt] = []
        former: Hosts = {}
        while True:
            hosts = self._wait_for_hosts()
            if hosts is None or self._is_stopped():
                return self._end(None)
            if attempts and former.keys() - hosts.keys():  # also one that answers and has failed its test
                attempts[-1] = replace(attempts[-1], lost=True)
            former = hosts
            outcome = self._launch(len(attempts) + 1, hosts)
            lost = self._sweep(hosts)
            outcome = self._judge(outcome, [host for host in hosts if host not in lost])
            if not outcome.reason:
                self.log("finished", step=outcome.step)
                return 0
            if self._is_stopped():
                return self._end(outcome)
            attempts.append(Attempt(outcome.step, lost=bool(lost)))
            decision = decide(attempts, self.settings.limits)
            if decision.pause is None:
                self.log("gave_up", reason=decision.reason, first=outcome.reason, error=outcome.error)
                self.verdict = f"given up: {decision.reason}. The last time {outcome.reason}"
                code = outcome.code or 1
                return code if code > 0 else SIGNALLED - code
            self.log("restarting", seconds=decision.pause, lost=lost)
            self._pause(decision.pause)

    def _is_stopped(self) -> bool:
        return self._stopped_by is not None

    def _end(self, outcome: Outcome | None) -> int:
        """The end on a signal, or for want of hosts."""
        if self._stopped_by is None:
            return 1
        self.log("stopped", signal=signal.Signals(self._stopped_by).name, step=outcome.step if outcome else None)
        code = outcome.code if outcome else None
        if code is None or not 0 <= code < SIGNALLED or (code == 0 and find_platform(os.environ) is not ALONE):
            return SIGNALLED + self._stopped_by  # to what is around this, 0 is a job that is done
        return code

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_stopped():
            time.sleep(min(_LOOK_EVERY, seconds))

    def _sweep(self, hosts: Hosts) -> list[str]:
        """End what a launch has left on its hosts, ranks that hang among it; those hosts that do not answer."""
        if not hosts:
            return []
        answering = self.reach.find_answering(hosts, make_sweep(self._watch.key))
        return [host for host in hosts if host not in answering]

    def _wait_for_hosts(self) -> Hosts | None:
        """The hosts that answer and pass their test, when they are enough; None where they do not become so, or a
        signal comes."""
        if self.hosts is None and self._preflight is None:
            return None if self._is_stopped() else {}
        until, pause = time.monotonic() + self.settings.wait, self.settings.limits.first_pause
        while not self._is_stopped():
            answering = {HERE: 0} if self.hosts is None else self.reach.find_answering(self.hosts)
            missing = [host for host in self.hosts or () if host not in answering]
            fit, told = answering, dict[str, list[str]]()
            if self._preflight is not None and len(answering) >= self.settings.min_nodes:
                fit = self._preflight.select(answering)
                told = {"failing": [host for host in answering if host not in fit]}
            if len(fit) >= self.settings.min_nodes:
                return {} if self.hosts is None else fit
            if time.monotonic() > until:
                what = "answer, and pass their test" if told else "answer"
                self.log("gave_up", reason=f"{len(fit)} hosts {what}", missing=missing, **told)
                return None
            self.log("waiting", answering=list(answering), missing=missing, needed=self.settings.min_nodes, **told)
            self._pause(pause)
            pause = min(2 * pause, self.settings.limits.longest_pause)
        return None

    def _launch(self, number: int, hosts: Hosts) -> Outcome:
        # A folder per launch: what tidies /tmp up may take one that is weeks old.
        with tempfile.TemporaryDirectory(prefix="ds_ucp_supervise_", ignore_cleanup_errors=True) as folder:
            command, environment = self._write_command(folder, hosts)
            self._pace.begin()
            self.log("starting", attempt=number, hosts=dict(hosts), command=command)
            process = start(command, environment)
            code: int | None = None
            reason = "interrupted"
            try:
                code, reason = self._follow(process)
            finally:
                self._clear_away(process, failed=bool(reason))
            return Outcome(code, reason)

    def _write_command(self, folder: str, hosts: Hosts) -> tuple[list[str], dict[str, str]]:
        """The command for these hosts, and an environment that takes the ranks' lines along.

        The launcher exports variables to other hosts by the beginnings of their names, and those of a file.
        """
        line = self._watch.begin()
        environment = {**os.environ, VARIABLE: line, **(self._nursery.environment() if self._nursery else {})}
        if self.hosts is None:
            return self.command.words(), environment
        environment[_ENV_FILE] = _write_exports(folder, line)
        hostfile = os.path.join(folder, "hostfile")
        write_hostfile(hostfile, hosts)
        lost = [host for host in self.hosts if host not in hosts]
        return self.command.narrow(hostfile, hosts, lost).words(), environment

    def _follow(self, process: subprocess.Popen[bytes]) -> tuple[int | None, str]:
        """Watch a launch to its end: its exit code, and what is wrong, in words."""
        began, running = time.monotonic(), False
        deadline, reason = None, ""
        while True:
            code = process.poll()
            if code is not None:
                self._watch.catch_up()
            ranks, now = self._watch.look(), time.monotonic()
            self._pace.follow(self._watch.take_steps())
            if not running and any(seen.step is not None for seen in ranks):
                running = True
                self.log("running", seconds=round(now - began, 2), ranks=len(ranks))
            if not (ranks or self._told_unheard) and (code is not None or now > began + _UNHEARD_AFTER):
                self._told_unheard = True
                self.log("unheard", reason=UNHEARD)
            if code is not None:
                break
            self._forward(process)
            if deadline is None and (found := self._find_trouble(ranks)):
                reason, seconds = found
                deadline = now + seconds
            if deadline is not None and (now >= deadline or self._in_a_hurry):
                return None, reason
            reap(process)
            time.sleep(_LOOK_EVERY)
        self._forward(process)
        return code, (reason if code or self._is_stopped() else "") or self._find_fault(code)

    def _find_trouble(self, ranks: list[RankStatus]) -> tuple[str, float] | None:
        """What is wrong with a launch that runs, and the seconds that it has to end by itself."""
        if self._stopped_by is not None:
            return f"told to go by {signal.Signals(self._stopped_by).name}", self.settings.settle
        silence = find_silence(ranks, self.settings.patience, self._watch.heard_until)
        if silence is not None:
            hang = examine_hang(self._watch, has_all=True)
            self.log("hanging", seconds=round(silence, 2), ranks=len(ranks), **asdict(hang))
            return f"no rank has ended a step for {silence:.0f} s: {hang.summary}", 0.0
        failed = find_first_failure(ranks)
        if failed is None:
            return None
        return failed.describe(), self.settings.settle

    def _find_fault(self, code: int) -> str:
        """What is wrong with a launch that has ended; empty where nothing is.

        The deepspeed launcher ends with 0 also where a signal has ended what it had started.
        """
        if code:
            return describe_code(code)
        ranks = self._watch.look()
        if self._watch.wait_for_end(2.0):
            return "it ended before its ranks"
        if ranks and not any(seen.said_goodbye for seen in ranks):
            return "all its ranks were killed"
        return ""

    def _forward(self, process: subprocess.Popen[bytes]) -> None:
        """Pass signals on: to the ranks, which may save, or where there are none to all processes.

        The deepspeed launcher would end on those that are not meant to stop anything.
        """
        while self._signals:
            number = self._signals.pop(0)
            told = self._watch.send(number)
            self.log("signal", signal=signal.Signals(number).name, ranks=told)
            is_for_all = number in STOPPING or not self.command.takes_hosts
            if not told and is_for_all and process.poll() is None:
                os.killpg(process.pid, number)

    def _clear_away(self, process: subprocess.Popen[bytes], *, failed: bool) -> None:
        """End every process of a launch, elsewhere as far as its ranks listen.

        What a launch has left that has done its work is given time to end by itself.
        On SIGTERM the deepspeed launcher ends all launches of this user on its hosts, other jobs' too: it gets none.
        """
        if not failed:
            wait_for_all(process, self.settings.settle, self._list_templates)
        end_ranks(self._watch)
        left = end_everything(process, grace=0.0 if self.hosts else 3.0, spared=self._list_templates)
        if left:
            self.log("killed", processes=left)

    def _list_templates(self) -> Collection[int]:
        return self._nursery.pids() if self._nursery is not None else ()

    def _judge(self, outcome: Outcome, answering: Sequence[str]) -> Outcome:
        """An outcome with what the ranks told, and of one that told nothing the kernel of its host."""
        ranks = self._watch.look()
        failed = find_first_failure(ranks)
        if failed is not None and failed.is_unexplained:
            host = next((host for host in answering if is_from(host, failed.host, failed.address)), None)
            if host is not None:
                failed.memory = ask_kernel(failed.pid, partial(self.reach.ask, host, seconds=_ASK))
        told = [seen.step for seen in ([failed] if failed and failed.error else ranks) if seen.step is not None]
        step, error = max(told, default=None), failed.error if failed else None
        reason = failed.describe() if failed and outcome.reason else outcome.reason
        if reason and not self._is_stopped():
            line = failed.line if failed else None
            rank, phase, at = (failed.rank, failed.phase, failed.failed_at) if failed else (None, None, None)
            first = {"step": step, "phase": phase, "rank": rank, "at": at, "error": line, "ended": find_ended(ranks)}
            self.log("failed", code=outcome.code, reason=reason, **first)
        return Outcome(outcome.code, reason, step, error)


def _read_exports() -> list[str]:
    """Variables for the launcher to export, ``NAME=value``, of its own files."""
    own = os.environ.get(_ENV_FILE, ".deepspeed_env")
    held: list[str] = []
    for path in (os.path.join(os.path.expanduser("~"), own), own):
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as stream:
                held += [text for text in stream.read().splitlines() if "=" in text]
    return held


def describe_code(code: int) -> str:
    """An exit code that is not 0: 256 less a signal where DeepSpeed's launcher passes on what has ended a rank."""
    if code < 0:
        return f"{signal.Signals(-code).name} ended it"
    number = next((each for each in (256 - code, code - SIGNALLED) if each in signal.valid_signals()), None)
    return f"it ended with {code}" + (f", as where {signal.Signals(number).name} has ended a rank" if number else "")


def _write_exports(folder: str, line: str) -> str:
    """A file of variables for the launcher to export: the plugin's switch, those of its own one, the ranks' line."""
    path = os.path.join(folder, "environment")
    told = re.sub(r'[\\"$`]', r"\\\g<0>", os.environ.get(_SWITCH, ""))  # for the quotes of a remote shell
    switch = [f"{_SWITCH}={told}"] if told else []
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(f"{text}\n" for text in [*switch, *_read_exports(), f"{VARIABLE}={line}"])
    return path
