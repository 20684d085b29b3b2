"""Write an output to a temporary folder; rename it when complete and durable.

While ``<parent>/<name>`` is written, its parent also holds ``.<name>.ucp-lock``, ``.<name>.ucp-partial`` (the temporary
folder) and, between the two renames that replace an older output, ``.<name>.ucp-old``. A run that was killed leaves its
temporary folder behind; the next run to the same destination deletes it and starts again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

from ..errors import CheckpointError, StorageError, shorten
from .deletion import delete_tree
from .disk import explain_full, is_still_at, sync_file, sync_folder, sync_tree, write_atomically
from .jsonfile import parse_json

_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def hold_lock(path: str, purpose: str) -> Iterator[None]:
    """Context in which this process holds a lock file, which is deleted at the end.

    The kernel releases the lock when its holder dies. On a file system without ``flock`` the existence of the file is
    the lock; after a crash the user must remove it, as the error says. Raises StorageError if another process holds it.
    """
    fd = _acquire(path, purpose)
    try:
        with explain_full(path):
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(holder).encode(), 0)
        yield
    finally:
        with suppress(OSError):  # an error of this rank must not replace the error that all ranks raise
            if is_still_at(fd, path):
                os.unlink(path)
        os.close(fd)


def _acquire(path: str, purpose: str) -> int:
    while True:
        flags, is_new = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, True
        with explain_full(path):
            try:
                fd = os.open(path, flags | os.O_EXCL, 0o666)
            except FileExistsError:
                fd, is_new = os.open(path, flags, 0o666), False
        try:
            _try_lock(fd, is_new, path, purpose)
        except BaseException:
            os.close(fd)
            raise
        # The former holder may have removed the file between open and flock.
        if is_still_at(fd, path):
            return fd
        os.close(fd)


def _try_lock(fd: int, is_new: bool, path: str, purpose: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"{purpose} is under way already ({_read_holder(fd)}). Wait until it has ended.", path=path
        ) from error
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if not is_new:
            raise StorageError(
                f"{purpose} is under way already ({_read_holder(fd)}), or was killed: this file system has no "
                "locks that end with their holder. If that process is no more, remove the file and run it again.",
                path=path,
            ) from error


def _read_holder(fd: int) -> str:
    try:
        holder = parse_json(os.pread(fd, 4096, 0), "lock")
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
    except (CheckpointError, KeyError, OSError):
        return "by a process that has not written its name"


logger = logging.getLogger("deepspeed_ucp")

MANIFEST = "ucp_manifest.json"
LATEST = "latest_universal"


@dataclass(frozen=True, slots=True)
class OutputKind:
    """A kind of output. An output replaces only one of the same kind.

    Attributes:
        name: with its article, such as ``an atomic checkpoint``.
        maker: the work that writes it, such as ``conversion``.
        is_output: returns True if a folder is a complete output of this kind.
        parts: names of the entries that it may contain.
        kept: names of other entries that are copied to the new output when it is replaced.
        last: files, in order, without which no output is complete: a store gets them last.
    """

    name: str
    maker: str
    is_output: Callable[[str], bool]
    parts: re.Pattern[str]
    kept: re.Pattern[str] = re.compile(r"(?!)")
    last: tuple[str, ...] = ()

    def check_replaceable(self, folder: str, names: Iterable[str], *, is_ours: bool, overwrite: bool) -> None:
        """Raise if a folder or prefix with these entries may not be replaced.

        Args:
            is_ours: it is a complete output of this kind, or the remains of an interrupted one.
        """
        if not is_ours:
            raise StorageError(f"exists and is not {self.name}, so it stays. Write elsewhere.", path=folder)
        self.refuse_foreign(folder, names)
        if not overwrite:
            raise StorageError("exists already. --overwrite (overwrite=True) replaces it.", path=folder)

    def refuse_foreign(self, folder: str, names: Iterable[str]) -> None:
        """Raise if a folder has entries that no output of this kind contains."""
        foreign = [name for name in names if not (self.parts.fullmatch(name) or self.kept.fullmatch(name))]
        if foreign:
            raise StorageError(
                f"holds files that no {self.maker} wrote ({shorten(sorted(foreign))}), so it stays. Write elsewhere.",
                path=folder,
            )


class Staging:
    """Writer of one output folder: rank 0 locks, begins and commits; all ranks write.

    StorageError if the destination is the root or a bucket, or source and destination contain each other.
    """

    is_remote = False

    def __init__(self, destination: str, source: str, kind: OutputKind) -> None:
        self.destination = os.path.abspath(destination)
        self.kind = kind
        self.parent, self.name = os.path.split(self.destination)
        if not self.name:
            raise StorageError(f"the root folder cannot be {kind.name}; name a folder below it.", path=destination)
        check_apart(destination, os.path.realpath(self.destination), os.path.realpath(source))
        self.folder = self._name_sibling("partial")
        self.aside = self._name_sibling("old")
        self.lock_path = self._name_sibling("lock")

    def _name_sibling(self, suffix: str) -> str:
        return os.path.join(self.parent, f".{self.name}.ucp-{suffix}")

    def path(self, *parts: str) -> str:
        return os.path.join(self.folder, *parts)

    def scratch(self) -> AbstractContextManager[None]:
        """Context of a rank's whole work; no operation in a folder, which all ranks see."""
        return nullcontext()

    def put(self, name: str) -> None:
        """Publish a complete file; no operation in a folder."""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the destination's lock; first repair a commit that was killed halfway."""
        with explain_full(self.parent):
            os.makedirs(self.parent, exist_ok=True)
        with hold_lock(self.lock_path, f"a {self.kind.maker} to {self.destination}"):
            self.recover()
            yield

    def recover(self) -> None:
        """Undo a killed commit, or delete the older output that it has replaced."""
        if not os.path.isdir(self.aside):
            return
        if _is_vacant(self.destination):
            os.rename(self.aside, self.destination)
            sync_folder(self.parent)
        elif self.kind.is_output(self.destination):
            delete_tree(self.aside)

    def check_destination(self, overwrite: bool) -> None:
        if _is_vacant(self.destination):
            return
        is_ours = not os.path.islink(self.destination) and self.kind.is_output(self.destination)
        names = os.listdir(self.destination) if is_ours else ()
        self.kind.check_replaceable(self.destination, names, is_ours=is_ours, overwrite=overwrite)

    def begin(self) -> None:
        """Create the temporary folder; one that an earlier run has left is deleted."""
        self.discard()
        with explain_full(self.folder):
            os.mkdir(self.folder)

    @contextmanager
    def discard_on_error(self) -> Iterator[None]:
        """Delete the temporary folder if the block raises; rank 0 alone."""
        try:
            yield
        except BaseException:
            try:
                self.discard()
            except (OSError, StorageError) as error:  # must not replace the error that all ranks raise
                logger.warning("%s: could not be removed (%s)", self.folder, error)
            raise

    def sync(self) -> None:
        """Sync the files of this node; called on every node before the commit."""
        sync_tree(self.folder)

    def discard(self) -> None:
        """Delete the temporary folder, if there is one; the lock is held."""
        if not os.path.lexists(self.folder):
            return
        if os.path.islink(self.folder) or not os.path.isdir(self.folder):
            raise StorageError("is not a folder, so it stays. Remove it.", path=self.folder)
        self.kind.refuse_foreign(self.folder, [name for name in os.listdir(self.folder) if not _is_temporary(name)])
        delete_tree(self.folder)

    def commit(self, latest: str | None = None, *, overwrite: bool = False) -> None:
        """Rename the temporary folder to the destination; every node has synced its files.

        Args:
            latest: new content of ``latest_universal`` in the parent folder; None leaves it unchanged.
            overwrite: an output of the same kind at the destination is replaced.
        """
        if not self.kind.is_output(self.folder):
            raise CheckpointError(f"is not {self.kind.name}; it is not whole.", path=self.folder)
        self._keep_entries()
        sync_folder(self.folder)
        self._replace_destination(overwrite)
        if os.path.lexists(self.aside):
            delete_tree(self.aside)
        if latest is not None:
            self.write_latest(latest)

    def write_latest(self, name: str) -> None:
        """Write a checkpoint's name to the parent's ``latest_universal``, atomically."""
        write_atomically(os.path.join(self.parent, LATEST), name.encode())

    def _keep_entries(self) -> None:
        """Copy entries that outlive a replaced output, unless the new output has them."""
        for name in os.listdir(self.destination) if os.path.isdir(self.destination) else ():
            entry, kept = os.path.join(self.destination, name), self.path(name)
            if not self.kind.kept.fullmatch(name) or os.path.lexists(kept):
                continue
            with explain_full(self.folder):
                if os.path.isdir(entry):
                    shutil.copytree(entry, kept, ignore_dangling_symlinks=True)
                    sync_tree(kept)
                elif os.path.isfile(entry):
                    shutil.copy2(entry, kept)
                    sync_file(kept)

    def _replace_destination(self, overwrite: bool) -> None:
        if not _is_vacant(self.destination):
            if not overwrite or os.path.islink(self.destination) or not self.kind.is_output(self.destination):
                raise StorageError(
                    f"appeared while the {self.kind.maker} ran; it is not replaced.", path=self.destination
                )
            os.rename(self.destination, self.aside)
        os.rename(self.folder, self.destination)
        sync_folder(self.parent)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.rpartition(".ucp-")[2] in ("tmp", "halt")


def check_apart(destination: str, real: str, source: str) -> None:
    """Raise if source and destination (``real``: without links) contain each other."""
    real, source = (f"{path.rstrip('/')}/" for path in (real, source))
    if source.startswith(real):
        raise StorageError("holds the checkpoint that is read; write it elsewhere.", path=destination)
    if real.startswith(source):
        raise StorageError("lies in the checkpoint that is read; write it elsewhere.", path=destination)


def _is_vacant(path: str) -> bool:
    """Return True if a folder can be renamed to a path: it is missing or empty."""
    if not os.path.lexists(path):
        return True
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)
