"""Jobs that save into memory without DeepSpeed: synthesised files, a record, and writers in this process."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import obstore
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import UcpError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import PUBLISHED, SEAL, resolve_published
from deepspeed_ucp.formats.latest import is_sealed
from deepspeed_ucp.io.store import list_folder, read_small
from deepspeed_ucp.io.threads import map_threads
from deepspeed_ucp.saves import destinations, publishing
from deepspeed_ucp.saves import writer as writing
from deepspeed_ucp.saves.copies import Peer, Replicator
from deepspeed_ucp.saves.memory import LOG, Job, SavePart, find_root, name_job
from deepspeed_ucp.saves.saver import Saver, save_into_memory
from deepspeed_ucp.saves.writer import DestinationWriter, SaveWriter
from tests.convert.conversions import write_source
from tests.support.crash import intercept
from tests.support.memory import read_tree
from tests.support.until import wait_until

TAG = "global_step3"

SCRIPT = "zero_to_fp32.py"
"""Name of a file that a save writes next to its tag."""

PATIENCE = 120.0
"""Seconds to wait for other processes and threads: longer than a busy machine takes."""

MODULES = (destinations, publishing)
"""Modules that write a save to a destination."""

PLACE = "memory://bucket/run"
"""Destination in a store of this process (tests/support/memory.py)."""

REQUESTS = [(obstore, name) for name in ("list_with_delimiter", "list", "head", "get", "put", "delete")]

CONFIG = UniversalConfig(save=SaveOptions(wait_s=PATIENCE))
"""Configuration of a job that saves into memory."""


class KilledError(BaseException):
    """Ends a writer before a request is executed."""


def make_save(job: Job, *folders: str, tag: str = TAG, keep: int | None = None, **changes: Any) -> SavePart:
    """Make the next save of a job: complete, with other weights than the last one."""
    number = max(job.list_numbers(), default=0) + 1
    folder = Path(job.find_folder(number))
    source = write_source(folder, number)
    if tag != TAG:
        (folder / tag).parent.mkdir(exist_ok=True)
        source.rename(folder / tag)
    (folder / SCRIPT).write_text("# a script")
    keeping = dict.fromkeys(folders, keep)
    save = SavePart(job.name, number, folders[0], tag, number, True, 0, 1, keeping, str(folder))
    save = replace(save, **changes)
    save.write_record()
    return save


class Run:
    """A job of this process that saves into memory, and the folder or URL of its saves."""

    def __init__(self, folder: Path, destination: str = "", *, memory: str = "memory", name: str = "") -> None:
        self.folder, self.destination = folder, destination or str(folder / "destination")
        self.job = Job(os.path.join(find_root(str(folder / memory)), name or name_job()))
        self.job.create()

    def save(self, *folders: str, **changes: Any) -> SavePart:
        """Make the next save, to folders below the test's folder or to the destination."""
        return make_save(self.job, *([str(self.folder / each) for each in folders] or [self.destination]), **changes)

    def write(self, *, wait: float = PATIENCE) -> bool:
        """Write the pending saves by a new writer; return True if none failed."""
        return write_pending(SaveWriter(self.job, wait))

    def write_save(self, *folders: str, **changes: Any) -> SavePart:
        made = self.save(*folders, **changes)
        assert self.write()
        return made

    def list_names(self) -> set[str]:
        return set(list_folder(self.destination))

    @property
    def latest(self) -> str:
        return read_small(f"{self.destination}/latest").decode()

    def is_whole(self, *tags: str) -> bool:
        """Return True if the destination has complete saves with these tags."""
        return all(is_whole(f"{self.destination}/{tag}") for tag in tags or (TAG,))

    def holds(self, save: SavePart) -> bool:
        """Return True if the destination has a complete tag with exactly the files of a save."""
        published = resolve_published(f"{self.destination}/{save.tag}")
        return self.is_whole(save.tag) and strip(read_tree(published)) == read_tree(f"{save.folder}/{save.tag}")

    def list_pending_tags(self) -> list[str]:
        """Return the tags that a destination lacks."""
        return [save.tag for save in self.job.list_saves() if save.list_pending()]


