"""Two nodes of a job, each with a writer that copies its saves to the other one, in this process."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed_ucp.saves.copies import Peer, Replicator
from deepspeed_ucp.saves.memory import Job, SavePart, find_root, name_job
from tests.saves.saving import PATIENCE, TAG, make_save
from tests.support.until import wait_until

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
            job.own()

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

    def save_copied(self, node: int = 0) -> SavePart:
        """Make a node's part and wait until the other node has a copy."""
        save = self.save(node)
        wait_until(lambda: save.read("copied").get(str(1 - node)))
        return save

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
