"""The saves in a node's memory, which outlive every process.

``<memory>/deepspeed_ucp-<user>/<job>/`` holds ``owner`` (locked by the process that saves), ``log`` (locked by the
writer) and a folder for each save. A save's folder has the form of any checkpoint folder with one tag. Its state file
``save-<node>.json`` has a JSON object of such objects on each line; later lines add to earlier ones:

* ``save``: all ranks of the node have written their files; the fields of :class:`SavePart`.
* ``done``: by destination that has the save its mark; an empty mark means that it must not be written there.
* ``copied``: by node to which a copy was sent ``yes``, or an empty text if the copy failed.
* ``refused``: by destination that no retry can write to the reason.
* ``failed``: by destination why the last attempt to write there failed.

A copy of another node's part is in a separate folder of the same form. The numbers of a job's saves increase, even if
the clock is set back.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..comm import Comm
from ..errors import CheckpointError, ConfigError, StorageError
from ..io.deletion import try_delete_tree
from ..io.disk import explain_full, sync_folder, sync_tree, write_at, write_atomically
from ..io.jsonfile import parse_json, read_json
from ..io.memory import identify_host
from ..io.paths import is_url, normalize

_OWNER, _SPARE, _STATE = "owner", "spare", "save-"
LOG = "log"

FINISHED = b"finished\n"
"""Last line on standard input of the writer of a job that ended normally."""

_RESERVED = 1 << 15
"""Bytes reserved for the state of a save, because a full memory must not keep a written save pending."""


@dataclass(frozen=True, slots=True)
class SavePart:
    """One node's part of a save in memory.

    Attributes:
        job: name of the job, the same on all nodes.
        save_dir: folder that the script named, as returned by :func:`locate`.
        latest: ``latest`` must name it.
        node, nodes: number of the node, and of all nodes.
        destinations: by folder of tags or its URL the number of this job's saves to keep there; None keeps all. A
            snapshot has none.
        folder: folder of tags in memory; not in the record.
    """

    job: str
    number: int
    save_dir: str
    tag: str
    step: int
    latest: bool
    node: int
    nodes: int
    destinations: Mapping[str, int | None]
    folder: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the save, the same on every node."""
        return self.job, self.number

    def list_files(self) -> list[str]:
        """Return the files of the tag and the scripts next to it, relative to ``folder``."""
        paths = []
        for above, _, names in os.walk(self.folder):
            paths += [os.path.relpath(os.path.join(above, name), self.folder) for name in names]
        return sorted(filter(self.owns, paths))

    def owns(self, path: str) -> bool:
        """Return True if a path below ``folder`` is a file of the save, not a record."""
        others = os.sep in path or path.startswith((_STATE, "latest", "."))
        return path.startswith(f"{self.tag}{os.sep}") or not others

    def list_lacking(self) -> list[str]:
        """Return the destinations that lack it."""
        done = self.read("done")
        return [destination for destination in self.destinations if destination not in done]

    def list_pending(self) -> list[str]:
        """Return the destinations that lack it and have not been given up."""
        refused = self.read("refused")
        return [destination for destination in self.list_lacking() if destination not in refused]

    def find_failure(self, destination: str) -> str:
        """Return the last error of writing it to a destination, or an empty string."""
        return self.read("refused").get(destination) or self.read("failed").get(destination, "")

    def is_written(self) -> bool:
        """Return True if it has destinations and all of them have it."""
        done = self.read("done")
        return bool(self.destinations) and all(map(done.get, self.destinations))

    def supersedes(self, older: SavePart) -> bool:
        """Return True if loads of an older save of the same job take this save instead."""
        is_later = self.number > older.number and self.save_dir == older.save_dir
        return is_later and (self.latest or not older.latest)

    @property
    def _state(self) -> str:
        return os.path.join(self.folder, f"{_STATE}{self.node}.json")

    def read(self, kind: str) -> dict[str, str]:
        return self.read_state()[kind]

    def read_state(self) -> dict[str, dict[str, Any]]:
        """Return all objects of the state by name, read at once; missing ones are empty."""
        return _read_state(self._state)

    def note(self, kind: str, record: Mapping[str, Any]) -> None:
        """Add to an object of the state, in place of the newlines of :meth:`Job.reserve`.

        Raises:
            DiskFullError: it needs more room than was reserved and is available.
            FileNotFoundError: the save has been removed.
        """
        with explain_full(self._state), open(self._state, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = file.read().rstrip(b"\n")
            line, at = b"\n" + json.dumps({kind: dict(record)}).encode() + b"\n", len(before)
            if at + len(line) > _RESERVED:
                line, at = json.dumps(_merge(before + line, self._state)).encode().ljust(at, b"\n"), 0
            write_at(file.fileno(), line, at)
            fcntl.flock(file, fcntl.LOCK_UN)  # a slow disk must not delay readers
            os.fsync(file)

    def is_copy(self) -> bool:
        return _COPY.fullmatch(os.path.basename(self.folder)) is not None

    def is_recorded(self) -> bool:
        """Return True if it is complete on this node."""
        return bool(self.read("save"))

    def write_record(self) -> None:
        """Sync its files and record that it is complete on this node."""
        sync_tree(self.folder)  # a folder on a disk outlives a reboot
        Path(self._state).touch(0o600)
        self.note("save", asdict(replace(self, folder="")))

    def remove(self) -> None:
        """Delete it, its record first."""
        self._delete_record()
        try_delete_tree(self.folder)

    def recycle(self) -> None:
        """Delete it, but keep its files for the next save to overwrite.

        Overwriting is faster than allocating new pages. If there are such files already, it is deleted with its files.
        """
        self._delete_record()
        try:
            os.rename(self.folder, os.path.join(os.path.dirname(self.folder), _SPARE))
        except OSError:
            try_delete_tree(self.folder)

    def _delete_record(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._state)
            sync_folder(self.folder)  # before a file is overwritten


_owned_folders = set[str]()
"""Folders of the jobs of this process."""


class Job:
    """The folder of a job's saves in a node's memory."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.name = os.path.basename(folder)
        self.spare = os.path.join(folder, _SPARE)
        self._lock_fd: int | None = None

    def create(self) -> None:
        """Create the job's folder and lock it until this process ends.

        It gets its name after it is locked: a job that starts meanwhile would take it for a dead job's.
        """
        made = self.folder if os.path.isdir(self.folder) else f"{self.folder}.new"
        os.makedirs(made, mode=0o700, exist_ok=True)
        self._lock_fd = os.open(os.path.join(made, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        os.rename(made, self.folder)
        os.register_at_fork(after_in_child=self._close)  # a child does not hold the lock
        _owned_folders.add(self.folder)

    def unlock(self) -> None:
        if self._lock_fd is not None:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            self._close()
            _owned_folders.discard(self.folder)

    def _close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def exists(self) -> bool:
        return os.path.exists(os.path.join(self.folder, _OWNER))

    def is_of_this_process(self) -> bool:
        return self.folder in _owned_folders

    def is_running(self) -> bool:
        """Return True if the job's process is running, also in another container."""
        return _is_locked_file(os.path.join(self.folder, _OWNER))

    def read(self, name: str) -> dict[str, Any]:
        """Return a record of the job, or an empty one.

        ``written``: by destination this job's tags in the order of writing (:class:`~.destinations.WrittenTag`).
        ``copying``: the numbers of the last save whose copies are complete (``safe``) and of the save that is copied
        now (``current``). If a node is lost before its part of that is copied, ``safe`` can still be loaded.
        """
        with suppress(FileNotFoundError):
            return dict(read_json(os.path.join(self.folder, name)))
        return {}

    def note(self, name: str, record: Mapping[str, Any]) -> None:
        """Replace a record of the job."""
        write_atomically(os.path.join(self.folder, name), json.dumps(record).encode())

    def find_folder(self, number: int) -> str:
        return os.path.join(self.folder, f"{number:08d}")

    def reserve(self, number: int, node: int) -> None:
        """Make the new folder of a save, with room for its state."""
        os.makedirs(folder := self.find_folder(number), mode=0o700)
        Path(folder, f"{_STATE}{node}.json").write_bytes(b"\n" * _RESERVED)

    def list_numbers(self) -> list[int]:
        """Return the numbers of all saves, incomplete ones included, in order."""
        return sorted(int(name) for name in _list(self.folder) if name.isdecimal())

    def list_saves(self) -> list[SavePart]:
        """Return the saves that are complete on this node, in order."""
        return [save for number in self.list_numbers() for save in _read_records(self.find_folder(number))]

    def find_copy(self, node: int, number: int) -> str:
        return os.path.join(self.folder, f"copy-{node}-{number:08d}")

    def list_copies(self) -> list[SavePart]:
        """Return the complete copies of other nodes' parts, by node and number."""
        names = sorted(name for name in _list(self.folder) if _COPY.fullmatch(name))
        return [copy for name in names for copy in _read_records(os.path.join(self.folder, name))]

    def reuse(self, path: str) -> None:
        """Rename the spare save's file of the same name to ``path``, to be overwritten."""
        for tag in _list(self.spare):
            with suppress(OSError):
                os.rename(os.path.join(self.spare, tag, os.path.basename(path)), path)

    def drop_spare(self) -> None:
        """Delete the files that are kept for the next save to overwrite."""
        try_delete_tree(self.spare)

    def is_empty(self) -> bool:
        """Return True if it has neither copies nor saves that may be complete."""
        return all(map(self.is_unfinished, self.list_numbers())) and not any(map(_COPY.fullmatch, _list(self.folder)))

    def is_unfinished(self, number: int) -> bool:
        """Return True if a save's folder has no complete part and is not being deleted."""
        try:
            return not any(path.read_bytes().strip() for path in Path(self.find_folder(number)).glob(f"{_STATE}*"))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Delete everything, the record of each save first: a kill leaves no damaged save."""
        for save in [*self.list_saves(), *self.list_copies()]:
            save.remove()
        try_delete_tree(self.folder)


def find_root(memory: str) -> str:
    """Return this user's folder in a folder of memory; create it if needed.

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
    status, advice = os.lstat(root), 'Remove it, or name another folder in "save": {"memory": …}.'
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"is a link or a file, not a folder; any user can create it there. {advice}", path=root)
    if status.st_uid != os.getuid():
        raise StorageError(f"belongs to user {status.st_uid}. {advice}", path=root)
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise StorageError(
            f"has mode {mode:04o}, so that other users could have put saves there, which a resume loads. {advice} If "
            f"all in it is yours: chmod 700 {root}",
            path=root,
        )
    return root


