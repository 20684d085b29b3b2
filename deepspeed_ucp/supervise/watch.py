"""The other end of the ranks' lines (:mod:`deepspeed_ucp.heartbeat`): who is there, how far, what ended them."""

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

from ..heartbeat import keep_alive

_LONGEST, _LONGEST_KEY = 64 << 10, 64
"""Bytes of a line, and of the first one, which is the launch's key; a longer one is nobody's who may be here."""

_STRANGERS, _GREETING = 128, 15.0
"""Connections that have not told the key, at the most, and the seconds that each is given for it."""


@dataclass(slots=True)
class RankStatus:
    """A rank that has told of itself.

    Attributes:
        rank, host, pid: as it says.
        address: from where its line comes.
        heard: when it last said something (monotonic seconds).
        step: how far it got; None before its first step.
        error: the traceback that ended it.
        code: with what it ended, where it said so and it was not 0.
        failed: when it was first known that it had an error, a code, or had gone without a word.
        is_open: its line is there.
        said_goodbye: the interpreter ended as it should, after an error or not.
    """

    rank: int
    host: str
    pid: int
    address: str
    heard: float
    step: int | None = None
    error: str | None = None
    code: int | None = None
    failed: float | None = None
    is_open: bool = True
    said_goodbye: bool = False

    @classmethod
    def greet(cls, hello: Mapping[str, Any], address: str) -> RankStatus:
        """Of a rank's first words."""
        return cls(int(hello["rank"]), str(hello["host"]), int(hello["pid"]), address, time.monotonic())

    def hear(self, told: Mapping[str, Any]) -> None:
        """What it tells more."""
        self.heard = time.monotonic()
        if "step" in told:
            self.step = int(told["step"])
        if "error" in told:
            self.error = str(told["error"])
        if "code" in told:
            self.code = int(told["code"])
        if "error" in told or "code" in told:
            self.fail()
        self.said_goodbye = self.said_goodbye or "end" in told

    def fail(self) -> None:
        """Note when it has failed; the first time counts."""
        self.failed = time.monotonic() if self.failed is None else self.failed

    def describe(self) -> str:
        """What has become of it, in words."""
        how = "has failed" if self.error is not None else "has gone without a word"
        return f"rank {self.rank} on {self.host} {how if self.code is None else f'has ended with {self.code}'}"


@dataclass(slots=True)
class _Heartbeat:
    """A connection: since when, what has come of a line that is not whole yet, and whose it is."""

    socket: socket.socket
    since: float
    is_known: bool = False
    data: bytearray = field(default_factory=bytearray)
    status: RankStatus | None = None


class Watch:
    """Listens for the ranks of one launch at a time; a thread of its own does, until :meth:`close`.

    Args:
        address: of this machine, as ranks reach it; the loopback is for ranks of this machine alone.

    Attributes:
        heard_until: everything that had come by then has been heard (monotonic seconds): a watcher that was itself
            stopped for a while has not heard silence.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address, self.key = address, secrets.token_hex(8)
        self._server = socket.create_server((address, 0), backlog=1024)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._heartbeats: dict[socket.socket, _Heartbeat] = {}
        self._ranks: list[RankStatus] = []
        self.heard_until = time.monotonic()
        self._lock, self._closed = threading.RLock(), False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="watch")
        self._thread.start()

    def begin(self) -> str:
        """Forget the ranks of the launch before, whose lines end, and with them they; what the next ones are to find in
        their environment."""
        with self._lock:
            for heartbeat in list(self._heartbeats.values()):
                self._drop(heartbeat)
            self._ranks, self.key = [], secrets.token_hex(8)
            return f"{self.address}:{self._server.getsockname()[1]}:{self.key}"

    def look(self) -> list[RankStatus]:
        """All ranks that have told of themselves in this launch; their fields change as they tell more."""
        with self._lock:
            return list(self._ranks)

    def send(self, number: int) -> int:
        """Let every rank send itself a signal; how many have been told."""
        return sum(self._send_one(heartbeat, number) for heartbeat in self._list_open())

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
        self._server.close()

    def _list_open(self) -> list[_Heartbeat]:
        with self._lock:
            return [heartbeat for heartbeat in self._heartbeats.values() if heartbeat.status is not None]

    def _send_one(self, heartbeat: _Heartbeat, number: int) -> bool:
        try:
            heartbeat.socket.send(json.dumps({"signal": number}).encode() + b"\n", socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _serve(self) -> None:
        while not self._closed:
            began = time.monotonic()
            for key, _ in self._selector.select(timeout=0.1):
                if key.fileobj is self._server:
                    self._accept()
                elif heartbeat := self._heartbeats.get(key.fileobj):  # type: ignore[call-overload]
                    self._receive(heartbeat)
            self._drop_strangers()
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
        with contextlib.suppress(OSError):
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
            else:
                heartbeat.status.hear(told)
        except Exception:  # noqa: BLE001 - whatever it is: the other lines are heard on
            return heartbeat.status is not None  # a rank whose sending was cut short tells more in the next line
        return True

    def _drop(self, heartbeat: _Heartbeat) -> None:
        if self._heartbeats.pop(heartbeat.socket, None) is None:
            return
        self._selector.unregister(heartbeat.socket)
        heartbeat.socket.close()
        if heartbeat.status is not None:
            heartbeat.status.is_open = False
            if not heartbeat.status.said_goodbye:
                heartbeat.status.fail()


@dataclass(frozen=True, slots=True)
class Patience:
    """How long nothing may happen, in seconds; 0 is for ever.

    Attributes:
        start: from a rank's first word to its first step.
        step: from one step of any rank to the next of any.
    """

    start: float = 1800.0
    step: float = 600.0


def find_silence(ranks: list[RankStatus], patience: Patience, heard_until: float) -> float | None:
    """Seconds since the last step of any rank, where these are more than there may be; None where all is well.

    Ranks wait for each other in every step: one that hangs lets all of them fall silent, and one that is slow none.
    """
    if not ranks:
        return None
    silence = heard_until - max(seen.heard for seen in ranks)
    allowed = patience.start if all(seen.step is None for seen in ranks) else patience.step
    return silence if allowed and silence > allowed else None


def find_first_failure(ranks: list[RankStatus]) -> RankStatus | None:
    """The first rank that has failed: by an error, with a code, or without a word; others cannot go on without it, and
    what they say of it is not the cause."""
    failed = [(seen.failed, seen) for seen in ranks if seen.failed is not None]
    return min(failed, key=lambda each: each[0], default=(0.0, None))[1]


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
