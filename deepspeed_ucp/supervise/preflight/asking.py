"""Tests nodes before a start: each by a process of its own there (:mod:`.probe`), all at once; who fails is left out
(:mod:`.judging`)."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

from ...heartbeat import VARIABLE
from ..hosts import Hosts, run_for_words
from ..log import Log
from .judging import MEASURES, Report, UnfitError, Verdict, judge, merge

LIMIT = 60.0
"""Seconds after which a node that has not told its report does not."""

HERE = "localhost"

Ask = Callable[[str, str, float], str]
"""``ask(host, command, seconds)``: run a shell command there; what it said last."""

_LONGEST = 1 << 20
_EXPORTED = ("PYTHON", "NCCL", "GLOO", "LD_LIBRARY", "PATH")
"""Beginnings of variables that the launcher takes to other hosts as well, as far as they matter here."""


class Preflight:
    """Tests nodes before each start, also by what they had themselves the first time.

    Args:
        ask: how commands get to them.
        address: of this machine, as they reach it.
        folder: whose disk is tested; empty: that of temporary files.
        log: gets an event for each test.
        exports: further variables for the tests.
    """

    def __init__(self, ask: Ask, address: str, folder: str, log: Log, exports: Mapping[str, str] | None = None) -> None:
        self.ask, self.address, self.folder, self.log = ask, address, folder, log
        own = {key: value for key, value in os.environ.items() if key.startswith(_EXPORTED)}
        self.exports = {**own, **(exports or {})}
        self._first: dict[str, Report] = {}

    def test(self, hosts: Hosts) -> tuple[dict[str, Report | str], Verdict]:
        """Test all, and once more where somebody was slow or cut off, which may pass; what they told (words: why one
        told nothing), and who fails."""
        began = time.monotonic()
        reports = self._collect(list(hosts))
        verdict = judge(reports, hosts, self._first)
        heard = {host: report for host, report in reports.items() if isinstance(report, Report)}
        if any(host in verdict.faults and not report.faults for host, report in heard.items()):
            for host, again in self._collect(list(heard)).items():
                reports[host] = again if isinstance(again, str) else merge(heard[host], again)
            verdict = judge(reports, hosts, self._first)
        for host, report in reports.items():
            if isinstance(report, Report) and host not in verdict.faults:
                self._first.setdefault(host, report)
        self.log(
            "preflight",
            seconds=round(time.monotonic() - began, 2),
            left_out=verdict.faults,
            notes=verdict.notes,
            figures={host: summarize(report) for host, report in reports.items() if isinstance(report, Report)},
        )
        return reports, verdict

    def select(self, hosts: Hosts) -> dict[str, int]:
        """Those that do not fail."""
        _, verdict = self.test(hosts)
        return {host: slots for host, slots in hosts.items() if host not in verdict.faults}

    def test_here(self) -> Report:
        """This machine's report.

        Raises:
            UnfitError: something is wrong with it, whatever others have.
        """
        reports, verdict = self.test({HERE: 0})
        report = reports[HERE]
        if verdict.faults or not isinstance(report, Report):
            raise UnfitError("; ".join(verdict.faults[HERE]))
        return report

    def _collect(self, hosts: Sequence[str]) -> dict[str, Report | str]:
        """What all tell of themselves, asked at once; words say why one has told nothing."""
        with Exchange(self.address, hosts) as exchange, ThreadPoolExecutor(max(1, len(hosts))) as pool:

            def test(host: str) -> Report | str:
                words = self.ask(host, self._make_command(exchange.line, host), LIMIT)
                exchange.leave(host)
                return exchange.reports.get(host) or f"no report: {words}"

            return dict(zip(hosts, pool.map(test, hosts), strict=True))

    def _make_command(self, line: str, host: str) -> str:
        settings = [f"{key}={value}" for key, value in self.exports.items()]
        folder = self.folder or tempfile.gettempdir()
        environment = ["env", "-u", VARIABLE, *settings]  # a test is no rank
        test = [sys.executable, "-m", "deepspeed_ucp.supervise.preflight.probe", folder, line, host]
        return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*environment, *test])}"


def ask_here(_host: str, command: str, seconds: float) -> str:
    """An :data:`Ask` of this machine."""
    return run_for_words(["sh", "-c", command], seconds)


def summarize(report: Report) -> dict[str, float]:
    """The lowest figure of each kind of a node, rounded."""
    lowest: dict[str, float] = {}
    for figure in report.figures:
        lowest[figure.what] = min(lowest.get(figure.what, figure.value), figure.value)
    return {what: float(f"{lowest[what]:.4g}") for what in MEASURES if what in lowest}


class Exchange:
    """Brings together nodes that are ready to try links, and takes their reports.

    Of n nodes each tries the next 1, 2, 4, … of them, so that each has a link with all others, or with 2·log₂ n.

    Args:
        address: of this machine, as they reach it.
        hosts: who is to come.

    Attributes:
        line: what a node needs to know to come.
        reports: by host.
    """

    def __init__(self, address: str, hosts: Sequence[str]) -> None:
        self.hosts, self.reports = hosts, dict[str, Report]()
        self._ready: dict[str, tuple[str, int]] = {}
        self._expected, self._working = set(hosts), set(hosts)  # to be ready, to tell their reports
        self._changed = threading.Condition()
        self._key, self._until = secrets.token_hex(8), time.monotonic() + LIMIT
        self._server = socket.create_server((address, 0), backlog=1024)
        self.line = f"{address}:{self._server.getsockname()[1]}:{self._key}"
        threading.Thread(target=self._serve, daemon=True, name="exchange").start()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def leave(self, host: str) -> None:
        """Nothing more comes from a host, and nobody waits for it."""
        with self._changed:
            self._expected.discard(host)
            self._working.discard(host)
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True, name="node").start()

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(LIMIT)
        with (
            suppress(OSError, ValueError, TypeError, LookupError, AttributeError),  # a stranger, or a node that ends
            connection,
            connection.makefile("rw", encoding="utf-8") as stream,
        ):
            key = stream.readline(len(self._key) + 1).strip()
            if not secrets.compare_digest(key.encode(), self._key.encode()):
                return
            told = json.loads(stream.readline(_LONGEST))
            peers = self._wait_for_others(told["name"], (str(told["address"]), int(told["port"])))
            print(json.dumps(peers), file=stream, flush=True)
            report = Report.parse(json.loads(stream.readline(_LONGEST)))
            with self._changed:
                self.reports[told["name"]] = report
                self._working.discard(told["name"])
                self._changed.notify_all()
                self._wait(lambda: not self._working)  # links end with the nodes

    def _wait_for_others(self, host: str, where: tuple[str, int]) -> list[tuple[str, str, int]]:
        with self._changed:
            self._ready[host] = where
            self._expected.remove(host)
            self._changed.notify_all()
            self._wait(lambda: not self._expected)
            hosts = [each for each in self.hosts if each in self._ready]
            at, steps = hosts.index(host), (1 << power for power in range(len(hosts).bit_length()))
            named = [hosts[(at + step) % len(hosts)] for step in steps if step < len(hosts)]
            return [(each, *self._ready[each]) for each in named]

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Some seconds less than who has to come, so that those who are there can still tell their reports."""
        self._changed.wait_for(condition, timeout=max(0.0, self._until - LIMIT / 3 - time.monotonic()))
