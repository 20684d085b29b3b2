"""The saves in a node's memory: a folder per job and a folder per save, which outlive every process.

``<memory>/deepspeed_ucp-<user>/<job>/`` holds ``owner`` (locked by the process that saves), ``lock`` (locked by the
writer) and a folder for each save. A save's folder has the form of any checkpoint folder with one tag, and records:

* ``save-<node>.json``: all ranks of the node have written their files.
* ``done-<node>.json``: the destinations that have the save.
* ``copied-<node>.json``: the nodes that have a copy.
* ``refused-<node>.json``: the destinations that cannot have it, with reasons.
* ``failed-<node>.json``: why the last attempt to write it to a destination failed.

A copy of another node's part is in a separate folder with the same records. The numbers of a job's saves increase,
even if the clock is set back.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, ConfigError, StorageError
from ..io.deletion import delete_own
from ..io.disk import count_allocated, explain_full, sync_file, sync_folder, write_at, write_atomically
from ..io.filesystems import MEMORY, find_kind
from ..io.jsonfile import MOST_BYTES, parse_json, read_bounded, read_json
from ..io.memory import measure_available
from ..io.paths import is_url, normalize

_RECORD, _DONE, _COPIED, _REFUSED, _FAILED, _NEW = "save-", "done-", "copied-", "refused-", "failed-", ".save-"
_OWNER, _WRITTEN, _SPARE, _COPYING = "owner", "written", "spare", "copying"
_OVERTAKEN = ".overtaken"
LOCK = "lock"

_RESERVED = 1 << 14
"""Bytes reserved for each record of a save, because a full memory must not keep a written save pending."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A destination of saves.

    Attributes:
        folder: folder of the tags, or its URL.
        keep: number of this job's saves to keep there; None keeps all.
    """

    folder: str
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One node's part of a save in memory.

    Attributes:
        job: name of the job, the same on all nodes.
        number: number of the save in its job.
        save_dir: folder that the script named, as returned by :func:`locate`.
        tag: tag of the save.
        step: global step of the engine.
        latest: ``latest`` must name it.
        node, nodes: number of the node, and of all nodes.
        places: destinations.
        folder: folder of tags in memory; not in the record.
        by_itself: it is a snapshot, which no script asked for.
    """

    job: str
    number: int
    save_dir: str
    tag: str
    step: int
    latest: bool
    node: int
    nodes: int
    places: tuple[Destination, ...]
    folder: str = ""
    by_itself: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the save, the same on every node."""
        return self.job, self.number

    def list_files(self) -> list[str]:
        """Return the save's files, as paths relative to :attr:`folder`: its tag's, and scripts next to the tag."""
        found = []
        for above, _, names in os.walk(self.folder):
            found += [os.path.relpath(os.path.join(above, name), self.folder) for name in names]
        return sorted(filter(self.owns, found))

    def owns(self, path: str) -> bool:
        """Return True if a path below :attr:`folder` is one of the save's files, not a record."""
        others = (_RECORD, _DONE, _COPIED, _REFUSED, _FAILED, "latest", ".")
        return path.startswith(f"{self.tag}{os.sep}") or not (os.sep in path or path.startswith(others))

    def list_pending(self) -> list[Destination]:
        """Return the destinations that lack it."""
        done = self.read_done()
        return [place for place in self.places if place.folder not in done]

    def is_written(self) -> bool:
        """Return True if it has destinations and all of them have it."""
        done = self.read_done()
        return bool(self.places) and all(done.get(place.folder) for place in self.places)

    def supersedes(self, older: Snapshot) -> bool:
        """Return True if a load of the older save's folder would take this one of the same job instead."""
        is_later = self.number > older.number and self.save_dir == older.save_dir
        return is_later and (self.latest or not older.latest)

    def read_done(self) -> dict[str, str]:
        """Return its mark by destination that has it; an empty mark means that it must not be written there."""
        return self._read(_DONE)

    def note_done(self, place: Destination, mark: str) -> None:
        """Record that a destination has it with this mark; an empty mark records that it must not be written there."""
        self._note(_DONE, {place.folder: mark})

    def replace_done(self, done: Mapping[str, str]) -> None:
        """Record marks by destination, as :meth:`read_done` returns them."""
        self._note(_DONE, done)

    def overtake(self) -> None:
        """Record that a later save was written without memory: ``latest`` must not name this one."""
        Path(self.folder, _OVERTAKEN).touch()

    def is_overtaken(self) -> bool:
        """Return True after :meth:`overtake`."""
        return os.path.exists(os.path.join(self.folder, _OVERTAKEN))

    def list_refused(self) -> dict[str, str]:
        """Return the reason by destination that its writer has given up."""
        record = self._read(_REFUSED)
        return {place.folder: record[place.folder] for place in self.list_pending() if place.folder in record}

    def note_refused(self, place: Destination, why: str) -> None:
        """Record that writing to a destination fails in a way that no retry can mend."""
        self._note(_REFUSED, {place.folder: why})

    def read_failed(self) -> dict[str, str]:
        """Return by destination why the last attempt to write there failed."""
        return self._read(_FAILED)

    def note_failed(self, place: Destination, why: str) -> None:
        """Record why an attempt to write to a destination failed."""
        self._note(_FAILED, {**self.read_failed(), place.folder: why}, anew=True)

    def read_copied(self) -> dict[str, str]:
        """Return the host name by node that was sent a copy; an empty name if the copy failed."""
        return self._read(_COPIED)

    def note_copied(self, node: int, host: str) -> None:
        """Record the host name of a node with a copy; an empty name if the copy failed."""
        self._note(_COPIED, {str(node): host})

    def list_hosts(self) -> list[str]:
        """Return the hosts with this part in memory, this one first; an empty list if no other host has it."""
        others = [host for host in self.read_copied().values() if host]
        return [socket.gethostname(), *others] if others else []

    def _name(self, kind: str) -> str:
        return f"{kind}{self.node}.json"

    def _read(self, kind: str) -> dict[str, str]:
        """Merge the lines of a record; a line that was cut off by a crash is not valid JSON and does not count."""
        record, path = dict[str, str](), os.path.join(self.folder, self._name(kind))
        with suppress(FileNotFoundError):
            for line in filter(None, read_bounded(path, MOST_BYTES).strip(b"\n").split(b"\n")):
                with suppress(CheckpointError):
                    record.update(parse_json(line, path))
        return record

    def _note(self, kind: str, record: Mapping[str, str], *, anew: bool = False) -> None:
        """Append a line to a record, in place of the newlines of :meth:`reserve`.

        Args:
            anew: write over the lines before it instead.

        Raises:
            DiskFullError: it needs more room than was reserved and is available.
        """
        path = os.path.join(self.folder, self._name(kind))
        with explain_full(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                used = len(os.pread(fd, os.fstat(fd).st_size, 0).rstrip(b"\n"))
                line = b"\n" + json.dumps(dict(record)).encode() + b"\n"
                write_at(fd, line.ljust(used, b"\n") if anew else line, 0 if anew else used)
                os.fsync(fd)
            finally:
                os.close(fd)

    def is_copy(self) -> bool:
        """Return True if it is a copy of another node's part, which that node writes to the destinations."""
        return _COPY.fullmatch(os.path.basename(self.folder)) is not None

    def is_recorded(self) -> bool:
        """Return True if it is complete on this node."""
        return os.path.exists(os.path.join(self.folder, self._name(_RECORD)))

    def write_record(self) -> None:
        """Sync its files and record that it is complete on this node: a folder on a disk outlives a reboot.

        Raises:
            OSError: it cannot be written.
        """
        for above, _, names in os.walk(self.folder):
            for name in names:
                sync_file(os.path.join(above, name))
            sync_folder(above)
        record, reserved = asdict(replace(self, folder="")), os.path.join(self.folder, self._name(_NEW))
        write_atomically(
            os.path.join(self.folder, self._name(_RECORD)), json.dumps(record).encode(), temporary=reserved
        )

    def remove(self) -> None:
        """Delete it, its record first."""
        self._forget()
        delete_own(self.folder)

    def spare(self) -> None:
        """Delete it, but keep its files for the next save to overwrite, unless there are such files already.

        Overwriting is faster than allocating new pages.
        """
        self._forget()
        try:
            self.move(os.path.join(os.path.dirname(self.folder), _SPARE))
        except OSError:
            self.remove()

    def move(self, folder: str) -> None:
        """Rename its folder, for its files to be overwritten.

        Raises:
            OSError: the new name exists.
        """
        self._forget()
        os.rename(self.folder, folder)

    def _forget(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, self._name(_RECORD)))
            sync_folder(self.folder)  # before a file is overwritten


