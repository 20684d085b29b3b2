"""Copies of each node's saves in the next node's memory.

One connection (``multiprocessing.connection``: HMAC challenges of both ends, framed messages) carries one save. The
sender sends a description as JSON, the receiver a reply as JSON, the sender the files in messages of at most 1 MiB,
each file followed by its CRC32, then a message that the save has not changed meanwhile; the receiver replies again.
No object is unpickled. A copy is received into a temporary folder, which is renamed when it is complete.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import StorageError, UcpError, escape
from ..io.deletion import try_delete_tree
from ..io.disk import count_allocated, write_at
from ..io.paths import LONGEST_PATH, is_below
from ..io.read import crc32
from .budget import count_free
from .memory import Job, SavePart

logger = logging.getLogger("deepspeed_ucp")

_LONGEST = 16 << 20
"""Maximum bytes of a description: about 100,000 files."""

_PIECE = 1 << 20
"""Maximum bytes of a message with file contents."""

_CRC = 4
"""Bytes of a CRC32."""

_REACHED, _SILENT = 10.0, 30.0
"""Seconds to connect and authenticate, and seconds without any byte after which a peer counts as lost."""

_LOOKED, _AGAIN = 0.1, 2.0
"""Seconds between looks for a save to send, and before a failed one is sent again."""

_UNCHANGED = b"unchanged"


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _SentFile(_Message):
    """A file: path relative to a folder of tags, bytes, and modification time (ns)."""

    path: str
    size: int = Field(ge=0, lt=1 << 62)
    changed: int = Field(ge=0, lt=1 << 62)


class _Offer(_Message):
    """Description of a save to send; ``files``: None if sent already, ``done``: marks."""

    save: SavePart
    files: list[_SentFile] | None
    done: dict[str, str]


class _Reply(_Message):
    """A receiver's reply: ``wanted``: send the files; ``why``: reason of a refusal."""

    wanted: bool = False
    why: str = Field(default="", max_length=4096)


_FAULTS = (OSError, EOFError, UcpError, AuthenticationError, ValidationError)
"""Errors of a transfer, after which it is tried again."""


class Peer:
    """An authenticated connection.

    Args:
        sock: connected; closed with the peer.
        accepted: the other end has connected to this one.

    Raises:
        AuthenticationError: the other end does not know the secret.
        OSError, EOFError: it did not answer in time, or closed the connection.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, accepted: bool) -> None:
        self._sock, self.received = sock, 0.0
        sock.settimeout(None)  # a `Connection` needs a blocking descriptor: timeouts of the kernel end a read
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(int(_SILENT * 1e6), 10**6)))
        self._connection = Connection(os.dup(sock.fileno()))
        patience = threading.Timer(_REACHED, self.disconnect)  # a peer may send one byte at a time
        patience.start()
        try:
            for challenge in (deliver_challenge, answer_challenge)[:: 1 if accepted else -1]:
                challenge(self._connection, secret)
        except BaseException:
            self.close()
            raise
        finally:
            patience.cancel()

    def disconnect(self) -> None:
        """End the connection, also while another thread reads from it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        self._sock.close()

    def send(self, data: bytes | memoryview) -> None:
        self._connection.send_bytes(data)

    def receive(self, most: int) -> bytes:
        data = self._connection.recv_bytes(most)
        self.received = time.monotonic()
        return data

    def reply(self, *, wanted: bool = False, why: str = "") -> None:
        self.send(_Reply(wanted=wanted, why=why).model_dump_json().encode())

    def receive_reply(self) -> _Reply:
        """Receive a reply; StorageError if the receiver refuses the save."""
        reply = _Reply.model_validate_json(self.receive(_LONGEST))
        if reply.why:
            raise StorageError(reply.why)
        return reply

    def send_file(self, path: str, size: int) -> None:
        """Send a file's bytes, then their CRC32."""
        buffer, crc, at = memoryview(bytearray(min(_PIECE, size))), 0, 0
        with open(path, "rb", buffering=0) as file:
            while at < size:
                count = file.readinto(buffer[: size - at])
                if not count:
                    raise StorageError(f"{path} was truncated while it was sent")
                crc, at = crc32(buffer[:count], crc), at + count
                self.send(buffer[:count])
        self.send(crc.to_bytes(_CRC, "big"))

    def receive_file(self, path: str, size: int) -> None:
        """Receive a file; StorageError if its CRC32 is wrong."""
        fd, crc, at = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), 0, 0
        try:
            while at < size:
                piece = self.receive(min(_PIECE, size - at))
                crc = crc32(piece, crc)
                write_at(fd, piece, at)
                at += len(piece)
        finally:
            os.close(fd)
        if crc != int.from_bytes(self.receive(_CRC), "big"):
            raise StorageError(f"{path}: its CRC32 is not the one that was sent")


