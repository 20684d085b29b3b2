"""A conversion on many nodes against a slow store, in virtual time: the real plan and the real executor, no byte moved.

Each stream (a worker's read or write) waits `latency` for every request and then moves its bytes at `bandwidth`.
"""

from __future__ import annotations

import heapq
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count as number
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from deepspeed_ucp.atoms import Atom, FileRef, Fragment, Record, Shard, StoredAtoms, count
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import driver, outputs
from deepspeed_ucp.io.opened import StoredFile
from deepspeed_ucp.plan.conversion import RANGE, Batch, Output, plan_conversion
from deepspeed_ucp.stream.checks import Checks
from deepspeed_ucp.stream.full_tensors import FullTensor
from deepspeed_ucp.torchsave.zipframe import make_image

FP32 = "float32"
STATES = ("fp32", "exp_avg", "exp_avg_sq")
PATIENCE = 60.0  # real seconds that a worker may wait for the others in virtual time

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Store:
    """What one stream gets: seconds before each request's first byte, bytes a second after it."""

    latency: float = 0.02
    bandwidth: float = 200e6

    def seconds(self, requests: int, nbytes: int) -> float:
        return requests * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Simulated:
    """Virtual seconds of a whole conversion and the bytes that each node and each worker wrote."""

    seconds: float
    nodes: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def node_imbalance(self) -> float:
        """The largest share over the mean."""
        return max(self.nodes) * len(self.nodes) / sum(self.nodes)

    @property
    def worker_imbalance(self) -> float:
        return max(self.workers) * len(self.workers) / sum(self.workers)


def list_bloom(layers: int = 70, hidden: int = 14336, vocabulary: int = 250880) -> dict[str, Shape]:
    """Names and shapes of a BLOOM model; the defaults are those of its 176 B parameters."""
    norms = ("input_layernorm", "post_attention_layernorm")
    linears = {
        "self_attention.query_key_value": (3 * hidden, hidden),
        "self_attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (4 * hidden, hidden),
        "mlp.dense_4h_to_h": (hidden, 4 * hidden),
    }
    found: dict[str, Shape] = {"word_embeddings.weight": (vocabulary, hidden)}
    found |= {f"word_embeddings_layernorm.{kind}": (hidden,) for kind in ("weight", "bias")}
    for layer in range(layers):
        for norm in norms:
            found |= {f"h.{layer}.{norm}.{kind}": (hidden,) for kind in ("weight", "bias")}
        for name, shape in linears.items():
            found |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[:1]}
    return found | {f"ln_f.{kind}": (hidden,) for kind in ("weight", "bias")}


def count_parameters(shapes: dict[str, Shape]) -> int:
    """Elements."""
    return sum(count(shape) for shape in shapes.values())


def list_outputs(shapes: dict[str, Shape]) -> list[Output]:
    """The masters and moments of parameters, in the order of `make_index`."""
    return [Output(count(shape), 4, (record, 0)) for record, shape in enumerate(_list_atoms(shapes).values())]


def _list_atoms(shapes: dict[str, Shape]) -> dict[tuple[str, str], Shape]:
    return {(name, state): shape for state in STATES for name, shape in shapes.items()}


def simulate(shapes: dict[str, Shape], nodes: int, workers: int, store: Store, most: int = RANGE) -> Simulated:
    """By the plan alone: each worker takes its node's next batch as soon as it is free."""
    outputs = list_outputs(shapes)
    plan = plan_conversion(outputs, nodes, most=most)
    ends, shares = [], []
    for batches in plan.nodes:
        free = [(0.0, worker) for worker in range(workers)]
        share = [0] * workers
        for batch in batches:
            now, worker = heapq.heappop(free)
            share[worker] += batch.nbytes
            heapq.heappush(free, (now + _batch_seconds(batch, store), worker))
        ends.append(max(free)[0])
        shares += share
    return Simulated(max(ends), plan.shares, tuple(shares))


def _batch_seconds(batch: Batch, store: Store) -> float:
    """One read and one write a range."""
    return store.seconds(2 * len(batch.ranges), 2 * batch.nbytes)


# --- the executor


class VirtualClock:
    """Time that passes only while every worker sleeps.

    Args:
        workers: threads that will call `sleep`, each until it calls `leave`.
    """

    def __init__(self, workers: int) -> None:
        self.now = 0.0
        self._awake = workers
        self._sleeping: list[tuple[float, int, threading.Event]] = []
        self._order = number()
        self._lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        """Raises TimeoutError when the others neither sleep nor leave."""
        woken = threading.Event()
        with self._lock:
            heapq.heappush(self._sleeping, (self.now + seconds, next(self._order), woken))
            self._rest()
        if not woken.wait(PATIENCE):
            raise TimeoutError("a worker neither sleeps nor leaves: virtual time stands still")

    def leave(self) -> None:
        with self._lock:
            self._rest()

    def _rest(self) -> None:
        self._awake -= 1
        if not self._awake and self._sleeping:
            self.now, _, woken = heapq.heappop(self._sleeping)
            self._awake = 1
            woken.set()