_own = set[str]()
"""Folders of the jobs of this process."""


class Job:
    """The folder of a job's saves in a node's memory."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.name = os.path.basename(folder)
        self.spare = os.path.join(folder, _SPARE)
        self._lock_fd: int | None = None

    def own(self) -> None:
        """Create the folder and lock it until this process ends.

        It gets its name after it is locked: a job that starts meanwhile would take it for a dead job's.
        """
        made = self.folder if os.path.isdir(self.folder) else f"{self.folder}.new"
        os.makedirs(made, mode=0o700, exist_ok=True)
        self._lock_fd = os.open(os.path.join(made, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        os.rename(made, self.folder)
        os.register_at_fork(after_in_child=self._close)  # a child does not hold the lock
        _own.add(self.folder)

    def disown(self) -> None:
        """Unlock the folder."""
        if self._lock_fd is not None:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            self._close()
            _own.discard(self.folder)

    def _close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def is_there(self) -> bool:
        """Return True if the folder exists."""
        return os.path.exists(os.path.join(self.folder, _OWNER))

    def is_own(self) -> bool:
        """Return True if it is a job of this process."""
        return self.folder in _own

    def is_owned(self) -> bool:
        """Return True if the job's process is running, also in another container that shares the memory."""
        return is_held(os.path.join(self.folder, _OWNER))

    def read_written(self) -> dict[str, dict[str, str]]:
        """Return the tags and marks of this job by destination, in the order of writing."""
        try:
            record: dict[str, dict[str, str]] = read_json(os.path.join(self.folder, _WRITTEN))
        except FileNotFoundError:
            return {}
        return record

    def note_written(self, written: Mapping[str, Mapping[str, str]]) -> None:
        """Record the result of :meth:`read_written`."""
        write_atomically(os.path.join(self.folder, _WRITTEN), json.dumps(written).encode())

    def find_folder(self, number: int) -> str:
        """Return the path of a save's folder."""
        return os.path.join(self.folder, f"{number:08d}")

    def reserve(self, number: int, node: int) -> None:
        """Make the folder of a save, with room for its records.

        Raises:
            OSError: the folder exists, or there is no room.
        """
        os.makedirs(folder := self.find_folder(number), mode=0o700)
        for kind in (_DONE, _COPIED, _REFUSED, _FAILED, _NEW):
            Path(folder, f"{kind}{node}.json").write_bytes(b"\n" * _RESERVED)

    def list_numbers(self) -> list[int]:
        """Return the numbers of all saves, incomplete ones included, in order."""
        return sorted(int(name) for name in _list(self.folder) if name.isdecimal())

    def list_saves(self) -> list[Snapshot]:
        """Return the saves that are complete on this node, in order."""
        return [save for number in self.list_numbers() for save in _read_records(self.find_folder(number))]

    def find_copy(self, node: int, number: int) -> str:
        """Return the path of the folder for a copy of another node's part of a save."""
        return os.path.join(self.folder, f"copy-{node}-{number:08d}")

    def list_copies(self) -> list[Snapshot]:
        """Return the complete copies of other nodes' parts, by node and number."""
        names = sorted(name for name in _list(self.folder) if _COPY.fullmatch(name))
        return [copy for name in names for copy in _read_records(os.path.join(self.folder, name))]

    def read_copying(self) -> tuple[int, int]:
        """Return the numbers of the last save whose copies are complete and of the save that is copied now, or 0.

        If a node is lost before its part of a later save is copied, the first of the two can still be loaded.
        """
        path = os.path.join(self.folder, _COPYING)
        try:
            numbers = read_json(path, list)
        except FileNotFoundError:
            return 0, 0
        if len(numbers) != 2 or not all(type(each) is int for each in numbers):
            raise CheckpointError("does not hold the numbers of two saves; the file is damaged. Remove it.", path=path)
        return numbers[0], numbers[1]

    def note_copying(self, safe: int, current: int) -> None:
        """Record the result of :meth:`read_copying`."""
        write_atomically(os.path.join(self.folder, _COPYING), json.dumps([safe, current]).encode())

    def reuse(self, path: str) -> None:
        """Rename the spare save's file of the same name to ``path``, to be overwritten.

        Args:
            path: path in a tag's folder that does not exist yet.
        """
        for tag in _list(self.spare):
            with suppress(OSError):
                os.rename(os.path.join(self.spare, tag, os.path.basename(path)), path)

    def drop_spare(self) -> None:
        """Delete the files that are kept for the next save to overwrite."""
        delete_own(self.spare)

    def holds_none(self) -> bool:
        """Return True if it has no complete save and no copy; a save with an unreadable record counts as complete."""
        return all(map(self.is_unfinished, self.list_numbers())) and not any(map(_COPY.fullmatch, _list(self.folder)))

    def is_unfinished(self, number: int) -> bool:
        """Return True if a save's folder has no record of a complete part."""
        return not any(name.startswith(_RECORD) for name in _list(self.find_folder(number)))

    def count_bytes(self) -> int:
        """Return the bytes of memory that its files take up."""
        return count_allocated(self.folder)

    def remove(self) -> None:
        """Delete everything, the record of each save first: a kill leaves no damaged save."""
        for save in [*self.list_saves(), *self.list_copies()]:
            save.remove()
        delete_own(self.folder)