def make_parts(folder: Path) -> list[Run]:
    """Make the memory of two nodes, each with its part of one save; ``whole`` has all files."""
    nodes = [Run(folder, memory=f"node{node}", name="job") for node in range(2)]
    whole = sorted(write_source(folder / "whole").iterdir())
    for node, run in enumerate(nodes):
        part = Path(run.job.find_folder(1), TAG)
        part.mkdir(parents=True)
        for path in whole[node::2]:
            shutil.copy(path, part)
        destination = run.destination
        SavePart("job", 1, destination, TAG, 3, True, node, 2, {destination: None}, str(part.parent)).write_record()
    return nodes


def begin(save: SavePart) -> None:
    """Record that the first node has begun to write a save; other nodes wait for this record."""
    publishing.begin_writing(publishing.make_tag(replace(save, node=0), next(iter(save.destinations))))


def write_both(nodes: Sequence[Run]) -> None:
    """Write the parts of two nodes at the same time."""
    first = threading.Thread(target=nodes[0].write)
    first.start()
    assert nodes[1].write()
    first.join()


def find_calls(*names: str) -> list[tuple[object, str]]:
    """Return functions that a writer calls, by their names in all modules that write a save."""
    return [(module, name) for module in MODULES for name in names if hasattr(module, name)]


