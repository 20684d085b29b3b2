"""Which other nodes have copies of each node's saves in their memory, and of which save: the ranks agree on it."""

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
from ..errors import UcpError, count_of, shorten
from .copies import STRANGERS
from .memory import Job

logger = logging.getLogger("deepspeed_ucp")

_COPIED, _WAITING, _FAILED, _GONE = "copied", "waiting", "failed", "gone"
"""What may have become of a node's part of a save."""


class _Node(NamedTuple):
    """What a node's first rank tells of it: names of the host and of what it fails with, its address as it finds it
    by the way to the first one, and that one's."""

    host: str
    domain: str
    address: str
    master: str


@dataclass(slots=True)
class Neighbours:
    """The nodes that have a part of each save, as one rank knows them.

    Attributes:
        job: its node's folder of saves.
        settings: for the writer; none on ranks that keep no folder.
        listener: on which the writer is reached; it outlives one that is killed.
        safe, current: as :meth:`.memory.Job.read_copying` has them.
        failed: names of the nodes whose saves have not come to their neighbours.
        told: by how many saves copies have been told to be behind.
    """

    job: Job
    settings: dict[str, Any] = field(default_factory=dict)
    listener: socket.socket | None = None
    safe: int = 0
    current: int = 0
    failed: set[str] = field(default_factory=set)
    told: int = 0

    def agree(self, number: int, comm: Comm) -> None:
        """Before a save of this number is made: which copies are whole, and which save is copied next; collective.

        All nodes copy the same save until it is whole everywhere, or cannot be: of what each chose for itself there
        might never be one that all have.
        """
        told = comm.each(self._look)
        states = [state for _, state in filter(None, told)]
        failed = {host for host, state in filter(None, told) if state == _FAILED}
        if set(states) == {_COPIED}:
            self.safe = self.current
        if _WAITING not in states:
            self.current = number
        if self.listener is not None:
            with suppress(UcpError, OSError):  # memory is full: what was noted holds
                self.job.note_copying(self.safe, self.current)
        log = os.path.join(self.job.folder, "log")
        if comm.rank == 0 and failed - self.failed:
            told_of = shorten(sorted(failed))
            logger.warning("saves of %s do not come to their neighbours' memory: see %s there", told_of, log)
        self.failed, behind = failed, number - self.current
        if behind > 1 and behind >= 2 * self.told:
            self.told = behind
            if comm.rank == 0:
                logger.warning("copies in other nodes' memory are %s behind: see %s", count_of(behind, "save"), log)
        self.told = self.told if behind else 0

    def _look(self) -> tuple[str, str] | None:
        """Whether the save that is copied has come from this node to its neighbours."""
        if self.listener is None:
            return None
        name, targets = self.settings["name"], set(self.settings["to"])
        save = next((each for each in self.job.list_saves() if each.number == self.current), None)
        if save is None:
            return name, _GONE
        copied = save.read_copied()
        if targets - set(copied):
            return name, _WAITING
        return name, _COPIED if all(copied[node] for node in targets) else _FAILED

    def is_waited_for(self) -> bool:
        """Whether the newest save is still to be copied by this node, and its neighbours can be reached."""
        saves = self.job.list_saves()
        return bool(saves) and not set(saves[-1].read_copied()) >= set(self.settings.get("to", ()))

    def close(self) -> None:
        """The writer goes on with a listener of its own."""
        if self.listener is not None:
            self.listener.close()


def find_neighbours(options: SaveOptions, job: Job, first: Sequence[int], comm: Comm) -> Neighbours | None:
    """Who has a copy of whose saves; None, with a word, where nobody has; collective.

    Args:
        first: by node the rank that keeps its folder.
    """
    if len(first) == 1:
        if comm.rank == 0:
            logger.warning('"save": {"copies": %d}: there is one node, and nobody to have a copy', options.copies)
        return None
    secret = comm.broadcast(secrets.token_hex(32))
    told = comm.each(lambda: _describe_node(options) if comm.rank in first else None)
    nodes = [_Node(*node) for node in filter(None, told)]
    targets = choose_neighbours([node.domain or number for number, node in enumerate(nodes)], options.copies)
    if comm.rank == 0:
        _tell(options, nodes, targets)
    mine = first.index(comm.rank) if comm.rank in first else -1
    address = find_address(nodes, mine) if mine >= 0 else ""
    listener = comm.run(lambda: _listen(address) if mine >= 0 else None)
    ports = comm.each(lambda: (address, listener.getsockname()[1]) if listener else None)
    reached = list(filter(None, ports))
    if listener is None:
        return Neighbours(job)
    settings = {
        "secret": secret,
        "name": nodes[mine].host,
        "nodes": len(nodes),
        "to": {str(node): reached[node] for node in targets[mine]},
        "from": [node for node, chosen in enumerate(targets) if mine in chosen],
    }
    return Neighbours(job, settings, listener)


def choose_neighbours(domains: Sequence[object], copies: int) -> list[list[int]]:
    """By node those that have its copies: next in order of those that have fewest, each of another domain."""
    nodes, load = len(domains), [0] * len(domains)
    chosen: list[list[int]] = [[] for _ in domains]
    for _ in range(copies):
        for node, mine in enumerate(chosen):
            taken = {domains[each] for each in (node, *mine)}
            others = [(node + step) % nodes for step in range(1, nodes)]
            free = [each for each in others if domains[each] not in taken]
            if free:
                mine.append(min(free, key=load.__getitem__))
                load[mine[-1]] += 1
    return chosen


def _tell(options: SaveOptions, nodes: Sequence[_Node], targets: Sequence[Sequence[int]]) -> None:
    pairs = [f"{nodes[node].host} → {nodes[each].host}" for node, chosen in enumerate(targets) for each in chosen]
    logger.info("each node's part of a save is copied to others' memory: %s", shorten(pairs, 8) or "to none")
    lacking = [node for node, chosen in zip(nodes, targets, strict=True) if len(chosen) < options.copies]
    if lacking:
        told = shorten([f"{node.host} ({node.domain})" if node.domain else node.host for node in lacking], 8)
        logger.warning("fewer copies than %d, for want of nodes of other domains: of %s", options.copies, told)


def _describe_node(options: SaveOptions) -> _Node:
    address, master = _find_way(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    domain, own = (os.path.expandvars(each or "") for each in (options.domain, options.address))
    return _Node(socket.gethostname(), domain, own or address, master)


def _find_way(master: str) -> tuple[str, str]:
    """This machine's address on the way to another one, and that one's; nothing is sent."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]), str(address[0])
    return "127.0.0.1", "127.0.0.1"


def find_address(nodes: Sequence[_Node], node: int) -> str:
    """By which the others reach a node: a machine that calls itself by a name of the loopback has one to them."""
    if not _is_loopback(nodes[node].address):
        return nodes[node].address
    return next((each.master for each in nodes if not _is_loopback(each.master)), nodes[node].address)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _listen(address: str) -> socket.socket:
    """At any address where the system does not know this one: nobody is stopped for that."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=STRANGERS)
    except OSError:
        return socket.create_server(("", 0), backlog=STRANGERS)