def list_owners(memory: str, comm: Comm) -> list[int]:
    """Return by rank the first rank that shares its folder in memory (collective).

    Local ranks may differ: they depend on the launcher.
    """

    def look() -> tuple[str, int, int]:
        status = os.stat(find_root(memory))
        return identify_host(), status.st_dev, status.st_ino

    ranks = dict[tuple[str, int, int], int]()
    return [ranks.setdefault(memory, rank) for rank, memory in enumerate(comm.gather_results(look))]


def owns_memory(memory: str, comm: Comm) -> bool:
    """Return True if this rank owns its node's folder in memory (collective)."""
    return list_owners(memory, comm)[comm.rank] == comm.rank


def name_job() -> str:
    """Return a new job's name, which no other folder has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"


_JOB = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_COPY = re.compile(r"copy-\d+-\d{8}")


def list_jobs(root: str) -> list[Job]:
    """Return the jobs in this node's memory: folders of this user, no links."""
    folders = [os.path.join(root, name) for name in sorted(_list(root)) if _JOB.fullmatch(name)]
    return [Job(folder) for folder in folders if _is_private(folder)]


def list_dead(root: str) -> list[Job]:
    """Return the jobs whose process has ended."""
    return [job for job in list_jobs(root) if not job.is_running()]


def _is_private(folder: str) -> bool:
    with suppress(FileNotFoundError):
        status = os.lstat(folder)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return False


