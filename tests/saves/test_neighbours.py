"""Copies of saves in another node's memory, without ranks: two writers of one job, and unauthorized peers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.errors import DiskFullError, StorageError
from deepspeed_ucp.io.read import crc32
from deepspeed_ucp.saves import budget, copies, neighbours
from deepspeed_ucp.saves.copies import Peer
from deepspeed_ucp.saves.launch import start_writer
from deepspeed_ucp.saves.memory import SavePart, find_root, has_writer, name_job
from deepspeed_ucp.saves.neighbours import Neighbours, find_address, find_neighbours
from deepspeed_ucp.saves.saver import Saver
from deepspeed_ucp.saves.search import search_memory
from tests.convert.conversions import read_bytes, write_source
from tests.saves.saving import CONFIG, PATIENCE, SECRET, TAG, Nodes, find_writer, is_whole, make_save
from tests.support.ranks import run_ranks
from tests.support.until import wait_until


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name, seconds in (("_LOOKED", 0.01), ("_AGAIN", 0.02), ("_REACHED", PATIENCE), ("_SILENT", PATIENCE)):
        monkeypatch.setattr(copies, name, seconds)
    made = Nodes(tmp_path)
    yield made
    made.close()


def describe(save: SavePart, **changes: Any) -> dict[str, Any]:
    """Return the description of a save that its sender sends first."""
    files = [
        {"path": path, "size": os.path.getsize(Path(save.folder, path)), "changed": 1} for path in save.list_files()
    ]
    return {"save": {**asdict(replace(save, folder="")), **changes}, "files": files, "done": {}}


def offer(peer: Peer, description: Any) -> copies._Reply:
    peer.send(description if isinstance(description, bytes) else json.dumps(description).encode())
    return peer.receive_reply()


def test_each_node_gets_a_copy_of_the_others_part(nodes: Nodes) -> None:
    saves = nodes.save_both()
    for node, save in enumerate(saves):
        (copy,) = nodes.jobs[1 - node].list_copies()
        assert replace(copy, folder="") == replace(save, folder="")
        assert copy.list_files() == save.list_files() and save.read("copied") == {str(1 - node): "yes"}
        assert read_bytes(Path(copy.folder) / TAG) == read_bytes(Path(save.folder) / TAG)
        for path in save.list_files():
            assert os.stat(Path(copy.folder, path)).st_mtime_ns == os.stat(Path(save.folder, path)).st_mtime_ns
    assert saves[0].list_files() == saves[1].list_files()  # without the copies
    saves[0].note("done", {str(nodes.folder / "destination"): "digest"})  # marks are sent later too
    wait_until(lambda: nodes.jobs[1].list_copies()[0].read("done"))
    assert nodes.jobs[1].list_copies()[0].read("done") == saves[0].read("done")
    assert not nodes.jobs[1].is_empty()


def test_a_part_of_a_save_without_files_is_copied(nodes: Nodes) -> None:
    """Otherwise the save would be incomplete after the loss of its node."""
    save = nodes.save(0)
    for path in save.list_files():
        Path(save.folder, path).unlink()
    nodes.copy(save)
    (copy,) = nodes.jobs[1].list_copies()
    assert replace(copy, folder="") == replace(save, folder="") and save.read("copied") == {"1": "yes"}


@pytest.mark.parametrize("lost", [0, 1])
def test_a_load_finds_the_newest_save_with_all_parts(lost: int, nodes: Nodes) -> None:
    nodes.save_both()
    nodes.stop()
    nodes.save(1 - lost, tag="next", step=9)
    for job in nodes.jobs:
        job.unlock()
    shutil.rmtree(nodes.memories[lost])
    root = find_root(nodes.memories[1 - lost])
    found = search_memory(root, str(nodes.folder / "destination"), None, Comm())
    assert found is not None and found.tag == TAG
    assert found.folder == nodes.jobs[1 - lost].find_folder(1)
    assert found.copies == (nodes.jobs[1 - lost].find_copy(lost, 1),)


def test_a_done_mark_counts_although_the_copy_lacks_it(nodes: Nodes) -> None:
    """A writer may end before it sends the mark. Here the destination then has other files of that step."""
    destination = nodes.folder / "destination"
    saves = [nodes.save(node, step=3) for node in range(2)]
    nodes.copy(saves[0])
    saves[0].note("done", {str(destination): "mark"})
    write_source(destination, 7)
    (destination / "latest").write_text(TAG)
    for job in nodes.jobs:
        job.unlock()
    roots = [find_root(memory) for memory in nodes.memories]
    assert run_ranks(2, lambda rank, comm: search_memory(roots[rank], str(destination), None, comm)) == [None, None]


def test_a_peer_without_the_secret_is_refused(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes.start(1)
    nodes.start(0, secret="cd" * 32)
    save = nodes.save(0)
    wait_until(lambda: save.read("copied") == {"1": ""})
    assert "digest" in caplog.text
    with pytest.raises((AuthenticationError, EOFError, OSError)), nodes.call(secret="ef" * 32):
        pass
    with socket.create_connection(nodes.listeners[1].getsockname()) as sock, suppress(OSError):
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert sock.recv(4096)
    assert nodes.list_copies(1) == []


@pytest.mark.parametrize("at", [0, 1, 200, None], ids=lambda at: "changed byte" if at is None else f"cut at {at}")
def test_a_faulty_transfer_leaves_no_partial_copy(
    at: int | None, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.start(1)
    save = nodes.save(0)
    data = Path(save.folder, save.list_files()[0]).read_bytes()
    with nodes.call() as peer:
        assert offer(peer, describe(save)).wanted
        peer.send(bytes([data[0] ^ 1]) + data[1:] if at is None else data[:at])
        if at is None:
            peer.send(crc32(data).to_bytes(4, "big"))
            with pytest.raises((EOFError, OSError)):
                peer.receive_reply()
            wait_until(lambda: "its CRC32 is not the one that was sent" in caplog.text)
    wait_until(lambda: not list(Path(nodes.jobs[1].folder).glob("copy-*")))
    nodes.start(0)
    wait_until(lambda: save.read("copied").get("1"))
    assert read_bytes(Path(nodes.jobs[1].find_copy(0, 1)) / TAG) == read_bytes(Path(save.folder) / TAG)


def test_a_slow_unauthenticated_peer_is_disconnected(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_REACHED", 0.2)
    monkeypatch.setattr(copies, "_SILENT", 2 * PATIENCE)
    nodes.start(1)
    with socket.create_connection(nodes.listeners[1].getsockname(), PATIENCE) as sock:
        assert b"CHALLENGE" in sock.recv(100)
        with suppress(ConnectionError):
            sock.sendall(b"\0\0\0\x20")
            for _ in range(31):  # one byte less than announced
                sock.sendall(b"x")
                time.sleep(0.01)
        with suppress(ConnectionError):
            assert sock.recv(100) == b""


PATHS = (
    "../elsewhere", f"{TAG}/../../elsewhere", "/tmp/elsewhere", f"{TAG}/a\0b", f"{TAG}/./a", "other/a", "save-0.json",
    "latest", ".hidden",
)  # fmt: skip
SAVES: list[dict[str, Any]] = [
    {"job": "../job"}, {"node": 1}, {"node": 7}, {"nodes": 3}, {"number": 0}, {"number": 10**9}, {"number": "1"},
    {"destinations": {"destination": "all"}}, {"tag": ".."}, {"tag": "/tmp"}, {"tag": ""},
]  # fmt: skip
MALFORMED = [b"", b"no JSON", b"[" * 100_000, b'{"save": {}}', b"\xff\xfe"]


@pytest.mark.parametrize("given", [*PATHS, *SAVES, *MALFORMED], ids=lambda given: str(given)[:50])
def test_a_description_that_is_malformed_or_leads_outside_is_refused(given: Any, nodes: Nodes) -> None:
    nodes.start(1)
    changes = given if isinstance(given, dict) else {}
    description = describe(nodes.save(0), **changes)
    if given in PATHS or "tag" in changes:
        path = f"{changes['tag']}/elsewhere" if changes else given
        description["files"].append({"path": path, "size": 4, "changed": 1})
    before = set(nodes.folder.rglob("*"))
    with nodes.call() as peer, pytest.raises(StorageError, match="refused"):
        offer(peer, given if given in MALFORMED else description)
    with nodes.call() as peer:  # a message larger than any memory
        peer._sock.sendall(b"\x7f\xff\xff\xff")
        with pytest.raises((EOFError, OSError)):
            peer.receive_reply()
    assert set(nodes.folder.rglob("*")) == before


FULL = {
    "before": ("count_free", {"return_value": 1000}, "MiB are free"),
    "meanwhile": ("write_at", {"side_effect": DiskFullError("full", path="copy")}, "has no copy"),
}


@pytest.mark.parametrize("when", FULL)
def test_a_copy_without_room_in_memory_is_sent_later(when: str, nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """The node's saves take precedence over copies."""
    name, how, text = FULL[when]
    nodes.start(1)
    nodes.save(1)
    with mock.patch.object(copies, name, **how):
        nodes.start(0)
        save = nodes.save(0)
        wait_until(lambda: save.read("copied") == {"1": ""})
        assert nodes.list_copies(1) == []
    assert text in caplog.text
    wait_until(lambda: save.read("copied").get("1"))
    assert nodes.list_copies(1) == [1]