def find_root(memory: str) -> str:
    """Return this user's folder in a folder of memory, which may name environment variables; create it if needed.

    Saves in it are loaded and removed, so no other user may write there.

    Raises:
        ConfigError: a variable is not set.
        StorageError: it is not a folder, belongs to another user, or has a mode other than 0700.
    """
    named = os.path.expanduser(os.path.expandvars(memory))
    if "$" in named:
        raise ConfigError(f'"save": {{"memory": "{memory}"}} names a variable that is not set.')
    root = os.path.join(os.path.abspath(named), f"deepspeed_ucp-{os.getuid()}")
    os.makedirs(os.path.dirname(root), exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(root, mode=0o700)
    found, advice = os.lstat(root), 'Remove it, or name another folder in "save": {"memory": …}.'
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"is a link or a file, not a folder; any user can create it there. {advice}", path=root)
    if found.st_uid != os.getuid():
        raise StorageError(f"belongs to user {found.st_uid}. {advice}", path=root)
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise StorageError(
            f"has mode {mode:04o}, so that other users could have put saves there, which a resume loads. {advice} If "
            f"all in it is yours: chmod 700 {root}",
            path=root,
        )
    return root


def name_job() -> str:
    """Return a new job's name, which no other folder has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"


_JOB = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_COPY = re.compile(r"copy-\d+-\d{8}")


def list_jobs(root: str) -> list[Job]:
    """Return the jobs with saves in this node's memory: folders of this user, no links."""
    folders = [os.path.join(root, name) for name in sorted(_list(root)) if _JOB.fullmatch(name)]
    return [Job(folder) for folder in folders if _is_private(folder)]