@contextmanager
def call_before(name: str, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` once, before a writer calls a function for the first time."""
    acts = [act]
    with intercept(lambda *_: acts and acts.pop()(), find_calls(name)):
        yield


def fail_save(tag: str, error: Exception) -> mock._patch[Any]:
    """Let writers of this process fail to write saves under a tag."""

    def write_or_fail(save: SavePart, *args: Any) -> str:
        if save.tag == tag:
            raise error
        return destinations.write_save(save, *args)

    return mock.patch.object(writing, "write_save", write_or_fail)


def set_counter(folder: Path, key: str, value: object) -> None:
    """Change a value in all model states of a tag."""
    for path in folder.glob("*model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), key: value}, path)


def write_pending(writer: SaveWriter) -> bool:
    """Write the pending saves to all destinations once; return True if none failed."""
    writers = writer.list_writers()
    return all(map_threads(DestinationWriter.write_all, writers, len(writers)))


@contextmanager
def run_writer(writer: SaveWriter) -> Iterator[Callable[[], object]]:
    """Run a writer in a thread, as its process does, to its end; yield a function that announces a save."""
    read, write = os.pipe()
    with open(read) as lines, open(write, "wb", buffering=0) as pipe, mock.patch.object(sys, "stdin", lines):
        thread = threading.Thread(target=writer.run)
        thread.start()
        try:
            yield lambda: pipe.write(b"\n")
        finally:
            pipe.close()
            thread.join()


def is_whole(folder: str) -> bool:
    try:
        open_checkpoint(folder, Comm())
    except UcpError:
        return False
    return is_sealed([os.path.dirname(folder)], os.path.basename(folder))


def strip(content: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of a tag without its seal."""
    return {name: data for name, data in content.items() if name not in (SEAL, PUBLISHED)}


def find_writer(job: Job) -> int:
    """Return the process that writes a job's saves: the process that has the log open, except its parent."""
    log = os.path.join(job.folder, LOG)
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = job.folder.encode() in (path / "cmdline").read_bytes()
            if is_ours and any(os.readlink(each) == log for each in (path / "fd").iterdir()):
                return int(path.name)
    raise AssertionError("there is no writer")


class Engine(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(
            local_rank=0, global_steps=3, optimizer=None, module=SimpleNamespace(parameters=list),
            save_non_zero_checkpoint=False, checkpoint_engine=None,
        )  # fmt: skip

    def use_node_local_storage(self) -> bool:
        return False


def write_tag(folder: str, tag: str) -> None:
    """Write a checkpoint as DeepSpeed does."""
    write_source(Path(folder)).rename(Path(folder) / tag)


class Training(Run):
    """An engine that saves to ``destination`` through ``memory``, below a folder.

    Attributes:
        given: the folders passed to DeepSpeed's save.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.destination, self.memory = folder, str(folder / "destination"), folder / "memory"
        self.engine, self.given = Engine(), list[str]()
        self.config = UniversalConfig(save=SaveOptions(memory=str(self.memory), **{"wait_s": PATIENCE, **options}))

    def save(
        self,
        tag: str = TAG,
        destination: str = "destination",
        write: Callable[[str, str], object] = write_tag,
        *,
        is_snapshot: bool = False,
    ) -> bool:
        """Save; return True if the save is in memory."""

        def note(folder: str) -> None:
            self.given.append(folder)
            write(folder, tag)

        to = destination if "://" in destination else str(self.folder / destination)
        return save_into_memory(self.engine, self.config, to, tag, note, latest=True, is_snapshot=is_snapshot)[1]

    @property
    def saver(self) -> Saver:
        found = find_state(self.engine).saver
        assert isinstance(found, Saver)
        return found

    @property
    def job(self) -> Job:
        return self.saver.job

    @property
    def log(self) -> str:
        return Path(self.job.folder, "log").read_text()

    def make_dead(self) -> Run:
        """Return a job whose process seems to have ended."""
        dead = Run(self.folder)
        dead.job.unlock()
        return dead


SECRET = "ab" * 32


class Nodes:
    """Two nodes of a job, each with memory and a writer that copies to the other node."""

    def __init__(self, folder: Path) -> None:
        self.folder, name = folder, name_job()
        self.memories = [str(folder / f"memory{node}") for node in range(2)]
        self.jobs = [Job(os.path.join(find_root(memory), name)) for memory in self.memories]
        self.writers = list[Replicator]()
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in self.jobs]
        for job in self.jobs:
            job.create()

    def describe(self, node: int) -> dict[str, Any]:
        address = list(self.listeners[1 - node].getsockname())
        return {
            "secret": SECRET, "name": f"host{node}", "nodes": 2, "to": 1 - node, "from": 1 - node, "address": address
        }  # fmt: skip

    def make(self, node: int, wait: float = PATIENCE, **settings: Any) -> Replicator:
        return Replicator(self.jobs[node], {**self.describe(node), **settings}, self.listeners[node], wait)

    def start(self, *numbers: int, wait: float = PATIENCE, **settings: Any) -> Replicator:
        """Start the writers of nodes; return the last one."""
        for node in numbers:
            self.writers.append(self.make(node, wait, **settings))
            self.writers[-1].start()
        return self.writers[-1]

    def copy(self, save: SavePart) -> None:
        """Copy a save of the first node to the second one, without other transfers."""
        client, server = socket.socketpair()
        sender, receiver = self.make(0), self.make(1)
        thread = threading.Thread(target=receiver._serve_one, args=(client,))
        thread.start()
        with mock.patch.object(socket, "create_connection", return_value=server):
            sender._send(save)
        thread.join()

    def stop(self) -> None:
        for writer in self.writers:
            writer.wait = 0.0
            writer.finish()
        for listener in self.listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not [each for each in threading.enumerate() if re.search("copies|_serve_one", each.name)])

    def close(self) -> None:
        self.stop()
        for listener in self.listeners:
            listener.close()

    def save(self, node: int, tag: str = TAG, **changes: Any) -> SavePart:
        """Make a node's part of its next save, for the writer to copy now."""
        made = make_save(self.jobs[node], str(self.folder / "destination"), tag=tag, node=node, nodes=2, **changes)
        self.jobs[node].note("copying", {"safe": 0, "current": made.number})
        return made

    def save_copied(self) -> SavePart:
        """Make the first node's part and wait until the other node has a copy."""
        save = self.save(0)
        wait_until(lambda: save.read("copied").get("1"))
        return save

    def save_both(self) -> list[SavePart]:
        """Start both writers; make both parts and wait until the nodes have each other's."""
        self.start(0, 1)
        saves = [self.save(node) for node in range(2)]
        wait_until(lambda: all(any(save.read("copied").values()) for save in saves))
        return saves

    def list_copies(self, node: int) -> list[int]:
        return [copy.number for copy in self.jobs[node].list_copies()]

    @contextmanager
    def call(self, secret: str = SECRET) -> Iterator[Peer]:
        """Yield an authenticated connection to the second node."""
        sock = socket.create_connection(self.listeners[1].getsockname(), PATIENCE)
        peer = Peer(sock, bytes.fromhex(secret), accepted=False)
        try:
            yield peer
        finally:
            peer.close()
