"""Copies in other nodes' memory, without ranks: two writers of one job in this process, and whoever else calls them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.errors import DiskFullError
from deepspeed_ucp.io.checksum import crc32
from deepspeed_ucp.saves import copies, neighbours
from deepspeed_ucp.saves import saver as savers
from deepspeed_ucp.saves.copies import Peer, Replicator
from deepspeed_ucp.saves.finding import find_in_memory
from deepspeed_ucp.saves.memory import Job, Snapshot, find_root, name_job
from deepspeed_ucp.saves.neighbours import Neighbours, find_address, find_neighbours
from deepspeed_ucp.saves.saver import Saver
from deepspeed_ucp.saves.writer import is_locked, start_writer
from deepspeed_ucp.sources.seal import read_seal
from tests.convert.conversions import read_bytes
from tests.saves.saving import PATIENCE, SETTINGS, TAG, find_writer, is_whole, make_save, write
from tests.support.crash import list_calls, run_dying
from tests.support.until import wait_until

SECRET = "ab" * 32


class Nodes:
    """Two nodes of a job: folders of memory, and a writer's side of copies in each, which copies to the other one."""

    def __init__(self, folder: Path) -> None:
        self.folder, name = folder, name_job()
        self.memories = [str(folder / f"memory{node}") for node in range(2)]
        self.jobs = [Job(os.path.join(find_root(memory), name)) for memory in self.memories]
        self.writers = list[Replicator]()
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in self.jobs]
        for job in self.jobs:
            job.own()

    def start(self, node: int, secret: str = SECRET, wait: float = PATIENCE) -> Replicator:
        """A writer; what a node has had before is left alone."""
        made = self.make(node, secret, wait)
        made.start()
        self.writers.append(made)
        return made

    def make(self, node: int, secret: str = SECRET, wait: float = PATIENCE) -> Replicator:
        address = list(self.listeners[1 - node].getsockname())
        settings = {"secret": secret, "name": f"host{node}", "nodes": 2, "to": 1 - node, "address": address}
        settings["from"] = 1 - node
        return Replicator(self.jobs[node], settings, self.listeners[node], 1, wait)

    def copy(self, save: Snapshot) -> None:
        """Send a save of the first node and take it on the second one, with nothing else going on."""
        ours, theirs = socket.socketpair()
        sender, taker = self.make(0), self.make(1)
        taker._served.acquire()
        thread = threading.Thread(target=taker._serve_one, args=(ours,))
        thread.start()
        with mock.patch.object(socket, "create_connection", return_value=theirs):
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

    def save(self, node: int, tag: str = TAG, **changes: Any) -> Snapshot:
        """A node's part of its next save, which is the one that is copied now."""
        made = make_save(self.jobs[node], str(self.folder / "place"), tag=tag, node=node, nodes=2, **changes)
        self.jobs[node].note_copying(0, made.number)
        return made

    def list_copies(self, node: int) -> list[int]:
        return [copy.number for copy in self.jobs[node].list_copies()]

    @contextmanager
    def call(self, secret: str = SECRET) -> Iterator[Peer]:
        """An authenticated connection to the second node."""
        sock = socket.create_connection(self.listeners[1].getsockname(), PATIENCE)
        peer = Peer(sock, bytes.fromhex(secret), accepted=False)
        try:
            yield peer
        finally:
            peer.close()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(copies, "_LOOKED", 0.01)
    monkeypatch.setattr(copies, "_AGAIN", 0.02)
    monkeypatch.setattr(copies, "_REACHED", PATIENCE)
    monkeypatch.setattr(copies, "_SILENT", PATIENCE)
    made = Nodes(tmp_path)
    yield made
    made.stop()
    for listener in made.listeners:
        listener.close()


def describe(save: Snapshot, **changes: Any) -> dict[str, Any]:
    """What a sender says of a save."""
    files = [
        {"path": path, "size": os.path.getsize(Path(save.folder, path)), "changed": 1} for path in save.list_files()
    ]
    return {"save": {**asdict(replace(save, folder="")), **changes}, "files": files, "done": {}}


