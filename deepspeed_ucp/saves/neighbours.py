"""Decides which node sends copies of saves to which, and the save to copy."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..comm import Comm
from ..config import SaveOptions
from ..errors import UcpError, shorten
from .memory import Job

logger = logging.getLogger("deepspeed_ucp")

_BACKLOG = 64
"""Maximum number of connections that wait to be accepted."""

_COPIED, _WAITING, _FAILED, _GONE = "copied", "waiting", "failed", "gone"
"""States of a node's part of the save that is copied."""


class _Node(NamedTuple):
    """A node's name, its address towards ``MASTER_ADDR``, and that host's address."""

    host: str
    address: str
    master: str


@dataclass(slots=True)
class Neighbours:
    """The copies of one job's saves, as one rank knows them.

    Attributes:
        job: its node's folder of saves.
        settings: for the writer; empty on ranks that keep no folder.
        listener: socket on which the writer receives copies; it outlives a writer that is killed.
        safe, current: as of :meth:`.memory.Job.read`.
        late: names of the nodes whose saves did not reach the next node in time.
    """

    job: Job
    settings: dict[str, Any] = field(default_factory=dict)
    listener: socket.socket | None = None
    safe: int = 0
    current: int = 0
    late: set[str] = field(default_factory=set)

    def agree_on_copies(self, number: int, comm: Comm) -> None:
        """Agree on the complete copies and the next save to copy (collective).

        Call it before the save ``number``. All nodes copy the same save until each has it or cannot have it: if each
        node chose for itself, there might never be a save with copies of all nodes.
        """
        nodes = list(filter(None, comm.gather_results(self._find_state)))
        states, is_late = {state for _, state in nodes}, number - self.current > 1
        if states == {_COPIED}:
            self.safe = self.current
        if _WAITING not in states:
            self.current = number
        if self.listener is not None:
            with suppress(UcpError, OSError):  # memory is full: the former record stays valid
                self.job.note("copying", {"safe": self.safe, "current": self.current})
        late = {host for host, state in nodes if state == _FAILED or (state == _WAITING and is_late)}
        if comm.rank == 0 and late - self.late:
            log = os.path.join(self.job.folder, "log")
            named = shorten(sorted(late))
            logger.warning("saves of %s reach their neighbours' memory late or not at all: see %s there", named, log)
        self.late = late

    def _find_state(self) -> tuple[str, str] | None:
        """Return this node's name and its part's state (``_COPIED``, ``_WAITING``, …)."""
        if self.listener is None:
            return None
        name, target = self.settings["name"], str(self.settings["to"])
        save = next((candidate for candidate in self.job.list_saves() if candidate.number == self.current), None)
        if save is None:
            return name, _GONE
        copied = save.read("copied")
        if target not in copied:
            return name, _WAITING
        return name, _COPIED if copied[target] else _FAILED

    def has_unsent_save(self) -> bool:
        """Return True if this node's part of the newest save has not been sent."""
        saves = self.job.list_saves()
        return self.listener is not None and bool(saves) and str(self.settings["to"]) not in saves[-1].read("copied")

    def close(self) -> None:
        """Close the listener; the writer has another descriptor."""
        if self.listener is not None:
            self.listener.close()


def find_neighbours(options: SaveOptions, job: Job, owners: Sequence[int], comm: Comm) -> Neighbours | None:
    """Pair each node with the next one for copies; None on a single node (collective).

    Args:
        owners: by node the rank that owns its folder in memory.
    """
    if len(owners) == 1:
        if comm.rank == 0:
            logger.warning('"save": {"copies": 1}: there is only one node, and no other node to keep a copy')
        return None
    secret = comm.broadcast(secrets.token_hex(32))
    described = comm.gather_results(lambda: _describe_node(options) if comm.rank in owners else None)
    nodes = [_Node(*node) for node in filter(None, described)]
    if comm.rank == 0:
        pairs = [f"{node.host} → {after.host}" for node, after in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
        logger.info("each node's part of a save is copied to the next node's memory: %s", shorten(pairs, 8))
    node = owners.index(comm.rank) if comm.rank in owners else -1
    address = find_address(nodes, node) if node >= 0 else ""
    listener = comm.run(lambda: _listen(address) if node >= 0 else None)
    addresses = comm.gather_results(lambda: (address, listener.getsockname()[1]) if listener else None)
    if listener is None:
        return Neighbours(job)
    target = (node + 1) % len(nodes)
    settings = {
        "secret": secret,
        "name": nodes[node].host,
        "nodes": len(nodes),
        "to": target,
        "address": list(filter(None, addresses))[target],
        "from": (node - 1) % len(nodes),
    }
    return Neighbours(job, settings, listener)


def _describe_node(options: SaveOptions) -> _Node:
    """Return this machine's name and addresses; no packet is sent."""
    address = master = "127.0.0.1"
    with suppress(OSError):
        addresses = socket.getaddrinfo(os.environ.get("MASTER_ADDR", master), 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = addresses[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address, master = str(probe.getsockname()[0]), str(target[0])
    return _Node(socket.gethostname(), os.path.expandvars(options.address or "") or address, master)


def find_address(nodes: Sequence[_Node], node: int) -> str:
    """Return the address at which other nodes reach a node."""
    addresses = [nodes[node].address, *(described.master for described in nodes)]
    return next((one for one in addresses if not one.startswith("127.") and one != "::1"), addresses[0])


def _listen(address: str) -> socket.socket:
    """Listen at an address, or at all addresses if the system does not know it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError:
        return socket.create_server(("", 0), backlog=_BACKLOG)
