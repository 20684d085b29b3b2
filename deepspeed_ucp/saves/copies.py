"""Copies of each node's saves in the memory of other nodes: the writers send and take them.

A connection is for one save. Both ends prove that they know the job's secret. Then come a description of the save as
JSON, the answer whether it is wanted, its files, each with its CRC32 behind it, a byte that says that none of them has
changed meanwhile, and the answer that all is there. What comes is written aside and gets its name when all has come.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import UcpError, escape
from ..io.checksum import crc32
from ..io.disk import write_at
from ..io.paths import LONGEST_PATH, is_below
from ..sources.files import BASE
from .memory import Job, Snapshot, count_free, link_file

logger = logging.getLogger("deepspeed_ucp")

_NONCE, _MAC, _SUM, _LENGTH = 32, 32, 4, 4
"""Bytes of what is asked of the other end, of its proof, of a file's CRC32 and of a message's length."""

_LONGEST = 16 << 20
"""Bytes of a message: descriptions of 100,000 files."""

_PIECE = 1 << 20
"""Bytes that are read, summed and sent at once."""

_REACHED, _SILENT = 10.0, 30.0
"""Seconds in which a node is to be reached, and after which one that says nothing counts as gone."""

_LOOKED, _AGAIN = 0.1, 2.0
"""Seconds between looks for a save that is to be copied, and until one that failed is sent again."""

STRANGERS = 64
"""Connections that are served at once."""

_SENDER, _TAKER, _UNCHANGED = b"sender", b"taker", b"\1"


class _Sent(BaseModel):
    """A file: its path below a folder of tags, bytes, and time of change (ns)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path: str
    size: int = Field(ge=0, lt=1 << 62)
    changed: int = Field(ge=0, lt=1 << 62)


class _Parcel(BaseModel):
    """What a sender has: a save, its files (none, where the other end has them), and which places have it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    save: Snapshot
    files: list[_Sent]
    done: dict[str, str]


class _Reply(BaseModel):
    """Whose it is, and whether the files are wanted, but for those that are there; why they cannot be taken."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    host: str = Field(max_length=256)
    wanted: bool = False
    held: list[str] = []
    why: str = Field(default="", max_length=4096)


class _TransferError(Exception):
    """What came is not what was to come; in words."""


def _prove(sock: socket.socket, secret: bytes, own: bytes, other: bytes) -> None:
    """Show the other end that this one knows the secret, and see that it does; it speaks as ``other``.

    Raises:
        _TransferError: it does not.
    """
    mine = secrets.token_bytes(_NONCE)
    sock.sendall(mine)
    theirs = _read(sock, _NONCE)
    sock.sendall(_sum(secret, own, theirs, mine))
    if not hmac.compare_digest(_read(sock, _MAC), _sum(secret, other, mine, theirs)):
        raise _TransferError("the other end does not know this job's secret")


def _sum(secret: bytes, role: bytes, *asked: bytes) -> bytes:
    return hmac.digest(secret, b"|".join((role, *asked)), "sha256")


def _say(sock: socket.socket, told: str) -> None:
    data = told.encode()
    sock.sendall(len(data).to_bytes(_LENGTH, "big") + data)


def _hear(sock: socket.socket) -> bytes:
    size = int.from_bytes(_read(sock, _LENGTH), "big")
    if size > _LONGEST:
        raise _TransferError(f"a message of {size:,} bytes")
    return _read(sock, size)


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _hear_answer(sock: socket.socket) -> _Reply:
    answer = _Reply.model_validate_json(_hear(sock))
    if answer.why:
        raise _TransferError(f"{answer.host}: {answer.why}")
    return answer


def _read(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise _TransferError("the connection has ended in the middle")
        view = view[count:]


def _send_file(sock: socket.socket, path: str, size: int, buffer: memoryview) -> None:
    crc, at = 0, 0
    with open(path, "rb", buffering=0) as file:
        while at < size:
            count = file.readinto(buffer[: size - at])
            if not count:
                raise _TransferError(f"{path} has become shorter")
            crc, at = crc32(buffer[:count], crc), at + count
            sock.sendall(buffer[:count])
    sock.sendall(crc.to_bytes(_SUM, "big"))


def _take_file(sock: socket.socket, path: str, size: int, buffer: memoryview, note: Callable[[], None]) -> None:
    """Over the bytes of a file that is there: its pages need not be found anew; ``note`` that something has come."""
    fd, crc, at = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), 0, 0
    try:
        while at < size:
            piece = buffer[: size - at]
            _fill(sock, piece)
            crc = crc32(piece, crc)
            write_at(fd, piece, at)
            at += piece.nbytes
            note()
        os.ftruncate(fd, size)
    finally:
        os.close(fd)
    if crc != int.from_bytes(_read(sock, _SUM), "big"):
        raise _TransferError(f"{path}: its CRC32 is not the one that was sent")