def test_each_node_has_the_others_part(nodes: Nodes) -> None:
    for node in range(2):
        nodes.start(node)
    saves = [nodes.save(node) for node in range(2)]
    wait_until(lambda: all(save.read_copied() for save in saves))
    for node, save in enumerate(saves):
        (copy,) = nodes.jobs[1 - node].list_copies()
        assert replace(copy, folder="") == replace(save, folder="")
        assert copy.list_files() == save.list_files() and save.read_copied() == {str(1 - node): f"host{1 - node}"}
        assert read_bytes(Path(copy.folder) / TAG) == read_bytes(Path(save.folder) / TAG)
        for path in save.list_files():
            assert os.stat(Path(copy.folder, path)).st_mtime_ns == os.stat(Path(save.folder, path)).st_mtime_ns
    saves[0].note_done(saves[0].places[0], "digest")  # what a place has is told too
    wait_until(nodes.jobs[1].list_copies()[0].read_done)
    assert nodes.jobs[1].list_copies()[0].read_done() == saves[0].read_done()
    assert saves[0].list_files() == saves[1].list_files()  # none of the other one's is taken to a place


@pytest.mark.parametrize("lost", [0, 1])
def test_a_load_finds_what_is_left(lost: int, nodes: Nodes) -> None:
    """Of the save whose parts are all there; one that was on its way is none."""
    for node in range(2):
        nodes.start(node)
    saves = [nodes.save(node) for node in range(2)]
    wait_until(lambda: all(save.read_copied() for save in saves))
    nodes.stop()
    nodes.save(1 - lost, tag="next", step=9)
    for job in nodes.jobs:
        job.disown()
    shutil.rmtree(nodes.memories[lost])
    config = UniversalConfig(save=SaveOptions(memory=nodes.memories[1 - lost]))
    with mock.patch("deepspeed_ucp.saves.saver.start_writer"):
        found = find_in_memory(config, str(nodes.folder / "place"), None, Comm())
    assert found is not None and found.tag == TAG
    assert found.folder == nodes.jobs[1 - lost].find_folder(1)
    assert found.copies == (nodes.jobs[1 - lost].find_copy(lost, 1),)


