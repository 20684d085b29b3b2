"""Where an output grows: a folder aside, that is renamed once it is whole and durable.

Beside a destination ``<parent>/<name>`` lie, while it is being made, ``.<name>.ucp-lock``, ``.<name>.ucp-partial`` (the
staging folder) and, for the moment of an exchange, ``.<name>.ucp-old``. A staging folder with an identity is under
way; one without, that is an output of its kind, is whole and durable.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from glob import escape, glob
from typing import Any

from ..errors import CheckpointError, ConfigError, DiskFullError, MismatchError, StorageError, UnsupportedError, shorten
from .deletion import delete_tree
from .disk import explain_full, sync_file, sync_folder, sync_tree, write_atomically
from .journal import Journal, read_journal
from .lock import hold_lock

logger = logging.getLogger("deepspeed_ucp")

MANIFEST = "ucp_manifest.json"
LATEST = "latest_universal"

_IDENTITY = ".ucp-identity.json"
_JOURNAL = ".ucp-journal-"

_LASTING = (CheckpointError, ConfigError, DiskFullError, MismatchError, UnsupportedError)
"""Errors that a second attempt at the same thing meets again."""


@dataclass(frozen=True, slots=True)
class OutputKind:
    """What outputs of one kind are known by: nothing else is ever replaced.

    Attributes:
        name: with its article, such as ``an atomic checkpoint``.
        maker: what writes it, such as ``conversion``.
        is_one: whether a folder is a whole output of this kind.
        parts: names that may lie in it.
        resumable: whether an attempt that was stopped is gone on with; else it is begun anew.
        kept: names of others' files beside them that stay where it is replaced.
        last: files, in their order, without which none is whole: where an output cannot be renamed they are written
            last.
    """

    name: str
    maker: str
    is_one: Callable[[str], bool]
    parts: re.Pattern[str]
    resumable: bool
    kept: re.Pattern[str] = re.compile(r"(?!)")
    last: tuple[str, ...] = ()

    def refuse_taken(self, folder: str, names: Iterable[str], *, is_ours: bool, overwrite: bool) -> None:
        """Refuse a folder or prefix with something in it that may not be replaced.

        Args:
            names: what lies in it.
            is_ours: it is a whole output of this kind, or what an attempt at one has left there.
            overwrite: it may be replaced if it is.

        Raises:
            StorageError: it is something that is never removed, or there without ``overwrite``.
        """
        if not is_ours:
            raise StorageError(f"exists and is not {self.name}, so it is left alone. Write elsewhere.", path=folder)
        foreign = [name for name in names if not (self.parts.fullmatch(name) or self.kept.fullmatch(name))]
        if foreign:
            raise StorageError(
                f"holds what no {self.maker} wrote ({shorten(sorted(foreign))}), so it is left alone. Write elsewhere.",
                path=folder,
            )
        if not overwrite:
            raise StorageError("exists already. --overwrite (overwrite=True) replaces it.", path=folder)


class Staging:
    """The destination of one output. Rank 0 locks, begins and commits; every rank uses paths and journals.

    A folder's; :class:`.upload.RemoteStaging` is a URL's.

    Args:
        destination: the folder to be.
        source: the folder that it is made of.
        kind: what it will be.

    Raises:
        StorageError: it can be no folder of its own (the root), or source and destination lie in each other.
    """

    is_remote = False

    def __init__(self, destination: str, source: str, kind: OutputKind) -> None:
        self.destination = os.path.abspath(destination)
        self.kind = kind
        self.parent, self.name = os.path.split(self.destination)
        if not self.name:
            raise StorageError(f"the root folder cannot be {kind.name}; name a folder below it.", path=destination)
        _check_apart(self.destination, source)
        self.folder = self._beside("partial")
        self.aside = self._beside("old")
        self.lock_path = self._beside("lock")

    def _beside(self, suffix: str) -> str:
        return os.path.join(self.parent, f".{self.name}.ucp-{suffix}")

    def path(self, *parts: str) -> str:
        """A path in the staging folder."""
        return os.path.join(self.folder, *parts)

    def scratch(self) -> AbstractContextManager[None]:
        """Around everything that a rank does: all ranks see the staging folder."""
        return nullcontext()

    def put(self, name: str) -> None:
        """A file is whole: it stays where it is."""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only one who writes this destination; a commit that was killed half-way is put right first.

        Raises:
            StorageError: somebody else writes the same destination.
            DiskFullError: there is no room.
        """
        with explain_full(self.parent):
            os.makedirs(self.parent, exist_ok=True)
        with hold_lock(self.lock_path, f"a {self.kind.maker} to {self.destination}"):
            self.recover()
            yield

    def recover(self) -> None:
        """Finish a commit that was killed between its steps, or take it back."""
        ready = self._is_ready()
        moved = os.path.isdir(self.aside)
        if _is_vacant(self.destination) and (ready or moved):
            os.rename(self.folder if ready else self.aside, self.destination)
            sync_folder(self.parent)
        if os.path.isdir(self.aside) and self.kind.is_one(self.destination):
            delete_tree(self.aside)

    def _is_ready(self) -> bool:
        return self.kind.resumable and self.kind.is_one(self.folder) and not os.path.lexists(self.path(_IDENTITY))

    def check_destination(self, overwrite: bool) -> None:
        """Refuse a destination that may not be replaced.

        Args:
            overwrite: the user wants an existing output of this kind to be replaced.

        Raises:
            StorageError: it is something that is never removed, or there without ``overwrite``.
        """
        if _is_vacant(self.destination):
            return
        is_ours = not os.path.islink(self.destination) and self.kind.is_one(self.destination)
        names = os.listdir(self.destination) if is_ours else ()
        self.kind.refuse_taken(self.destination, names, is_ours=is_ours, overwrite=overwrite)

    def begin(self, identity: dict[str, Any]) -> list[dict[str, Any]]:
        """Make the staging folder, or go on with that of an earlier attempt at the same thing.

        Args:
            identity: what decides the output's bytes, as JSON data; an attempt with another one is thrown away.

        Returns:
            journal entries of the earlier attempt, of all nodes.

        Raises:
            DiskFullError: there is no room.
        """
        text = json.dumps(identity, sort_keys=True).encode()
        if not self.kind.resumable or self._read_identity() != text:
            self.discard()
            self._make(text)
        for name in self.kind.last:  # written last, of everything that is there by then
            with suppress(FileNotFoundError):
                os.unlink(self.path(name))
        return [entry for path in self._find_journals() for entry in read_journal(path)]

    def _make(self, identity: bytes) -> None:
        try:
            with explain_full(self.folder):
                os.mkdir(self.folder)
            if self.kind.resumable:
                write_atomically(self.path(_IDENTITY), identity)
            sync_folder(self.parent)
        except DiskFullError:
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

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the work in a staging folder that has begun; rank 0 alone.

        An error that would come again leaves nothing behind. After any other (the system's, an interrupt, another
        rank's end) what is done stays for a second attempt, where there is something to go on with, and is told of.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, _LASTING) or not self.kind.resumable:
                self._clear_up()
            else:
                logger.warning("%s: what is done is kept here; the same command goes on with it", self.folder)
            raise

    def _clear_up(self) -> None:
        """Discard, where an error is on its way that every rank raises: one of this rank alone may not replace it."""
        try:
            self.discard()
        except OSError as error:
            logger.warning("%s: could not be removed (%s)", self.folder, error)

    def journal(self, node: int) -> Journal:
        """The journal of one writer; any rank, once rank 0 has begun.

        Raises:
            DiskFullError: there is no room.
        """
        return Journal(self.path(f"{_JOURNAL}{node}"))

    def sync(self) -> None:
        """Make what this node wrote durable; every node, before the commit.

        Raises:
            DiskFullError: there turned out to be no room.
        """
        sync_tree(self.folder)

    def discard(self) -> None:
        """Remove the staging folder, if there is one.

        Its identity goes last: what is half removed and has none would look whole.
        """
        if os.path.islink(self.folder) or os.path.isfile(self.folder):
            os.unlink(self.folder)
        elif os.path.isdir(self.folder):
            for entry in list(os.scandir(self.folder)):
                if entry.is_dir(follow_symlinks=False):
                    delete_tree(entry.path)
                elif entry.name != _IDENTITY:
                    os.unlink(entry.path)
            delete_tree(self.folder)

    def commit(self, latest: str | None = None, *, overwrite: bool = False) -> None:
        """Make the staging folder the destination; it is whole, and every node has synced what it wrote.

        Args:
            latest: what ``latest_universal`` beside the destination is to say; None leaves it as it is.
            overwrite: an output of the same kind at the destination is replaced.

        Raises:
            StorageError: the destination may not be replaced.
            CheckpointError: the staging folder is not whole.
            DiskFullError: there turned out to be no room.
        """
        if not self.kind.is_one(self.folder):
            raise CheckpointError(f"is not {self.kind.name}; it is not whole.", path=self.folder)
        self._keep_beside()
        for path in [*self._find_journals(), *([self.path(_IDENTITY)] if self.kind.resumable else [])]:
            os.unlink(path)
        sync_folder(self.folder)
        self._exchange(overwrite)
        if os.path.lexists(self.aside):
            delete_tree(self.aside)
        if latest is not None:
            self.point_at(latest)

    def point_at(self, name: str) -> None:
        """Let ``latest_universal`` beside the destination name a checkpoint; atomically.

        Raises:
            DiskFullError: there is no room.
        """
        temporary = self._beside("latest")  # of its own: others may be written beside this one
        write_atomically(os.path.join(self.parent, LATEST), name.encode(), temporary=temporary)

    def _keep_beside(self) -> None:
        """Copy what lies beside an output that is replaced, and is not of its making: soon there is nothing else."""
        for name in os.listdir(self.destination) if os.path.isdir(self.destination) else ():
            beside, kept = os.path.join(self.destination, name), self.path(name)
            if not self.kind.kept.fullmatch(name) or os.path.lexists(kept):
                continue
            with explain_full(self.folder):
                if os.path.isdir(beside):
                    shutil.copytree(beside, kept, ignore_dangling_symlinks=True)
                    sync_tree(kept)
                elif os.path.isfile(beside):
                    shutil.copy2(beside, kept)
                    sync_file(kept)

    def _exchange(self, overwrite: bool) -> None:
        if not _is_vacant(self.destination):
            if not overwrite or os.path.islink(self.destination) or not self.kind.is_one(self.destination):
                raise StorageError(
                    f"appeared while the {self.kind.maker} ran; it is not replaced.", path=self.destination
                )
            os.rename(self.destination, self.aside)
        os.rename(self.folder, self.destination)
        sync_folder(self.parent)


def _check_apart(destination: str, source: str) -> None:
    real, origin = os.path.realpath(destination), os.path.realpath(source)
    common = os.path.commonpath([real, origin])
    if common == real:
        raise StorageError("holds the checkpoint that is read; write it elsewhere.", path=destination)
    if common == origin:
        raise StorageError("lies in the checkpoint that is read; write it elsewhere.", path=destination)


def _is_vacant(path: str) -> bool:
    """Whether a folder can be renamed there without anything being lost."""
    if not os.path.lexists(path):
        return True
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)
