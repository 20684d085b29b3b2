"""All ranks' reads against a store of many servers, in virtual time, one event per read.

A file lies on one server, or its stripes on several in turn. A server serves its reads one after the other; besides,
a read takes the store's latency and what one stream can move, and passes its node's link. Each rank has some threads,
of which each takes the rank's next read, as the reader's do. As in `load/exchange.py` on several machines, a rank reads
what it stages in a round; an exchange begins when all ranks have, and ends when the busiest node has sent and received
its bytes. Behind the last round each reads what it has for itself.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whole import RankPlan, Read, count_steps, sum_moved, sum_nodes

GB = 1e9


@dataclass(frozen=True)
class Store:
    """Servers, bytes a second of each, of a stream and of a node's link; seconds before a read's first byte.

    Attributes:
        stripe: bytes of a file on one server before the next one's turn; 0 where files are whole.
        slow_servers, slow_nodes: those that are ten times as slow.
    """

    servers: int = 96
    server: float = 10 * GB
    stream: float = 1.5 * GB
    link: float = 50 * GB
    latency: float = 1e-3
    per_node: int = 8
    threads: int = 8
    stripe: int = 0
    slow_servers: tuple[int, ...] = ()
    slow_nodes: tuple[int, ...] = ()
    slow: float = 10.0

    def find_server(self, read: Read) -> int:
        """Files begin on servers in a scattered order, as they were made by ranks that did not wait for each other."""
        first = read[0] * 2_654_435_761 % 2**32 * self.servers >> 32
        return (first + read[1] // self.stripe) % self.servers if self.stripe else first

    def serve(self, server: int) -> float:
        return self.server / (self.slow if server in self.slow_servers else 1)

    def pass_on(self, node: int) -> float:
        return self.link / (self.slow if node in self.slow_nodes else 1)


@dataclass
class Simulated:
    """Virtual seconds of a load, in all and of its exchanges; how many ranks' reads were in one file, on one server.

    Attributes:
        limit: the least that the store, its slowest server, or a node's link takes.
        bound: what that is.
        hot_file: ranks that read one file at once, at most; at the beginning.
        busy: of the time of all reads, the mean share of the servers' rates that is used.
    """

    seconds: float
    reading: float
    exchange: float
    limit: float
    bound: str
    hot_file: int
    hot_begin: int
    hot_server: int
    busy: float
    ends: list[float] = field(default_factory=list)


def find_limit(plans: Sequence[RankPlan], store: Store) -> tuple[float, str]:
    """What no order of the same reads can beat; each byte is read once, and nodes take in what their ranks want."""
    servers: Counter[int] = Counter()
    for plan in plans:
        for read in plan.reads:
            servers[store.find_server(read)] += read[2]
    total = sum(servers.values()) / sum(map(store.serve, range(store.servers)))
    nodes = sum_nodes([plan.wanted for plan in plans], store.per_node)
    bounds = {
        "the whole store": total,
        "the fullest server": max(nbytes / store.serve(server) for server, nbytes in servers.items()),
        "the link of a node": max(nbytes / store.pass_on(node) for node, nbytes in enumerate(nodes)),
        "a rank's streams": max(plan.wanted for plan in plans) / (store.stream * store.threads),
    }
    bound = max(bounds, key=lambda each: bounds[each])
    return bounds[bound], bound


class _Run:
    """Servers and links with the time at which each is free."""

    def __init__(self, store: Store, ranks: int) -> None:
        self.store = store
        self.servers = [0.0] * store.servers
        self.links = [0.0] * -(-ranks // store.per_node)
        self.rates = [store.serve(server) for server in range(store.servers)]
        self.link_rates = [store.pass_on(node) for node in range(len(self.links))]
        self.files: Counter[int] = Counter()
        self.waiting: Counter[int] = Counter()
        self.hot_file = self.hot_begin = self.hot_server = 0

    def read_all(self, lists: Sequence[Sequence[Read]], begin: float) -> list[float]:
        """Let all ranks read their lists from a time on; when each has ended."""
        ends, turns = [begin] * len(lists), [iter(reads) for reads in lists]
        heap = [(begin, thread, rank, -1, -1) for thread in range(self.store.threads) for rank in range(len(lists))]
        heapq.heapify(heap)
        while heap:
            now, thread, rank, file, server = heapq.heappop(heap)
            if file >= 0:
                self.files[file] -= 1
                self.waiting[server] -= 1
            ends[rank] = max(ends[rank], now)
            read = next(turns[rank], None)
            if read is not None:
                file, server, done = self._serve(now, rank // self.store.per_node, read)
                heapq.heappush(heap, (done, thread, rank, file, server))
                if not now:
                    self.hot_begin = max(self.hot_begin, self.files[file])
        return ends

    def _serve(self, now: float, node: int, read: Read) -> tuple[int, int, float]:
        store, (file, _, nbytes), server = self.store, read, self.store.find_server(read)
        self.servers[server] = max(self.servers[server], now) + nbytes / self.rates[server]
        self.links[node] = max(self.links[node], now) + nbytes / self.link_rates[node]
        alone = now + nbytes / store.stream
        self.files[file] += 1
        self.waiting[server] += 1
        self.hot_file = max(self.hot_file, self.files[file])
        self.hot_server = max(self.hot_server, self.waiting[server])
        return file, server, max(self.servers[server], self.links[node], alone) + store.latency


def simulate(plans: Sequence[RankPlan], store: Store, share: int) -> Simulated:
    """A load's one pass; ``share`` as of :class:`~deepspeed_ucp.plan.ReadSizes`."""
    run, now, exchange = _Run(store, len(plans)), 0.0, 0.0
    steps = count_steps(plans, share, store.per_node)
    for number, count in enumerate(steps):
        lists = [plan.rounds[number] if number < len(plan.rounds) else [] for plan in plans]
        seconds = _exchange(plans, number, store) + count * store.latency
        now = max(run.read_all(lists, now)) + seconds
        exchange += seconds
    ends = run.read_all([plan.direct for plan in plans], now)
    now = max(ends)
    limit, bound = find_limit(plans, store)
    total = sum(read[2] for plan in plans for read in plan.reads)
    busy = total / (now * sum(run.rates))
    return Simulated(
        now, now - exchange, exchange, limit, bound, run.hot_file, run.hot_begin, run.hot_server, busy, ends
    )


def _exchange(plans: Sequence[RankPlan], number: int, store: Store) -> float:
    """Seconds of a round's exchange: what stays in a node does not pass its link."""
    moved = sum_moved(plans, number, store.per_node, lambda rank: rank // store.per_node)
    return max((nbytes / store.pass_on(node) for (node, _), nbytes in moved.items()), default=0.0)


STORES: Mapping[str, Store] = {
    "whole files": Store(),
    "striped by 16 MiB": Store(stripe=16 << 20),
    "striped, 1 slow server": Store(stripe=16 << 20, slow_servers=(17,)),
    "striped, 1 slow node": Store(stripe=16 << 20, slow_nodes=(5,)),
    "whole files, 1 slow server": Store(slow_servers=(17,)),
}