class Turns(Sequence[Batch]):
    """A node's batches; a worker that finds none left leaves the clock."""

    def __init__(self, batches: Sequence[Batch], clock: VirtualClock) -> None:
        self._batches, self._clock = batches, clock

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, key: Any) -> Any:
        return self._batches[key]

    def __iter__(self) -> Iterator[Batch]:
        return _Turn(iter(self._batches), self._clock)


class _Turn(Iterator[Batch]):
    def __init__(self, batches: Iterator[Batch], clock: VirtualClock) -> None:
        self._batches, self._clock = batches, clock
        self._maker = threading.get_ident()

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            if threading.get_ident() != self._maker:  # which looks at them itself, before there are workers
                self._clock.leave()
            raise


def execute_virtually(shapes: dict[str, Shape], nodes: int, workers: int, store: Store, most: int = RANGE) -> Simulated:
    """The executor's own threads, with reads and writes that sleep in virtual time."""
    plan = plan_conversion(list_outputs(shapes), nodes, most=most)
    clock = VirtualClock(sum(min(workers, len(batches)) for batches in plan.nodes))
    shares: dict[tuple[int, int], int] = {}
    with tempfile.TemporaryDirectory() as folder, _slow_store(clock, store):
        atoms = list(_make_atoms(shapes))
        index = _make_index(atoms, str(Path(folder, "empty")))
        files = [outputs.OutputFile(w, "empty", make_image({}, FP32, w.numel, w.shape)) for w in atoms]

        def run_node(node: int) -> None:
            def add(nbytes: int) -> None:
                key = node, threading.get_ident()
                shares[key] = shares.get(key, 0) + nbytes

            work = _make_work(index, files, folder, workers, add)
            driver.write_share(work, Turns(plan.nodes[node], clock), 0, Checks())

        with ThreadPoolExecutor(nodes) as pool:
            for done in [pool.submit(run_node, node) for node, batches in enumerate(plan.nodes) if batches]:
                done.result()
    idle = (0,) * (workers * nodes - len(shares))
    return Simulated(clock.now, plan.shares, (*shares.values(), *idle))


def _make_work(
    index: Any, files: Sequence[outputs.OutputFile], folder: str, workers: int, progress: Callable[[int], None]
) -> Any:
    """What a node's part of a conversion asks of the conversion."""
    staging = SimpleNamespace(is_remote=False, folder=folder, path=lambda name: str(Path(folder, name)))
    return SimpleNamespace(
        index=index,
        files=files,
        comm=Comm(),
        staging=staging,
        options=SimpleNamespace(verify=False, bar=lambda total: nullcontext(progress)),
        report=SimpleNamespace(workers=workers),
    )


def _make_atoms(shapes: dict[str, Shape]) -> Iterator[FullTensor]:
    """Atoms each of which is a record of its own."""
    for record, (key, shape) in enumerate(_list_atoms(shapes).items()):
        fragment = Fragment(0, count(shape), record, 0)
        yield FullTensor(Atom(*key, FP32, (Shard(shape, (fragment,)),)), shape)


def _make_index(atoms: Sequence[FullTensor], path: str) -> Any:
    """What a reader asks of an index; all records are in one file, which is empty."""
    Path(path).touch()
    records = [Record(0, 0, atom.nbytes, None) for atom in atoms]
    return SimpleNamespace(stored=StoredAtoms.of((FileRef(path, 0),), records, ()))


@contextmanager
def _slow_store(clock: VirtualClock, store: Store) -> Iterator[None]:
    """Reads and writes of the executor take their time and move nothing, so there is nothing to sum up."""

    def read(file: StoredFile, views: list[memoryview], offset: int) -> None:
        clock.sleep(store.seconds(1, sum(view.nbytes for view in views)))

    def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
        clock.sleep(store.seconds(1, len(data)))

    def write_parts(fd: int, parts: Sequence[memoryview | bytes], offset: int) -> None:
        clock.sleep(store.seconds(1, sum(len(part) for part in parts)))

    with ExitStack() as stack:
        for module, name, stand_in in (
            (StoredFile, "fetch", lambda *_: None),
            (StoredFile, "read", read),
            (outputs, "write_at", write_at),
            (outputs, "write_parts", write_parts),
            (driver, "crc32", lambda data: 0),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield
