"""Where a conversion's output grows: a folder aside, with a journal, that is renamed once it is whole and durable.

Beside a destination ``<parent>/<name>`` lie, while it is being made, ``.<name>.ucp-lock``, ``.<name>.ucp-partial`` (the
staging folder) and, for the moment of an exchange, ``.<name>.ucp-old``. A staging folder with an identity is under
way, one with a manifest and without an identity is whole and durable.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape, glob
from typing import Any

from ..errors import CheckpointError, StorageError
from .disk import check_space, explain_full, sync_folder, sync_tree, write_at, write_atomically
from .lock import hold_lock

MANIFEST = "ucp_manifest.json"
LATEST = "latest_universal"

_PARTS = re.compile(r"zero|tmp|ucp_manifest\.json|.*_(model|optim)_states\.pt")
"""What atomic checkpoints consist of, ours and upstream's."""

_IDENTITY = ".ucp-identity.json"
_JOURNAL = ".ucp-journal-"


def is_atomic(folder: str) -> bool:
    """Whether a folder is an atomic checkpoint, ours or upstream's."""
    marks = (MANIFEST, os.path.join("zero", "optimizer_state.pt"))
    return os.path.isdir(os.path.join(folder, "zero")) and any(os.path.exists(os.path.join(folder, m)) for m in marks)


def write_latest(parent: str, name: str) -> None:
    """Let ``latest_universal`` name a checkpoint; atomically.

    Raises:
        StorageError: the disk is full.
    """
    temporary = os.path.join(parent, f".{name}.ucp-latest")  # of its own: others may be written beside this one
    write_atomically(os.path.join(parent, LATEST), name.encode(), temporary=temporary)