def _is_private(folder: str) -> bool:
    with suppress(FileNotFoundError):
        found = os.lstat(folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return False


def list_later(save: Snapshot) -> list[Snapshot]:
    """Return complete saves for the same folder by running jobs if the save's job is dead: they are later."""
    job = Job(os.path.dirname(save.folder))
    if job.is_owned():
        return []
    living = (other for other in list_jobs(os.path.dirname(job.folder)) if other.is_owned())
    return [each for other in living for each in other.list_saves() if each.save_dir == save.save_dir]


def locate(place: str) -> str:
    """Return a folder's real path, or a URL without a trailing slash."""
    return normalize(place) if is_url(place) else os.path.realpath(normalize(place))


def drop_unwanted(job: Job, keep: int) -> Iterator[Snapshot]:
    """Yield the job's saves that memory no longer needs, the oldest first.

    These are not pending and not among the ``keep`` newest. A snapshot that is in memory alone is not dropped for a
    save of another folder.
    """
    copying, saves = job.read_copying(), job.list_saves()
    for save in saves[: -keep or None]:
        if save.number not in copying and is_spare(save, saves):
            yield save


def is_spare(save: Snapshot, saves: Iterable[Snapshot]) -> bool:
    """Return True if a save is not pending, nor a snapshot in memory alone that no other of its job supersedes."""
    is_needed = save.by_itself and not save.is_written() and not any(other.supersedes(save) for other in saves)
    return not (is_needed or save.list_pending())


def count_free(root: str) -> int:
    """Return the bytes that can be written to a folder; for one in memory the container's limit counts too."""
    free = shutil.disk_usage(root).free
    return min(free, measure_available()) if find_kind(root) == MEMORY else free


def measure(folder: str) -> int:
    """Return the bytes of the files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _read_records(folder: str) -> Iterator[Snapshot]:
    for name in sorted(_list(folder)):
        if name.startswith(_RECORD) and name.endswith(".json"):
            with suppress(OSError, CheckpointError, TypeError, KeyError):
                record = read_json(os.path.join(folder, name))
                places = tuple(Destination(**place) for place in record.pop("places"))
                yield Snapshot(**{**record, "places": places, "folder": folder})


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_held(path: str) -> bool:
    """Return True if a process holds the ``flock`` of a file."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file as well
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