class Replicator:
    """Sends a node's saves to the next node, and receives those of the node before.

    Args:
        settings: of :class:`~.neighbours.Neighbours`.
        wait: seconds after the job's end to finish transfers.
    """

    def __init__(self, job: Job, settings: Mapping[str, Any], listener: socket.socket, wait: float) -> None:
        self.job, self.wait, self.listener = job, wait, listener
        self.secret = bytes.fromhex(settings["secret"])
        self.nodes, self.source, self.target = int(settings["nodes"]), int(settings["from"]), int(settings["to"])
        self.address = str(settings["address"][0]), int(settings["address"][1])
        self._is_over = threading.Event()
        self._logged = dict[str, str]()
        self._current: Peer | None = None
        self._failing: float | None = None  # time of the first of the attempts that fail
        self._forwarded = dict[int, dict[str, str]]()
        self._ended = 0.0  # time when the job ended; 0 before

    def start(self) -> None:
        threading.Thread(target=self._serve, daemon=True, name="copies").start()
        threading.Thread(target=self._send_all, daemon=True, name=f"copies to {self.target}").start()

    def end(self) -> None:
        """Note the job's end: from now on the newest save is sent without agreement."""
        self._ended = time.monotonic()

    def finish(self) -> None:
        """Wait until the newest save is sent and received, or a node does not respond."""
        while (now := time.monotonic()) < self._ended + self.wait:
            if not self._target_lacks_save(now) and not self._is_awaiting(now):
                break
            time.sleep(_LOOKED)
        self._is_over.set()

    def _target_lacks_save(self, now: float) -> bool:
        """Return True while a reachable target lacks the newest save or its marks."""
        saves = self.job.list_saves()
        state = saves[-1].read_state() if saves else {}
        if not saves or self._forwarded.get(saves[-1].number) == state["done"]:
            return False
        has_it = state["copied"].get(str(self.target))  # then its writer may have ended
        return now <= (now if self._failing is None else self._failing) + (0 if has_it else _REACHED)

    def _is_awaiting(self, now: float) -> bool:
        """Return True while a live source has not sent its part of the newest save."""
        newest = max((save.number for save in self.job.list_saves()), default=0)
        if not newest or newest in [copy.number for copy in self.job.list_copies() if copy.node == self.source]:
            return False
        received = self._current.received if self._current is not None else 0.0
        return now < max(self._ended, received) + _SILENT

    # -- sending

    def _send_all(self) -> None:
        while not self._is_over.wait(_LOOKED):
            save = None
            try:
                save = self._choose_save()
                if save is not None:
                    self._forwarded[save.number] = self._send(save)
                    self._failing = None
                    self._logged.pop("sent", None)
            except _FAULTS as error:
                self._note_failure(save, str(error) or type(error).__name__)
                time.sleep(_AGAIN)

    def _choose_save(self) -> SavePart | None:
        """Return the save whose files or marks the target lacks, or None."""
        saves, current = self.job.list_saves(), self.job.read("copying").get("current")
        for save in saves[::-1]:
            state = save.read_state()
            if state["copied"].get(str(self.target)):
                if self._forwarded.get(save.number) != state["done"]:
                    return save
            elif save.number == current or (self._ended and save is saves[-1]):
                return save
        return None

    def _send(self, save: SavePart) -> dict[str, str]:
        """Send a save's files (if not sent before) and marks; return the marks."""
        state = save.read_state()
        done, has_it = state["done"], state["copied"].get(str(self.target))
        stats = [] if has_it else [(path, os.stat(os.path.join(save.folder, path))) for path in save.list_files()]
        files = [_SentFile(path=path, size=status.st_size, changed=status.st_mtime_ns) for path, status in stats]
        offer = _Offer(save=replace(save, folder=""), files=None if has_it else files, done=done)
        peer = Peer(socket.create_connection(self.address, timeout=_REACHED), self.secret, accepted=False)
        try:
            peer.send(offer.model_dump_json().encode())
            reply = peer.receive_reply()
            if reply.wanted:
                for file in files:
                    peer.send_file(os.path.join(save.folder, file.path), file.size)
                if not save.is_recorded():  # a newer one may be written over it
                    raise StorageError(f"{save.tag} is no longer in memory")
                peer.send(_UNCHANGED)
                peer.receive_reply()
        finally:
            peer.close()
        if not has_it:
            save.note("copied", {str(self.target): "yes"})
        return done

    def _note_failure(self, save: SavePart | None, why: str) -> None:
        self._failing = time.monotonic() if self._failing is None else self._failing
        self._warn("sent", f"node {self.target} has no copy, to be sent again: {why}")
        with suppress(OSError, UcpError):
            if save is not None and save.is_recorded() and not save.read("copied").get(str(self.target)):
                save.note("copied", {str(self.target): ""})

    def _warn(self, about: str, text: str) -> None:
        if self._logged.get(about) != text:
            self._logged[about] = text
            logger.warning("%s", escape(text))

    # -- receiving

    def _serve(self) -> None:
        """Serve one connection after the other: there is one sender."""
        while not self._is_over.is_set():
            try:
                sock, _ = self.listener.accept()
            except OSError as error:  # too many files are open
                self._warn("listener", str(error))
                time.sleep(_AGAIN)
                continue
            self._serve_one(sock)

    def _serve_one(self, sock: socket.socket) -> None:
        try:
            peer = Peer(sock, self.secret, accepted=True)
            try:
                self._receive(peer)
            finally:
                peer.close()
        except _FAULTS as error:
            self._warn("received", f"a copy was not received: {str(error) or type(error).__name__}")
        finally:
            sock.close()

    def _receive(self, peer: Peer) -> None:
        """Receive a save if it is wanted.

        Raises:
            _FAULTS: it did not arrive completely; the received part is deleted.
        """
        try:
            offer = _Offer.model_validate_json(peer.receive(_LONGEST))
            self._check_offer(offer)
        except (ValidationError, StorageError) as error:
            why = "it is not a description of a save" if isinstance(error, ValidationError) else str(error)
            peer.reply(why=f"refused: {why}"[:LONGEST_PATH])
            raise StorageError(f"refused: {why}") from None
        self._current = peer
        save = replace(offer.save, folder=self.job.find_copy(offer.save.node, offer.save.number))
        if save.is_recorded() or offer.files is None:
            if save.is_recorded():
                save.note("done", offer.done)
            peer.reply()
            return
        self._drop_older()
        aside = os.path.join(self.job.folder, f"copy-{save.node}-new")
        try_delete_tree(aside)
        try:
            if why := self._find_obstacle(offer.files):
                peer.reply(why=why)
                raise StorageError(why)
            peer.reply(wanted=True)
            for file in offer.files:
                path = os.path.join(aside, file.path)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                peer.receive_file(path, file.size)
                os.utime(path, ns=(file.changed, file.changed))
            if peer.receive(len(_UNCHANGED)) != _UNCHANGED:
                raise StorageError("the save changed while it was sent")
            os.makedirs(aside, exist_ok=True)
            made = replace(save, folder=aside)
            made.write_record()
            made.note("done", offer.done)
            try_delete_tree(save.folder)  # left by an interrupted removal
            os.rename(aside, save.folder)
        finally:
            try_delete_tree(aside)
        peer.reply()

    def _check_offer(self, offer: _Offer) -> None:
        """Raise StorageError for another source's save, or a path that leads elsewhere."""
        save = offer.save
        if (save.job, save.nodes, save.node) != (self.job.name, self.nodes, self.source):
            raise StorageError("it is not from the node of this job that sends here")
        if not 0 < save.number < 10**8 or not is_below(save.tag):
            raise StorageError("its number or its tag leads elsewhere")
        for file in offer.files or ():
            if not (is_below(file.path) and save.owns(file.path)):
                raise StorageError(f"{file.path!r} is no file of {save.tag!r}")

    def _drop_older(self) -> None:
        """Remove copies that newer ones replace."""
        kept = self.job.read("copying").values()
        copies = [copy for copy in self.job.list_copies() if copy.node == self.source]
        for copy in copies[:-1] if not self._ended else []:
            if copy.number not in kept:
                copy.remove()

    def _find_obstacle(self, files: Sequence[_SentFile]) -> str:
        """Return an error message if memory has no room for a copy, else an empty string."""
        allocated = [count_allocated(save.folder) for save in self.job.list_saves()]
        # The next save of this node has priority.
        next_one = allocated[-1] if len(allocated) == 1 and not os.path.isdir(self.job.spare) else 0
        needed, free = sum(file.size for file in files) + next_one, count_free(self.job.folder)
        if needed <= free:
            return ""
        return f"a copy takes {needed >> 20:,} MiB of {self.job.folder}, where {free >> 20:,} MiB are free"
