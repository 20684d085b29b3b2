"""The other end of the ranks' lines (:mod:`deepspeed_ucp.heartbeat`): who is there, how far, where, what ended them."""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..heartbeat import find_network, keep_alive
from .deaths import Deaths

_LONGEST, _LONGEST_KEY = 64 << 10, 64
"""Bytes of a line, and of the first one, which is the launch's key; a longer one is nobody's who may be here."""

_ENDING = (signal.SIGTERM, signal.SIGKILL)
"""Signals after which a rank's end is no failure of its own."""

_TOLD_TO_GO = 128 + signal.SIGTERM
"""Exit code of a rank that got SIGTERM, after a save or not."""

_STRANGERS, _GREETING = 128, 15.0
"""Connections that have not told the key, at the most, and the seconds that each is given for it."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a rank is (:func:`deepspeed_ucp.whereabouts.find_whereabouts`)."""

    stack: tuple[str, ...] = ()
    own: str | None = None
    waits: str | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Where:
        """Of what a rank told."""
        own, waits = (None if told[name] is None else str(told[name]) for name in ("own", "waits"))
        counts = {str(group): int(count) for group, count in told["collectives"].items()}
        return cls(tuple(map(str, told["stack"])), own, waits, counts)


@dataclass(slots=True)
class RankStatus:
    """A rank that has told of itself.

    Attributes:
        rank, host, pid: as it says.
        address: from where its line comes.
        heard: when it last said something (monotonic seconds).
        step: how far it got; None before its first step.
        phase: of the step after that, in which it is or was; None between two.
        where: what it answered when it was asked last; None before that.
        error, line: the traceback that ended it, and its exception in a line.
        code: with what it ended, where it said so and it was not 0.
        signal: that ended it, where this is known.
        memory: what the system says of processes that it has killed for want of memory, in words; empty where nothing.
        failed: when it was first known that it had an error, a code, or had gone without a word.
        was_told: it was told to end before it failed.
        is_open: its line is there.
        said_goodbye: the interpreter ended as it should, after an error or not.
        started: when its process was started (:func:`~.deaths.is_here`); 0 where it does not say.
        world: how many ranks there are, as it says; 0 where it does not.
    """

    rank: int
    host: str
    pid: int
    address: str
    heard: float
    step: int | None = None
    phase: str | None = None
    where: Where | None = None
    error: str | None = None
    line: str | None = None
    code: int | None = None
    signal: int | None = None
    memory: str = ""
    failed: float | None = None
    was_told: bool = False
    is_open: bool = True
    said_goodbye: bool = False
    started: int = 0
    world: int = 0

    @classmethod
    def greet(cls, hello: Mapping[str, Any], address: str) -> RankStatus:
        """Of a rank's first words."""
        whose = int(hello["rank"]), str(hello["host"]), int(hello["pid"])
        started, world = (int(hello.get(name, 0)) for name in ("started", "world"))
        return cls(*whose, address, time.monotonic(), started=started, world=world)

    def hear(self, told: Mapping[str, Any]) -> None:
        """What it tells more; where it is it tells because it was asked, which is no sign that it goes on."""
        if "where" in told:
            self.where = Where.read(told["where"])
            return
        self.heard = time.monotonic()
        if "step" in told:
            self.step = int(told["step"])
        if "phase" in told:
            self.phase = None if told["phase"] is None else str(told["phase"])
        if "error" in told:
            self.error, self.line = str(told["error"]), str(told.get("line", ""))
        if "code" in told:
            self.code = int(told["code"])
        if "error" in told or "code" in told:
            self.fail()
        self.said_goodbye = self.said_goodbye or "end" in told

    def fail(self) -> None:
        """Note when it has failed; the first time counts."""
        self.failed = time.monotonic() if self.failed is None else self.failed

    @property
    def name(self) -> str:
        """Who it is, in words."""
        return f"rank {self.rank} on {self.host}"

    @property
    def is_unexplained(self) -> bool:
        """Whether nothing is known of its end: it told nothing, and it was not this machine's."""
        return self.error is None and self.code is None and self.signal is None and not self.memory

    @property
    def failed_at(self) -> float | None:
        """When it failed, in seconds since the epoch; None where it did not."""
        return None if self.failed is None else round(time.time() - time.monotonic() + self.failed, 3)

    @property
    def place(self) -> str:
        """How far it came, in words."""
        after = "before its first step" if self.step is None else f"after step {self.step}"
        return after if self.phase is None else f"{after}, in {self.phase}"

    def describe(self) -> str:
        """What has become of it, in words."""
        if self.error is not None:
            how, why = "failed", f": {self.line}" if self.line else ""
        elif self.signal is not None:
            known = self.signal in {*signal.Signals}
            how, why = f"was ended by {signal.Signals(self.signal).name if known else f'signal {self.signal}'}", ""
        else:
            how, why = "has gone without a word" if self.code is None else f"ended with {self.code}", ""
            if self.code == _TOLD_TO_GO:
                how += " (told to go)"
        return f"{self.name} {how} {self.place}{why}{self.memory and f'; {self.memory}'}"