def test_a_save_that_is_overwritten_during_its_transfer_is_discarded(nodes: Nodes) -> None:
    nodes.start(1)
    original, save = Peer.send_file, nodes.save(0)
    last = os.path.join(save.folder, save.list_files()[-1])

    def send(peer: Peer, path: str, size: int) -> None:
        original(peer, path, size)
        if path == last:
            save.recycle()

    with mock.patch.object(Peer, "send_file", send):
        nodes.start(0)
        wait_until(lambda: not save.is_recorded())
        time.sleep(0.1)
    assert nodes.list_copies(1) == []
    nodes.save_copied()


def test_older_copies_are_removed_except_the_last_save_on_all_nodes(nodes: Nodes) -> None:
    nodes.start(0, 1)
    kept = list[list[int]]()
    for number, safe in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 2)):
        nodes.jobs[1].note("copying", {"safe": safe, "current": number})
        save = nodes.save(0, tag=f"tag{number}")
        wait_until(lambda save=save: save.read("copied").get("1"))
        kept.append(nodes.list_copies(1))
        (path,) = Path(nodes.jobs[1].find_copy(0, number)).glob("*/*model_states.pt")
        assert read_bytes(path.parent) == read_bytes(Path(save.folder) / save.tag)
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]


def test_the_newest_save_is_copied_at_exit(nodes: Nodes) -> None:
    """At that time another save is being copied. Both writers then exit."""
    nodes.start(0, 1)
    for node in (0, 1, 0, 1):
        nodes.save(node)
    for job in nodes.jobs:
        job.note("copying", {"safe": 0, "current": 1})
    wait_until(lambda: all(nodes.list_copies(node)[:1] == [1] for node in range(2)))
    for writer in nodes.writers:
        writer.end()
    for writer in nodes.writers:
        writer.finish()
    assert [nodes.list_copies(node)[-1] for node in range(2)] == [2, 2]