def test_who_does_not_know_the_secret_is_not_heard(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes.start(1)
    nodes.start(0, secret="cd" * 32)
    save = nodes.save(0)
    wait_until(lambda: save.read_copied() == {"1": ""})
    assert "digest" in caplog.text
    assert nodes.list_copies(1) == []
    with pytest.raises((AuthenticationError, EOFError, OSError)), nodes.call(secret="ef" * 32):
        pass
    with socket.create_connection(nodes.listeners[1].getsockname()) as sock, suppress(OSError):
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert sock.recv(4096)
    assert nodes.list_copies(1) == []


@pytest.mark.parametrize("at", [0, 1, 200])
def test_a_cut_leaves_no_half_copy(at: int, nodes: Nodes) -> None:
    """Whatever has come before; and the next one is whole."""
    nodes.start(1)
    save = nodes.save(0)
    told = describe(save)
    data = Path(save.folder, save.list_files()[0]).read_bytes()
    with nodes.call() as peer:
        peer.send(json.dumps(told).encode())
        assert peer.receive_reply().wanted
        peer.send(data[:at])
    wait_until(lambda: not list(Path(nodes.jobs[1].folder).glob("copy-*")))
    nodes.start(0)
    wait_until(lambda: save.read_copied().get("1"))
    assert read_bytes(Path(nodes.jobs[1].find_copy(0, 1)) / TAG) == read_bytes(Path(save.folder) / TAG)


def test_killed_at_any_call(nodes: Nodes) -> None:
    """Both ends: a copy is whole or is not there, and is there where it was noted; the next attempt is whole."""
    first = nodes.save(0, tag="first")
    nodes.copy(first)
    nodes.jobs[1].note_copying(1, 2)
    save, kept = nodes.save(0), nodes.folder / "kept"
    for memory in nodes.memories:
        shutil.copytree(memory, kept / os.path.basename(memory))

    def reset() -> None:
        for memory in nodes.memories:
            shutil.rmtree(memory)
            shutil.copytree(kept / os.path.basename(memory), memory)

    for at in range(len(list_calls(lambda: nodes.copy(save)))):
        reset()
        assert run_dying(lambda: nodes.copy(save), at)
        copies = {copy.number: copy for copy in nodes.jobs[1].list_copies()}
        assert 1 in copies and (2 in copies or not save.read_copied())
        nodes.copy(save)
        for made in (first, save):
            (copy,) = [each for each in nodes.jobs[1].list_copies() if each.number == made.number]
            assert read_bytes(Path(copy.folder) / made.tag) == read_bytes(Path(made.folder) / made.tag), at


def test_a_stranger_has_little_time(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_REACHED", 0.2)
    monkeypatch.setattr(copies, "_SILENT", 2 * PATIENCE)
    nodes.start(1)
    with socket.create_connection(nodes.listeners[1].getsockname(), PATIENCE) as sock:
        assert b"CHALLENGE" in sock.recv(100)
        with suppress(ConnectionError):
            sock.sendall(b"\0\0\0\x20")
            for _ in range(31):  # one less than announced
                sock.sendall(b"x")
                time.sleep(0.01)
        with suppress(ConnectionError):
            assert sock.recv(100) == b""


def test_one_that_hangs_is_replaced_by_the_next(nodes: Nodes) -> None:
    """A sender whose machine is gone says nothing any more."""
    nodes.start(1)
    save = nodes.save(0)
    with nodes.call() as peer:
        peer.send(json.dumps(describe(save)).encode())
        assert peer.receive_reply().wanted
        nodes.start(0)
        wait_until(lambda: save.read_copied().get("1"))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "../elsewhere"),
        ({}, f"{TAG}/../../elsewhere"),
        ({}, "/tmp/elsewhere"),
        ({}, f"{TAG}/a\0b"),
        ({}, f"{TAG}/./a"),
        ({}, "other/a"),
        ({}, "save-0.json"),
        ({}, "done-0.json"),
        ({}, "latest"),
        ({}, ".hidden"),
        ({"tag": ".."}, "../elsewhere"),
        ({"tag": "/tmp"}, "/tmp/elsewhere"),
        ({"tag": ""}, "/elsewhere"),
        ({"job": "../job"}, ""),
        ({"node": 1}, ""),
        ({"node": 7}, ""),
        ({"nodes": 3}, ""),
        ({"number": 0}, ""),
        ({"number": 10**9}, ""),
        ({"number": "1"}, ""),
        ({"places": [{"folder": 3}]}, ""),
    ],
    ids=str,
)
def test_what_leads_elsewhere_is_refused(changes: dict[str, Any], path: str, nodes: Nodes) -> None:
    nodes.start(1)
    save = nodes.save(0)
    told = describe(save, **changes)
    if path:
        told["files"].append({"path": path, "size": 4, "changed": 1})
    before = set(nodes.folder.rglob("*"))
    with nodes.call() as peer:
        peer.send(json.dumps(told).encode())
        with pytest.raises(copies._TransferError, match="refused"):
            peer.receive_reply()
    assert set(nodes.folder.rglob("*")) == before


@pytest.mark.parametrize("told", [b"", b"no JSON", b"[" * 100_000, b'{"save": {}}', b"\xff\xfe"], ids=len)
def test_what_is_not_understood_is_refused(told: bytes, nodes: Nodes) -> None:
    nodes.start(1)
    with nodes.call() as peer:
        peer.send(told)
        with pytest.raises(copies._TransferError, match="refused"):
            peer.receive_reply()
    with nodes.call() as peer:  # a message that no memory can hold
        peer._sock.sendall(b"\x7f\xff\xff\xff")
        with pytest.raises((EOFError, OSError)):
            peer.receive_reply()
    assert nodes.list_copies(1) == []