@dataclass(slots=True)
class _Heartbeat:
    """A connection: since when, what has come of a line that is not whole yet, and whose it is."""

    socket: socket.socket
    since: float
    is_known: bool = False
    data: bytearray = field(default_factory=bytearray)
    status: RankStatus | None = None


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step that a rank has ended.

    Attributes:
        seconds: from the end of the one before.
        work: those of them that the rank took by itself (:mod:`deepspeed_ucp.heartbeat`).
    """

    rank: int
    host: str
    step: int
    work: float
    seconds: float

    @classmethod
    def read(cls, status: RankStatus, told: Mapping[str, Any]) -> StepTime:
        """Of what a rank told."""
        return cls(status.rank, status.host, int(told["step"]), float(told["work"]), float(told["seconds"]))


class Watch:
    """Listens for the ranks of one launch at a time; a thread of its own does, until :meth:`close`.

    Args:
        address: of this machine, as ranks reach it; the loopback is for ranks of this machine alone.

    Attributes:
        heard_until: everything that had come by then has been heard (monotonic seconds): a watcher that was itself
            stopped for a while has not heard silence.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address, self.key = address, _make_key()
        self._server = socket.create_server((address, 0), backlog=1024)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._heartbeats: dict[socket.socket, _Heartbeat] = {}
        self._ranks: list[RankStatus] = []
        self.heard_until = time.monotonic()
        self._deaths, self._steps = Deaths(), list[StepTime]()
        self._lock, self._closed = threading.RLock(), False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="watch")
        self._thread.start()

    def begin(self) -> str:
        """Forget the ranks of the launch before, whose lines end, and with them they; what the next ones are to find in
        their environment."""
        with self._lock:
            for heartbeat in list(self._heartbeats.values()):
                self._drop(heartbeat)
            self._ranks, self._steps, self.key = [], [], _make_key()
            self._deaths.forget()
            return f"{self.address}:{self._server.getsockname()[1]}:{self.key}"

    def look(self) -> list[RankStatus]:
        """All ranks that have told of themselves in this launch; their fields change as they tell more."""
        with self._lock:
            return list(self._ranks)

    def take_steps(self) -> list[StepTime]:
        """The steps that ranks have told of since they were taken last."""
        with self._lock:
            taken, self._steps = self._steps, []
        return taken

    def send(self, number: int) -> int:
        """Let every rank send itself a signal; how many have been told."""
        there = self._list_open()
        for status in (each.status for each in there if number in _ENDING):
            if status is not None and status.failed is None:
                status.was_told = True
        return sum(_send(each, signal=number) for each in there)

    def ask(self, seconds: float = 1.0) -> list[RankStatus]:
        """Have every rank tell where it is; those that are there and have not answered when none has for some time."""
        asked = [each.status for each in self._list_open() if each.status is not None]
        for status in asked:
            status.where = None
        for heartbeat in self._list_open():
            _send(heartbeat, ask="where")
        silent, until = asked, time.monotonic() + seconds
        while silent and time.monotonic() < until:
            time.sleep(0.01)
            left = [each for each in silent if each.where is None]
            if len(left) < len(silent):  # of thousands of ranks answers take time to be read
                silent, until = left, time.monotonic() + seconds
        return silent

    def catch_up(self, seconds: float = 10.0) -> None:
        """Until all that ranks have said so far has been heard, or some time has gone by."""
        until = time.monotonic() + seconds
        for _ in range(2):  # connections, then what has come of them
            now = time.monotonic()
            while self.heard_until <= now < until and time.monotonic() < until:
                time.sleep(0.01)

    def wait_for_end(self, seconds: float) -> list[RankStatus]:
        """Ranks whose lines have not ended after some time."""
        until = time.monotonic() + seconds
        while (left := [seen for seen in self.look() if seen.is_open]) and time.monotonic() < until:
            time.sleep(0.02)
        return left

    def close(self) -> None:
        """Stop; whoever is still there ends."""
        self._closed = True
        self._thread.join()
        for heartbeat in self._list_open():
            self._drop(heartbeat)
        self._deaths.close()
        self._server.close()

    def _list_open(self) -> list[_Heartbeat]:
        with self._lock:
            return [heartbeat for heartbeat in self._heartbeats.values() if heartbeat.status is not None]

    def _serve(self) -> None:
        while not self._closed:
            began = time.monotonic()
            for key, _ in self._selector.select(timeout=0.05):
                if key.fileobj is self._server:
                    self._accept()
                elif heartbeat := self._heartbeats.get(key.fileobj):  # type: ignore[call-overload]
                    self._receive(heartbeat)
            self._drop_strangers()
            with self._lock:
                self._deaths.look()
            self.heard_until = began

    def _drop_strangers(self) -> None:
        """Let go of who has not told the key in time, and of those who came first where they are too many."""
        with self._lock:
            strangers = [each for each in self._heartbeats.values() if not each.is_known]  # in order of arrival
            late = time.monotonic() - _GREETING
            for at, heartbeat in enumerate(strangers):
                if heartbeat.since < late or len(strangers) - at > _STRANGERS:
                    self._drop(heartbeat)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # there is no more
            while True:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                keep_alive(connection)
                with self._lock:
                    self._heartbeats[connection] = _Heartbeat(connection, time.monotonic())
                    self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, heartbeat: _Heartbeat) -> None:
        try:
            data = heartbeat.socket.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        with self._lock:
            heartbeat.data += data
            *whole, rest = heartbeat.data.split(b"\n")
            heartbeat.data = bytearray(rest)
            fine = all(self._take(heartbeat, bytes(text)) for text in whole)
            if not data or not fine or len(rest) > (_LONGEST if heartbeat.is_known else _LONGEST_KEY):
                self._drop(heartbeat)

    def _take(self, heartbeat: _Heartbeat, text: bytes) -> bool:
        """What a line says; False where it is not one of this launch's."""
        if not heartbeat.is_known:
            heartbeat.is_known = secrets.compare_digest(text, self.key.encode())
            return heartbeat.is_known
        try:
            told = json.loads(text)
            if heartbeat.status is None:
                heartbeat.status = RankStatus.greet(told["hello"], heartbeat.socket.getpeername()[0])
                self._ranks.append(heartbeat.status)
                self._deaths.note(heartbeat.status.pid, heartbeat.status.started)
            else:
                heartbeat.status.hear(told)
                if "work" in told:
                    self._steps.append(StepTime.read(heartbeat.status, told))
        except Exception:  # noqa: BLE001 - whatever it is: the other lines are heard on
            return heartbeat.status is not None  # a rank whose sending was cut short tells more in the next line
        return True

    def _drop(self, heartbeat: _Heartbeat) -> None:
        if self._heartbeats.pop(heartbeat.socket, None) is None:
            return
        self._selector.unregister(heartbeat.socket)
        heartbeat.socket.close()
        if heartbeat.status is not None:
            status, heartbeat.status.is_open = heartbeat.status, False
            if not status.said_goodbye and not status.was_told:
                status.signal = self._deaths.find_signal(status.pid, status.started)
                status.fail()
            if status.failed is not None:
                status.memory = self._deaths.describe_memory(status.pid, status.signal)