def test_a_writer_does_not_wait_for_a_lost_neighbour(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_SILENT", 0.1)
    monkeypatch.setattr(copies, "_REACHED", 0.1)
    writer = nodes.start(0, wait=1e9)
    nodes.listeners[1].shutdown(socket.SHUT_RDWR)
    save = nodes.save(0)
    writer.end()
    writer.finish()
    wait_until(lambda: save.read("copied") == {"1": ""})


def test_a_save_frees_a_dead_jobs_copies_that_their_destination_has(nodes: Nodes) -> None:
    nodes.start(0, 1)
    save = nodes.save_copied()
    nodes.stop()
    nodes.jobs[1].unlock()
    config = UniversalConfig(save=SaveOptions(memory=nodes.memories[1]))
    saver = Saver(config, name_job(), 0, [0])
    with mock.patch.object(budget, "count_free", side_effect=lambda _: 0 if nodes.list_copies(1) else 100):
        saver.budget.needed = 10
        assert f"{save.tag} (step {save.step}) of {save.save_dir}" in saver.budget.make_room() and nodes.list_copies(1)
        for copy in nodes.jobs[1].list_copies():
            copy.note("done", dict.fromkeys(copy.destinations, "mark"))
        assert saver.budget.make_room() == ""


def test_a_restarted_writer_is_reached_at_the_same_address(nodes: Nodes) -> None:
    """Writers are processes. Their secret is neither on a command line nor in a file."""

    def start(node: int) -> Any:
        job = nodes.jobs[node]
        return start_writer(job, CONFIG, Neighbours(job, nodes.describe(node), nodes.listeners[node]))

    pipes = [start(node) for node in range(2)]
    saves = [nodes.save(node) for node in range(2)]
    wait_until(lambda: all(save.read("copied") for save in saves))
    command = Path(f"/proc/{find_writer(nodes.jobs[1])}/cmdline").read_bytes()
    files = [path.read_bytes() for path in nodes.folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in data for data in [command, *files])
    os.kill(find_writer(nodes.jobs[1]), signal.SIGKILL)
    wait_until(lambda: not has_writer(nodes.jobs[1]))
    later = [nodes.save(node, tag="later") for node in range(2)]
    time.sleep(0.2)  # the connection is accepted but not answered
    assert not any(save.read("copied").get("1") for save in later)
    pipes.append(start(1))
    wait_until(lambda: all(any(save.read("copied").values()) for save in later))
    for pipe in pipes:
        with suppress(OSError):
            pipe.close()
    for listener in nodes.listeners:
        listener.close()
    wait_until(lambda: not any(map(has_writer, nodes.jobs)))
    assert [nodes.list_copies(node) for node in range(2)] == [[1, 2], [1, 2]]
    assert is_whole(str(nodes.folder / "destination" / "later"))


# -- agreement of ranks ------------------------------------------------------------------------------------------------


def test_a_node_is_reached_at_its_route_to_the_master_or_at_that_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own address may be a loopback address."""
    probe = mock.MagicMock()
    probe.__enter__.return_value = mock.Mock(getsockname=lambda: ("10.0.0.2", 1))
    monkeypatch.setattr(socket, "socket", lambda *_: probe)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    found = [neighbours._describe_node(SaveOptions(address=each)) for each in (None, "10.1.1.1")]
    assert [node[1:] for node in found] == [("10.0.0.2", "10.0.0.1"), ("10.1.1.1", "10.0.0.1")]
    nodes = [neighbours._Node("a", "127.0.1.1", "127.0.1.1"), found[0]]
    assert [find_address(nodes, node) for node in range(2)] == ["10.0.0.1", "10.0.0.2"]
    assert find_address(nodes[:1] * 2, 1) == "127.0.1.1"


class TwoNodes(Comm):
    """Two ranks: this one on the first node, and a peer with predefined values."""

    size = 2

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def gather(self, value: Any) -> list[Any]:
        return [value, (self._pack(self.values.pop(0)), None)]


def test_all_nodes_agree_on_the_save_to_copy(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """The next save is copied after each node has, or cannot have, the last one. It is safe on all nodes."""
    job = nodes.jobs[0]
    known = Neighbours(job, {"name": "here", "to": 1}, nodes.listeners[0])

    def make(**changes: Any) -> SavePart:
        return make_save(job, str(nodes.folder / "destination"), nodes=2, **changes)

    def agree(number: int, other: str) -> tuple[int, int]:
        known.agree_on_copies(number, TwoNodes(("there", other)))
        return job.read("copying")["safe"], job.read("copying")["current"]

    assert agree(1, "gone") == (0, 1)
    save = make()
    assert agree(2, "copied") == (0, 1)  # this node's part is not copied yet
    save.note("copied", {"1": "there"})
    assert agree(2, "waiting") == (0, 1)
    assert agree(2, "copied") == (1, 2)
    make().note("copied", {"1": "there"})
    assert agree(3, "failed") == (1, 3)
    assert caplog.text.count("saves of there reach their neighbours' memory late or not at all") == 1
    assert agree(4, "gone") == (1, 4)
    for number in range(5, 10):
        make(number=4)
        assert agree(number, "waiting") == (1, 4)
    assert caplog.text.count("late or not at all") == 2


def test_a_single_node_has_no_neighbour(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    assert find_neighbours(SaveOptions(copies=1), nodes.jobs[0], [0], Comm()) is None
    assert "there is only one node" in caplog.text