class Replicator:
    """A writer's side of the copies: sends its node's saves, and takes those of others.

    Args:
        settings: of :class:`Neighbours`.
        keep: whole saves of a node that stay.
        wait: seconds after the job's end in which what is on its way is finished.
    """

    def __init__(self, job: Job, settings: Mapping[str, Any], listener: socket.socket, keep: int, wait: float) -> None:
        self.job, self.keep, self.wait, self.listener = job, keep, wait, listener
        self.secret, self.name = bytes.fromhex(settings["secret"]), str(settings["name"])
        self.nodes, self.sources = int(settings["nodes"]), list[int](settings["from"])
        self.targets = {int(node): (str(host), int(port)) for node, (host, port) in settings["to"].items()}
        self._is_ending, self._is_over = threading.Event(), threading.Event()
        self._told = dict[object, str]()
        self._noting, self._taking = threading.Lock(), defaultdict[int, threading.Lock](threading.Lock)
        self._current = dict[int, socket.socket]()
        self._heard = dict[int, float]()
        self._served = threading.BoundedSemaphore(STRANGERS)
        self._failing = dict[int, float]()
        self._forwarded = defaultdict[int, dict[int, dict[str, str]]](dict)
        self._ended = 0.0

    def start(self) -> None:
        """Send and take in the background."""
        threading.Thread(target=self._serve, daemon=True, name="copies").start()
        for node in self.targets:
            threading.Thread(target=self._send_all, args=(node,), daemon=True, name=f"copies to {node}").start()

    def end(self) -> None:
        """No save will come any more: the newest one is sent, whichever the ranks have agreed upon."""
        self._ended = time.monotonic()
        self._is_ending.set()

    def finish(self) -> None:
        """Wait for the newest save, both ways; not for a node that cannot be reached, or that has gone silent."""
        while (now := time.monotonic()) < self._ended + self.wait:
            if not any(self._lacks(node, now) for node in self.targets) and not self._is_awaiting(now):
                break
            time.sleep(_LOOKED)
        self._is_over.set()

    def _lacks(self, node: int, now: float) -> bool:
        """Whether a node is still to get the newest save, or to hear of it, and can be reached."""
        saves = self.job.list_saves()
        if not saves or self._forwarded[node].get(saves[-1].number) == saves[-1].read_done():
            return False
        has_it = saves[-1].read_copied().get(str(node))  # then its writer may have ended
        return now <= self._failing.get(node, now) + (0 if has_it else _REACHED)

    def _is_awaiting(self, now: float) -> bool:
        """Whether the newest save is still to come from a node that has not gone silent."""
        newest = max((save.number for save in self.job.list_saves()), default=0)
        came = {(copy.node, copy.number) for copy in self.job.list_copies()}
        awaited = [node for node in self.sources if newest and (node, newest) not in came]
        return any(now < max(self._ended, self._heard.get(node, 0.0)) + _SILENT for node in awaited)

    # -- sending

    def _send_all(self, node: int) -> None:
        """Send a node what it is to have."""
        while not self._is_over.wait(_LOOKED):
            save = None
            try:
                save = self._choose(node)
                if save is not None:
                    self._forwarded[node][save.number] = self._send(node, save)
                    self._told.pop(node, None)
                    self._failing.pop(node, None)
            except (OSError, UcpError, _TransferError, ValueError) as error:
                self._note_failure(node, save, str(error))
                time.sleep(_AGAIN)

    def _choose(self, node: int) -> Snapshot | None:
        """The save that a node is to get now, or one of which it is to hear which places have it."""
        saves, (_, current) = self.job.list_saves(), self.job.read_copying()
        for save in saves[::-1]:
            if save.read_copied().get(str(node)):
                if self._forwarded[node].get(save.number) != save.read_done():
                    return save
            elif save.number == current or (self._is_ending.is_set() and save is saves[-1]):
                return save
        return None

    def _send(self, node: int, save: Snapshot) -> dict[str, str]:
        """Send a save; which places have it, as the other node has been told.

        Raises:
            OSError, _TransferError, ValidationError: it has not come there whole.
        """
        done, has_it = save.read_done(), save.read_copied().get(str(node))
        paths = [] if has_it else save.list_files()
        looks = {path: os.stat(os.path.join(save.folder, path)) for path in paths}
        files = [_Sent(path=path, size=look.st_size, changed=look.st_mtime_ns) for path, look in looks.items()]
        parcel = _Parcel(save=replace(save, folder=""), files=files, done=done)
        with socket.create_connection(self.targets[node], timeout=_REACHED) as sock:
            _prove(sock, self.secret, _SENDER, _TAKER)
            sock.settimeout(_SILENT)
            _say(sock, parcel.model_dump_json())
            answer = _hear_answer(sock)
            if answer.wanted:
                buffer = memoryview(bytearray(_PIECE))
                for each in (each for each in files if each.path not in answer.held):
                    _send_file(sock, os.path.join(save.folder, each.path), each.size, buffer)
                if not save.is_recorded():  # a newer one may be written over it
                    raise _TransferError(f"{save.tag} is no longer in memory")
                sock.sendall(_UNCHANGED)
                answer = _hear_answer(sock)
        if not has_it:
            with self._noting:
                save.note_copied(node, answer.host or "?")
        return done

    def _note_failure(self, node: int, save: Snapshot | None, why: str) -> None:
        self._failing.setdefault(node, time.monotonic())
        self._warn(node, f"node {node} has no copy, to be sent again: {why}")
        with suppress(OSError, UcpError), self._noting:
            if save is not None and save.is_recorded() and not save.read_copied().get(str(node)):
                save.note_copied(node, "")

    def _warn(self, about: object, text: str) -> None:
        """Once for each fault."""
        if self._told.get(about) != text:
            self._told[about] = text
            logger.warning("%s", escape(text))

    # -- taking

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self._served.acquire()
            try:
                sock, _ = self.listener.accept()
            except OSError as error:  # too many files are open
                self._served.release()
                self._warn("listener", str(error))
                time.sleep(_AGAIN)
                continue
            threading.Thread(target=self._serve_one, args=(sock,), daemon=True).start()

    def _serve_one(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(_SILENT)
                patience = threading.Timer(_REACHED, _hang_up, (sock,))  # for a stranger who says little at a time
                patience.start()
                try:
                    _prove(sock, self.secret, _TAKER, _SENDER)
                finally:
                    patience.cancel()
                self._take(sock)
        except (OSError, UcpError, _TransferError) as error:
            self._warn("taken", f"a copy has not come: {error}")
        finally:
            self._served.release()

    def _take(self, sock: socket.socket) -> None:
        """Take what a sender has, if it is wanted.

        Raises:
            OSError, UcpError, _TransferError: it has not come whole; nothing is there for it.
        """
        try:
            parcel = _Parcel.model_validate_json(_hear(sock))
            self._check(parcel)
        except (ValidationError, _TransferError) as error:
            told = "it is no description of a save" if isinstance(error, ValidationError) else str(error)
            self._answer(sock, why=f"refused: {told}"[:LONGEST_PATH])
            raise _TransferError(f"refused: {told}") from None
        with self._alone(parcel.save.node, sock):
            self._take_parcel(sock, parcel)

    def _take_parcel(self, sock: socket.socket, parcel: _Parcel) -> None:
        save = replace(parcel.save, folder=self.job.find_copy(parcel.save.node, parcel.save.number))
        if save.is_recorded() or not parcel.files:
            if save.is_recorded():
                save.replace_done(parcel.done)
            self._answer(sock)
            return
        aside = os.path.join(self.job.folder, f"copy-{save.node}-new")
        self._reuse(save, aside)
        try:
            held = self._link_base(parcel, aside)
            if why := self._find_obstacle(parcel, aside, held):
                self._answer(sock, why=why)
                raise _TransferError(why)
            self._answer(sock, wanted=True, held=held)
            self._take_files(sock, parcel, aside, held)
            made = replace(save, folder=aside)
            made.replace_done(parcel.done)
            made.write_record()
            shutil.rmtree(save.folder, ignore_errors=True)  # one that had been let go of
            os.rename(aside, save.folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._answer(sock)

    def _link_base(self, parcel: _Parcel, aside: str) -> list[str]:
        """Of frozen parameters the files that an older copy has, which are linked: nothing is written over such."""
        save, held = parcel.save, list[str]()
        older = [aside, *(copy.folder for copy in self.job.list_copies() if copy.node == save.node)]
        for each in filter(lambda each: save.is_base(each.path), parcel.files):
            for path in (os.path.join(folder, each.path) for folder in older):
                with suppress(FileNotFoundError):
                    look = os.lstat(path)
                    if (look.st_size, look.st_mtime_ns) == (each.size, each.changed):
                        os.makedirs(os.path.dirname(os.path.join(aside, each.path)), exist_ok=True)
                        link_file(path, os.path.join(aside, each.path))
                        held.append(each.path)
                        break
        for other in Path(aside).rglob(f"{BASE}*/*"):
            if str(other.relative_to(aside)) not in held:
                other.unlink()
        return held

    def _take_files(self, sock: socket.socket, parcel: _Parcel, aside: str, held: Container[str]) -> None:
        """Over what an older copy has left in a folder, but for what is ``held``: there is nothing else then."""
        buffer, note = memoryview(bytearray(_PIECE)), partial(self._hear_from, parcel.save.node)
        found = [path for path in Path(aside).rglob("*") if path.is_file()]
        left = {path.name: path for path in found if str(path.relative_to(aside)) not in held}
        for each in (each for each in parcel.files if each.path not in held):
            path = os.path.join(aside, each.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if old := left.pop(os.path.basename(path), None):
                os.rename(old, path)
            _take_file(sock, path, each.size, buffer, note)
            os.utime(path, ns=(each.changed, each.changed))
        if _read(sock, len(_UNCHANGED)) != _UNCHANGED:
            raise _TransferError("it has changed while it was sent")
        _remove_others(aside, {each.path for each in parcel.files})

    def _hear_from(self, node: int) -> None:
        self._heard[node] = time.monotonic()

    @contextmanager
    def _alone(self, node: int, sock: socket.socket) -> Iterator[None]:
        """Nobody else takes a node's saves: who comes later takes the place of a connection that may be half there."""
        before = self._current.get(node)
        self._current[node] = sock
        if before is not None:
            _hang_up(before)
        with self._taking[node]:
            yield

    def _check(self, parcel: _Parcel) -> None:
        """Raise what a parcel cannot be taken for, whatever it says of itself."""
        save = parcel.save
        if (save.job, save.nodes) != (self.job.name, self.nodes) or save.node not in self.sources:
            raise _TransferError("it is not from a node of this job that sends here")
        if not 0 < save.number < 10**8 or not is_below(save.tag):
            raise _TransferError("neither its number nor its tag may lead elsewhere")
        for each in parcel.files:
            if not (is_below(each.path) and save.owns(each.path)):
                raise _TransferError(f"{each.path!r} is no file of {save.tag!r}")

    def _reuse(self, save: Snapshot, aside: str) -> None:
        """Let go of what newer copies of a node have taken the place of; the new one is written over the first."""
        kept = self.job.read_copying()
        copies = [copy for copy in self.job.list_copies() if copy.node == save.node]
        for copy in copies[: -self.keep] if not self._is_ending.is_set() else []:
            if copy.number not in kept:
                try:
                    copy.move(aside)
                except OSError:  # one is there
                    copy.remove()

    def _find_obstacle(self, parcel: _Parcel, aside: str, held: Container[str]) -> str:
        """Why memory has no room for a copy, in words: this node's own next save comes first."""
        own = [_measure(save.folder) for save in self.job.list_saves()]
        next_one = own[-1] if len(own) == 1 and not os.path.isdir(self.job.spare) else 0
        needed = sum(each.size for each in parcel.files if each.path not in held) + next_one
        free = count_free(self.job.folder) + (_measure(aside, held) if os.path.isdir(aside) else 0)
        if needed <= free:
            return ""
        return f"a copy takes {needed >> 20:,} MiB of {self.job.folder}, where {free >> 20:,} MiB are free"

    def _answer(self, sock: socket.socket, *, wanted: bool = False, held: Sequence[str] = (), why: str = "") -> None:
        _say(sock, _Reply(host=self.name, wanted=wanted, held=list(held), why=why).model_dump_json())


def _measure(folder: str, without: Container[str] = ()) -> int:
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files if str(path.relative_to(folder)) not in without)


def _remove_others(folder: str, wanted: set[str]) -> None:
    for path in Path(folder).rglob("*"):
        if not path.is_dir() and str(path.relative_to(folder)) not in wanted:
            path.unlink()