def test_memory_that_is_full_refuses(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """This node's own saves come first; once there is room the copy comes."""
    nodes.start(1)
    nodes.save(1)
    with mock.patch.object(copies, "count_free", return_value=1000):
        nodes.start(0)
        save = nodes.save(0)
        wait_until(lambda: save.read_copied() == {"1": ""})
    assert "MiB are free" in caplog.text
    wait_until(lambda: save.read_copied().get("1"))
    assert nodes.list_copies(1) == [1]


def test_memory_that_runs_full_meanwhile(nodes: Nodes) -> None:
    nodes.start(1)
    with mock.patch.object(copies, "write_at", side_effect=DiskFullError("full", path="copy")):
        nodes.start(0)
        save = nodes.save(0)
        wait_until(lambda: save.read_copied() == {"1": ""})
        assert nodes.list_copies(1) == []
    wait_until(lambda: save.read_copied().get("1"))


def test_a_byte_that_changes_on_its_way_is_noticed(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes.start(1)
    save = nodes.save(0)
    data = Path(save.folder, save.list_files()[0]).read_bytes()
    with nodes.call() as peer:
        peer.send(json.dumps(describe(save)).encode())
        assert peer.receive_reply().wanted
        peer.send(bytes([data[0] ^ 1]) + data[1:])
        peer.send(crc32(data).to_bytes(4, "big"))
        with pytest.raises((EOFError, OSError)):
            peer.receive_reply()
    wait_until(lambda: "its CRC32 is not the one that was sent" in caplog.text)
    assert nodes.list_copies(1) == []


def test_a_save_that_is_written_over_while_it_is_sent_is_no_copy(nodes: Nodes) -> None:
    nodes.start(1)
    original = Peer.send_file
    save = nodes.save(0)

    def send(*args: Any) -> None:
        original(*args)
        if save.is_recorded():
            save.spare()

    with mock.patch.object(Peer, "send_file", send):
        nodes.start(0)
        wait_until(lambda: not save.is_recorded())
        time.sleep(0.1)
    assert nodes.list_copies(1) == []
    again = nodes.save(0)
    wait_until(lambda: again.read_copied().get("1"))


def test_older_copies_go_and_leave_their_memory(nodes: Nodes) -> None:
    """The last save that all have stays, whatever came after it."""
    for node in range(2):
        nodes.start(node)
    kept, pages = list[list[int]](), list[int]()
    for number, safe in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 2)):
        nodes.jobs[1].note_copying(safe, number)
        save = nodes.save(0, tag=f"tag{number}")
        wait_until(lambda save=save: save.read_copied().get("1"))
        kept.append(nodes.list_copies(1))
        (path,) = Path(nodes.jobs[1].find_copy(0, number)).glob("*/*model_states.pt")
        pages.append(path.stat().st_ino)
        assert read_bytes(path.parent) == read_bytes(Path(save.folder) / save.tag)
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    assert pages[4] == pages[2]


def test_the_newest_save_comes_at_the_end(nodes: Nodes) -> None:
    """Whichever was being copied; then both writers end."""
    writers = [nodes.start(node) for node in range(2)]
    for _ in range(2):
        for node in range(2):
            nodes.save(node)
    for job in nodes.jobs:
        job.note_copying(0, 1)
    wait_until(lambda: all(nodes.list_copies(node)[:1] == [1] for node in range(2)))
    for writer in writers:
        writer.end()
    for writer in writers:
        writer.finish()
    assert [nodes.list_copies(node)[-1] for node in range(2)] == [2, 2]


