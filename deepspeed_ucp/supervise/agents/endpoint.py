"""Where agents find who leads: addresses that are known beforehand, or a file that all of them see."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from ...errors import ConfigError
from ..hosts import is_local
from .lines import is_loopback, join_address, listen, split_address


class Endpoint(Protocol):
    """Where a leader is to be found.

    Attributes:
        decides: it says which of two sides of a cut network goes on.
        only_here: all agents are on this machine.
    """

    decides: bool
    only_here: bool

    def look(self) -> list[str]:
        """Addresses where one may be."""

    def open(self) -> socket.socket | None:
        """A listener at an address that is this agent's; None where it has none (yet)."""

    def find_own(self, port: int, waited: float, last_call: float) -> str | None:
        """At which address this agent would lead a job that nobody leads; None where another one is to.

        Args:
            port: at which it listens in any case.
            waited: seconds for which nobody has been found.
        """

    def claim(self, address: str) -> bool:
        """Let ``address`` be the leader's, in the place of the one that was looked at last; False where another agent
        has done so."""

    def beat(self) -> bool:
        """Say that the leader is alive; False where another agent has taken its place."""

    def follow(self) -> None:
        """A leader has been found, who is the one that the endpoint tells of now."""

    def is_beating(self) -> bool:
        """Whether whoever leads by the endpoint's word has given a sign of life there of late."""

    def is_superseded(self) -> bool:
        """Whether another one than was followed leads by the endpoint's word, and gives signs of life."""

    def release(self) -> None:
        """The job has ended."""


class Addresses:
    """``host:port``, or several with commas: the agent on the first of the hosts that is there begins.

    Args:
        is_host: whether they are this machine's, where it cannot tell.

    Raises:
        ConfigError: it has another form.
    """

    decides = False

    def __init__(self, text: str, *, is_host: bool | None = None) -> None:
        # agents of one machine listen at its IPv4 loopback
        self.all = [each.strip().replace("[::1]", "127.0.0.1") for each in text.split(",")]
        try:
            self._places = [split_address(each) for each in self.all]
        except ValueError as error:
            raise ConfigError(
                f"--rdzv-endpoint {text}: expected HOST:PORT, several of them with commas, or the path of a file in a "
                f"shared folder (with a /); {error.args[0]!r} is none."
            ) from None
        self.only_here = all(is_loopback(host) for host, _ in self._places)
        machine = (socket.gethostname(), socket.getfqdn())
        self._are_own = [
            (host in machine or is_local(host)) if is_host is None else is_host for host, _ in self._places
        ]
        self._own = None if self._places[0][1] else self.all[0]

    def look(self) -> list[str]:
        return [each for each in self.all if split_address(each)[1]]

    def open(self) -> socket.socket | None:
        for address, (host, port), is_own in zip(self.all, self._places, self._are_own, strict=True):
            if self._own is None and is_own:
                with contextlib.suppress(OSError):  # another agent of this machine has it
                    opened = listen(port, only_here=is_loopback(host))
                    self._own = address
                    return opened
        return None

    def find_own(self, port: int, waited: float, last_call: float) -> str | None:
        if self._own is not None and (self._own == self.all[0] or waited > last_call):
            host, own = split_address(self._own)
            return join_address(host, own or port)
        return None

    def claim(self, address: str) -> bool:
        return True

    def beat(self) -> bool:
        return True

    def follow(self) -> None:
        """There is nothing that tells."""

    def is_beating(self) -> bool:
        return False

    def is_superseded(self) -> bool:
        return False

    def release(self) -> None:
        """Nothing is left of it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the file says: how often the leader has changed, the leader's address, its last sign of life (a count)."""

    generation: int = 0
    address: str = ""
    beat: int = 0


_UNREADABLE = (OSError, ValueError, TypeError)
"""What comes of a file that cannot be had, or that somebody has spoilt: nobody new leads by it then."""


class SharedFile:
    """A file that all agents see, with an entry for each run's id; who changes it holds its lock.

    Args:
        silence: seconds after which a leader that writes nothing is lost.
        host: this machine's address, where it was told.

    Raises:
        ConfigError: it cannot be written.
    """

    decides, only_here = True, False

    def __init__(self, path: str, run_id: str, silence: float, host: str | None = None) -> None:
        self.path, self._run, self._silence = path, run_id, silence
        self._host = host or find_machine_address()
        self._seen, self._seen_at = _Entry(), time.monotonic()
        self._own, self._followed, self._address = -1, -1, ""
        try:
            with self._change():
                pass
        except OSError as error:
            raise ConfigError(
                f"--rdzv-endpoint {path}: the file cannot be written ({error.strerror}). Name one in a folder that all "
                "nodes see, and may write to."
            ) from None
        except ValueError:
            raise ConfigError(
                f"--rdzv-endpoint {path}: the file holds something else. Name one that is not there yet."
            ) from None

    def look(self) -> list[str]:
        with contextlib.suppress(*_UNREADABLE):
            self._note(self._read())
        return [self._seen.address] if self._seen.address else []

    def open(self) -> socket.socket | None:
        return None

    def find_own(self, port: int, waited: float, last_call: float) -> str | None:
        return join_address(self._host, port)

    def claim(self, address: str) -> bool:
        with contextlib.suppress(*_UNREADABLE), self._change() as held:
            found = _Entry(*held.get(self._run, ()))
            if found.generation != self._seen.generation:
                return False
            self._own, self._address = found.generation + 1, address
            self._followed = self._own
            held[self._run] = [self._own, address, 0]
            self._note(_Entry(self._own, address, 0))
            return True
        return False

    def beat(self) -> bool:
        with contextlib.suppress(*_UNREADABLE), self._change() as held:
            found = _Entry(*held.get(self._run, ()))
            if (found.generation, found.address) > (self._own, "") and found.address != self._address:
                return False
            held[self._run] = [self._own, self._address, found.beat + 1]  # also where the file has been removed
        return True

    def follow(self) -> None:
        self.look()
        self._followed = self._seen.generation

    def is_superseded(self) -> bool:
        return self._seen.generation > self._followed and self.is_beating()

    def is_beating(self) -> bool:
        return time.monotonic() - self._seen_at < self._silence

    def release(self) -> None:
        with contextlib.suppress(*_UNREADABLE), self._change() as held:
            if _Entry(*held.get(self._run, ())).generation == self._own:
                del held[self._run]

    def _note(self, entry: _Entry) -> None:
        if entry != self._seen:
            self._seen, self._seen_at = entry, time.monotonic()

    def _read(self) -> _Entry:
        with open(self.path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return _Entry(*_parse(file.read()).get(self._run, ()))

    @contextlib.contextmanager
    def _change(self) -> Iterator[dict[str, Sequence[Any]]]:
        """All entries, which are written when the block has changed them."""
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            held = _parse(text)
            yield held
            if (new := json.dumps(held)) != text:
                file.seek(0)
                file.write(new)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())


def _parse(text: str) -> dict[str, Sequence[Any]]:
    """A file's entries.

    Raises:
        ValueError: it is none of ours.
    """
    found = json.loads(text or "{}")
    if not isinstance(found, dict):
        raise ValueError("no entries")
    return found


def find_machine_address() -> str:
    """This machine's address as others are likely to reach it."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # nothing is sent: the system tells which way it would go
            return str(probe.getsockname()[0])
    found = [each.address for own in psutil.net_if_addrs().values() for each in own if each.family == socket.AF_INET]
    return next((address for address in found if not is_loopback(address)), "127.0.0.1")