class Journal:
    """One node's finished work, a line each; a line that a crash has torn is ignored."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        with explain_full(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._write(b"\n")  # an earlier attempt's last line may be torn

    def append(self, entry: dict[str, Any]) -> None:
        """Note that something is written; thread-safe.

        Raises:
            StorageError: the disk is full.
        """
        text = json.dumps(entry, separators=(",", ":")).encode()
        with explain_full(self.path):
            self._write(b"%08x %s\n" % (zlib.crc32(text), text))

    def _write(self, line: bytes) -> None:
        with self._lock:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_journal(path: str) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as stream:
        for line in stream:
            crc, _, text = line.rstrip(b"\n").partition(b" ")
            if crc == b"%08x" % zlib.crc32(text):
                yield json.loads(text)


class Staging:
    """The destination of one conversion. Rank 0 locks, begins and commits; every rank uses paths and journals.

    Args:
        destination: the folder to be.

    Raises:
        CheckpointError: it can be no folder of its own (the root).
    """

    def __init__(self, destination: str) -> None:
        self.destination = os.path.abspath(destination)
        self.parent, self.name = os.path.split(self.destination)
        if not self.name:
            raise CheckpointError(f"{destination}: the root folder cannot be a checkpoint; name a folder below it.")
        self.folder = self._beside("partial")
        self.aside = self._beside("old")
        self.lock_path = self._beside("lock")

    def _beside(self, kind: str) -> str:
        return os.path.join(self.parent, f".{self.name}.ucp-{kind}")

    def path(self, *parts: str) -> str:
        """A path in the staging folder."""
        return os.path.join(self.folder, *parts)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only one who writes this destination; a commit that was killed half-way is put right first.

        Raises:
            CheckpointError: another conversion to the same destination is running.
            StorageError: the disk is full.
        """
        with explain_full(self.parent):
            os.makedirs(self.parent, exist_ok=True)
        with hold_lock(self.lock_path, f"a conversion to {self.destination}"):
            self.recover()
            yield

    def recover(self) -> None:
        """Finish a commit that was killed between its steps, or take it back."""
        ready = self._is_ready()
        moved = os.path.isdir(self.aside)
        if _is_vacant(self.destination) and (ready or moved):
            os.rename(self.folder if ready else self.aside, self.destination)
            sync_folder(self.parent)
        if os.path.isdir(self.aside) and is_atomic(self.destination):
            shutil.rmtree(self.aside)

    def _is_ready(self) -> bool:
        return os.path.exists(self.path(MANIFEST)) and not os.path.lexists(self.path(_IDENTITY))

    def check_destination(self, source: str, overwrite: bool) -> None:
        """Refuse a destination that may not be replaced.

        Args:
            source: the folder that is converted.
            overwrite: the user wants an existing atomic checkpoint to be replaced.

        Raises:
            CheckpointError: it is something that is never removed, or there without ``overwrite``.
        """
        real = os.path.realpath(self.destination)
        if os.path.commonpath([real, os.path.realpath(source)]) == real:
            raise CheckpointError(f"{self.destination}: holds the checkpoint that is converted; write it elsewhere.")
        if os.path.commonpath([real, os.path.realpath(source)]) == os.path.realpath(source):
            raise CheckpointError(f"{self.destination}: lies in the checkpoint that is converted; write it elsewhere.")
        if _is_vacant(self.destination):
            return
        if os.path.islink(self.destination) or not is_atomic(self.destination):
            raise CheckpointError(
                f"{self.destination}: exists and is no atomic checkpoint, so it is left alone. Write elsewhere."
            )
        if strangers := sorted(name for name in os.listdir(self.destination) if not _PARTS.fullmatch(name)):
            raise CheckpointError(
                f"{self.destination}: holds what no conversion wrote ({', '.join(strangers[:8])}), so it is left "
                "alone. Write elsewhere."
            )
        if not overwrite:
            raise CheckpointError(
                f"{self.destination}: exists already, made of something else. --overwrite (overwrite=True) replaces it."
            )

    def begin(self, identity: dict[str, Any]) -> list[dict[str, Any]]:
        """Make the staging folder, or go on with that of an earlier attempt at the same thing.

        Args:
            identity: what decides the output's bytes, as JSON data; an attempt with another one is thrown away.

        Returns:
            journal entries of the earlier attempt, of all nodes.

        Raises:
            StorageError: the disk is full.
        """
        text = json.dumps(identity, sort_keys=True).encode()
        if self._read_identity() != text:
            self.discard()
            self._make(text)
        with suppress(FileNotFoundError):
            os.unlink(self.path(MANIFEST))  # written last, of everything that is there by then
        return [entry for path in self._find_journals() for entry in _read_journal(path)]

    def _make(self, identity: bytes) -> None:
        try:
            with explain_full(self.folder):
                os.mkdir(self.folder)
            write_atomically(self.path(_IDENTITY), identity)
            sync_folder(self.parent)
        except StorageError:
            self.discard()
            raise

    def _read_identity(self) -> bytes | None:
        try:
            with open(self.path(_IDENTITY), "rb") as stream:
                return stream.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _find_journals(self) -> list[str]:
        return sorted(glob(escape(self.path(_JOURNAL)) + "*"))

    def journal(self, node: int) -> Journal:
        """The journal of one writer; any rank, once rank 0 has begun.

        Raises:
            StorageError: the disk is full.
        """
        return Journal(self.path(f"{_JOURNAL}{node}"))

    def sync(self) -> None:
        """Make what this node wrote durable; every node, before the commit.

        Raises:
            StorageError: the disk turned out to be full.
        """
        sync_tree(self.folder)

    def discard(self) -> None:
        """Remove the staging folder, if there is one."""
        for name in (
            MANIFEST,
            _IDENTITY,
        ):  # first, and in this order: what is half removed is neither whole nor under way
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self.path(name))
        if os.path.islink(self.folder) or os.path.isfile(self.folder):
            os.unlink(self.folder)
        elif os.path.isdir(self.folder):
            shutil.rmtree(self.folder)

    def commit(self, latest: str | None, *, overwrite: bool = False) -> None:
        """Make the staging folder the destination, durably; its manifest is there already.

        Args:
            latest: what ``latest_universal`` beside the destination is to say; None leaves it as it is.
            overwrite: an atomic checkpoint at the destination is replaced.

        Raises:
            CheckpointError: the destination may not be replaced, or the manifest is missing.
            StorageError: the disk turned out to be full.
        """
        if not os.path.exists(self.path(MANIFEST)):
            raise CheckpointError(f"{self.folder}: has no {MANIFEST}; it is not whole.")
        self.sync()
        for path in [*self._find_journals(), self.path(_IDENTITY)]:
            os.unlink(path)
        sync_folder(self.folder)
        self._exchange(overwrite)
        if os.path.lexists(self.aside):
            shutil.rmtree(self.aside)
        if latest is not None:
            write_latest(self.parent, latest)

    def _exchange(self, overwrite: bool) -> None:
        if not _is_vacant(self.destination):
            if not overwrite or os.path.islink(self.destination) or not is_atomic(self.destination):
                raise CheckpointError(f"{self.destination}: appeared while the conversion ran; it is not replaced.")
            os.rename(self.destination, self.aside)
        os.rename(self.folder, self.destination)
        sync_folder(self.parent)


def _is_vacant(path: str) -> bool:
    """Whether a folder can be renamed there without anything being lost."""
    if not os.path.lexists(path):
        return True
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)


__all__ = [
    "LATEST",
    "MANIFEST",
    "Journal",
    "Staging",
    "check_space",
    "explain_full",
    "is_atomic",
    "sync_tree",
    "write_at",
    "write_atomically",
    "write_latest",
]