def list_later(save: SavePart) -> list[SavePart]:
    """Return running jobs' saves for a dead job's folder; [] if the job is running."""
    job = Job(os.path.dirname(save.folder))
    if job.is_running():
        return []
    living = (other for other in list_jobs(os.path.dirname(job.folder)) if other.is_running())
    return [candidate for other in living for candidate in other.list_saves() if candidate.save_dir == save.save_dir]


def locate(path: str) -> str:
    """Return a folder's real path, or a URL without a trailing slash."""
    return normalize(path) if is_url(path) else os.path.realpath(normalize(path))


def list_pending_tags(saves: Iterable[SavePart]) -> dict[str, list[str]]:
    """Return by destination the tags of a job's pending saves, the oldest first."""
    tags: dict[str, list[str]] = defaultdict(list)
    for save in saves:
        for destination in save.list_pending():
            tags[destination].append(save.tag)
    return dict(tags)


def describe_pending(saves: Iterable[SavePart], is_wanted: Callable[[str], bool] = lambda _: True) -> str:
    """Format pending saves of wanted destinations: ``best, last to /checkpoints``."""
    late = sorted(list_pending_tags(saves).items())
    return "; ".join(f"{', '.join(tags)} to {destination}" for destination, tags in late if is_wanted(destination))


def _read_records(folder: str) -> Iterator[SavePart]:
    for name in sorted(name for name in _list(folder) if name.startswith(_STATE)):
        with suppress(OSError, CheckpointError, TypeError, KeyError):
            yield SavePart(**{**_read_state(os.path.join(folder, name))["save"], "folder": folder})


def _read_state(path: str) -> dict[str, dict[str, Any]]:
    with suppress(FileNotFoundError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return _merge(file.read(), path)
    return defaultdict(dict)


def _merge(data: bytes, path: str) -> dict[str, dict[str, Any]]:
    """Merge the lines of a state, without a line that was cut off by a crash."""
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    for line in filter(None, data.strip(b"\n").split(b"\n")):
        with suppress(CheckpointError):
            for kind, record in parse_json(line, path).items():
                state[kind] |= record
    return state


def _list(folder: str) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def has_writer(job: Job) -> bool:
    """Return True if a job's writer is running or has been started."""
    return _is_locked_file(os.path.join(job.folder, LOG))


def _is_locked_file(path: str) -> bool:
    """Return True if another process holds the ``flock`` of a file."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file as well
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