def test_a_neighbour_that_is_gone_is_not_waited_for(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_SILENT", 0.1)
    monkeypatch.setattr(copies, "_REACHED", 0.1)
    writer = nodes.start(0, wait=1e9)
    nodes.listeners[1].shutdown(socket.SHUT_RDWR)
    save = nodes.save(0)
    writer.end()
    writer.finish()
    wait_until(lambda: save.read_copied() == {"1": ""})


def test_a_job_with_copies_alone_stays(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1)
    save = nodes.save(0)
    wait_until(lambda: save.read_copied().get("1"))
    assert not nodes.jobs[1].holds_none()


def test_copies_of_a_dead_job_go_where_a_save_needs_their_memory(nodes: Nodes) -> None:
    """Not before their destination has them: the node that was to write them may be lost."""
    nodes.start(0)
    nodes.start(1)
    save = nodes.save(0)
    wait_until(lambda: save.read_copied().get("1"))
    nodes.stop()
    nodes.jobs[1].disown()
    config = UniversalConfig(save=SaveOptions(memory=nodes.memories[1]))
    saver = Saver(config, name_job(), 0, [0])
    with mock.patch.object(savers, "count_free", side_effect=lambda _: 0 if nodes.list_copies(1) else 100):
        saver.needed = 10
        assert f"{save.tag} (step {save.step}) of {save.save_dir}" in saver.make_room() and nodes.list_copies(1)
        for copy in nodes.jobs[1].list_copies():
            copy.replace_done({place.folder: "mark" for place in copy.places})
        assert saver.make_room() == ""


def test_a_writer_that_is_killed_is_followed_by_one_that_is_reached_there(nodes: Nodes) -> None:
    """Real ones; what they know of each other is on no command line and in no file."""
    ports = [listener.getsockname() for listener in nodes.listeners]
    shared = {"secret": SECRET, "nodes": 2}
    own = [{"name": f"host{node}", "to": 1 - node, "address": ports[1 - node], "from": 1 - node} for node in range(2)]

    def start(node: int) -> Any:
        job = nodes.jobs[node]
        return start_writer(job, SETTINGS, Neighbours(job, {**shared, **own[node]}, nodes.listeners[node]))

    lines = [start(node) for node in range(2)]
    saves = [nodes.save(node) for node in range(2)]
    wait_until(lambda: all(save.read_copied() for save in saves))
    command = Path(f"/proc/{find_writer(nodes.jobs[1])}/cmdline").read_bytes()
    held = [path.read_bytes() for path in nodes.folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in data for data in [command, *held])
    os.kill(find_writer(nodes.jobs[1]), signal.SIGKILL)
    wait_until(lambda: not is_locked(nodes.jobs[1]))
    later = [nodes.save(node, tag="later") for node in range(2)]
    time.sleep(0.2)  # it is connected to, and says nothing
    assert not any(save.read_copied().get("1") for save in later)
    lines.append(start(1))
    wait_until(lambda: all(any(save.read_copied().values()) for save in later))
    for each in lines:
        with suppress(OSError):
            each.close()
    for listener in nodes.listeners:
        listener.close()
    wait_until(lambda: not any(map(is_locked, nodes.jobs)))
    assert [nodes.list_copies(node) for node in range(2)] == [[1, 2], [1, 2]]
    assert is_whole(str(nodes.folder / "place" / "later"))


def test_the_seal_says_which_machines_have_what(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1)
    save = make_save(nodes.jobs[0], str(nodes.folder / "place"), nodes=1)
    save.note_copied(1, "host1")
    assert write(nodes.jobs[0])
    seal = read_seal(str(nodes.folder / "place" / TAG / "ucp_seal.json"))
    assert seal.hosts == {host: sorted(seal.files) for host in (socket.gethostname(), "host1")}


# -- what ranks agree on -----------------------------------------------------------------------------------------------


def test_a_machine_that_calls_itself_by_the_loopback_is_reached_by_its_name() -> None:
    nodes = [neighbours._Node("a", "127.0.1.1", "127.0.1.1"), neighbours._Node("b", "10.0.0.2", "10.0.0.1")]
    assert [find_address(nodes, node) for node in range(2)] == ["10.0.0.1", "10.0.0.2"]
    here = [neighbours._Node("a", "127.0.0.1", "127.0.0.1")] * 2
    assert find_address(here, 1) == "127.0.0.1"


class TwoNodes(Comm):
    """This rank is the first node's; what the other one says is given."""

    size = 2

    def __init__(self, *told: Any) -> None:
        self.told = list(told)

    def gather(self, value: Any) -> list[Any]:
        return [value, (self._pack(self.told.pop(0)), None)]


def test_which_save_is_copied_is_the_same_on_all_nodes(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """The next one once the last one is everywhere, or cannot be; it is safe where it is everywhere."""
    job = nodes.jobs[0]
    known = Neighbours(job, {"name": "here", "to": 1}, nodes.listeners[0])

    def agree(number: int, other: str) -> tuple[int, int]:
        known.agree(number, TwoNodes(("there", other)))
        return job.read_copying()

    assert agree(1, "gone") == (0, 1)
    save = make_save(job, str(nodes.folder / "place"), nodes=2)
    assert agree(2, "copied") == (0, 1)  # this node's is on its way
    save.note_copied(1, "there")
    assert agree(2, "waiting") == (0, 1)
    assert agree(2, "copied") == (1, 2)
    save = make_save(job, str(nodes.folder / "place"), nodes=2)
    save.note_copied(1, "there")
    assert agree(3, "failed") == (1, 3)
    assert caplog.text.count("saves of there do not reach their neighbours' memory") == 1
    assert agree(4, "gone") == (1, 4)
    for number in range(5, 10):
        make_save(job, str(nodes.folder / "place"), nodes=2, number=4)
        assert agree(number, "waiting") == (1, 4)
    assert caplog.text.count("2 saves behind") == caplog.text.count("4 saves behind") == 1
    assert caplog.text.count("behind") == 2


def test_one_node_has_nobody(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    assert find_neighbours(SaveOptions(copies=1), nodes.jobs[0], [0], Comm()) is None
    assert "there is only one node" in caplog.text