def _send(heartbeat: _Heartbeat, **told: Any) -> bool:
    try:
        heartbeat.socket.send(json.dumps(told).encode() + b"\n", socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def _make_key() -> str:
    return f"{secrets.token_hex(8)}@{find_network()}"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long nothing may happen, in seconds; 0 is for ever.

    Attributes:
        start: from a rank's first word to its first step.
        step: from one step of any rank to the next of any.
    """

    start: float = 1800.0
    step: float = 600.0


UNHEARD = (
    "no rank has connected: hangs, steps and who fails first are not seen, and every start is a fresh one. If the "
    "plugin is not on in the ranks, DEEPSPEED_UCP=1 or `ds_ucp run` switches it on."
)
"""What is to be known of a launch without the plugin."""


def find_silence(ranks: list[RankStatus], patience: Patience, heard_until: float) -> float | None:
    """Seconds since the last step of any rank, where these are more than there may be; None where all is well.

    Ranks wait for each other in every step: one that hangs lets all of them fall silent, and one that is slow none.
    """
    if not ranks:
        return None
    silence = heard_until - max(seen.heard for seen in ranks)
    allowed = patience.start if all(seen.step is None for seen in ranks) else patience.step
    return silence if allowed and silence > allowed else None


def find_ended(ranks: list[RankStatus]) -> list[int]:
    """Ranks that ended as they should: of a launch that has failed, those that did so before their time."""
    return sorted(seen.rank for seen in ranks if seen.said_goodbye and seen.failed is None)


def end_ranks(watch: Watch, *, grace: float = 2.0) -> None:
    """Ask every rank that is still there to end itself; one that is stopped, or stuck, does not.

    Args:
        grace: seconds that they are given.
    """
    watch.send(signal.SIGKILL)
    watch.wait_for_end(grace)
