"""What a node measures of itself, and with others, in a process of its own: a bad node takes nothing else with it.

``python -m deepspeed_ucp.supervise.preflight.probe FOLDER ADDRESS:PORT:KEY NAME`` tests the node, tells whoever listens
there (:mod:`.asking`) that it is ready for the others, gets these named, and tells its report.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import psutil

from .accelerators import LARGEST, count_devices, measure_devices
from .judging import Figure, Report
from .links import Links, find_link_address, time_once

_LIFE = 120
"""Seconds after which this process ends, whatever it is at: whoever has asked may be gone."""

_COPY, _FILE, _SIZE = 128 << 20, 32 << 20, 1024
"""Bytes that are copied, and written; rows and columns of the matrices that are multiplied."""


def measure_node(folder: str) -> Report:
    """Everything but links.

    Args:
        folder: whose disk is tested.
    """
    figures, faults = list[Figure](), list[str]()
    devices = count_devices(faults)
    tests: list[tuple[str, Callable[[], tuple[list[Figure], list[str]]]]] = [
        ("memory", measure_memory),
        (f"disk, {folder}", lambda: measure_disk(folder)),
        ("product", measure_product),
    ]
    if devices:
        tests.append(("devices", lambda: measure_devices(devices)))
    for name, test in tests:
        try:
            more, wrong = test()
        except Exception as error:  # noqa: BLE001 - whatever it is, the node has it
            more, wrong = [], [str(error.strerror if isinstance(error, OSError) else error) or type(error).__name__]
        figures += more
        faults += [f"{name}: {each}" for each in wrong]
    return Report(tuple(figures), tuple(faults), devices=devices)


def measure_memory() -> tuple[list[Figure], list[str]]:
    """A copy larger than the caches."""
    memory = psutil.virtual_memory()
    source = np.arange(min(_COPY, memory.available // 8) // 8, dtype=np.int64)
    target = np.zeros_like(source)
    seconds = min(time_once(lambda: np.copyto(target, source)) for _ in range(4))
    figures = [
        Figure("memory", source.nbytes / seconds / 1e6, kind=_name_cpu()),
        Figure("free memory", memory.available / 1e6, kind=f"of {memory.total:.1e}"),
    ]
    return figures, ([] if np.array_equal(source, target) else ["a copy differs from what was copied"])


def measure_disk(folder: str) -> tuple[list[Figure], list[str]]:
    """A file that is written, and read back past the page cache as far as the system lets it go; it has no name, and
    so is never left behind.

    Raises:
        OSError: as on a full disk.
    """
    data = np.random.default_rng(0).bytes(_FILE)
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

        write_seconds = time_once(write)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        is_same = file.read() == data
        read_seconds = time.perf_counter() - began
    figures = [
        Figure("disk write", _FILE / write_seconds / 1e6),
        Figure("disk read", _FILE / read_seconds / 1e6),
        Figure("free disk", shutil.disk_usage(folder).free / 1e6),
    ]
    return figures, ([] if is_same else ["what was read is not what was written"])


def measure_product() -> tuple[list[Figure], list[str]]:
    """Matrix products of the processors: one of whole numbers, which is held against sums in another order, and others
    of fractions, which have to be the same every time."""
    shape = (_SIZE, _SIZE)
    numbers = np.arange(2 * _SIZE**2, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(16)
    a, b, c = _allocate(shape), _allocate(shape), _allocate(shape)

    def fill(values: np.ndarray) -> None:
        for target, half in zip((a, b), values.reshape(2, *shape), strict=True):
            target[:] = half

    fill((numbers % (2 * LARGEST + 1)).astype(np.float32) - LARGEST)
    np.matmul(a, b, out=c)
    weights = np.arange(1, _SIZE + 1, dtype=np.int64)
    is_right = np.array_equal(c.astype(np.int64) @ weights, a.astype(np.int64) @ (b.astype(np.int64) @ weights))
    faults = [] if is_right else ["a sum of whole numbers is wrong"]
    fill(numbers.astype(np.float32) / 32768 - 1)
    products, seconds = list[str](), list[float]()
    for _ in range(4):
        seconds.append(time_once(lambda: np.matmul(a, b, out=c)))
        products.append(f"{zlib.crc32(c):08x}")
    if len(set(products)) > 1:
        faults.append("the same product has other bits each time")
    return [Figure("product", 2e-9 * _SIZE**3 / min(seconds), kind=_name_cpu(), bits=products[0])], faults


def _allocate(shape: tuple[int, int]) -> np.ndarray:
    """A matrix in pages of its own: what a library sums in which order may depend on where memory begins."""
    return np.frombuffer(mmap.mmap(-1, 4 * shape[0] * shape[1]), dtype=np.float32).reshape(shape)


def _name_cpu() -> str:
    """What a result may depend on: the model, how many of its cores are used, and the library."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
        names = [line.partition(":")[2].strip() for line in stream if line.startswith(("model name", "CPU part"))]
    cores = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    return f"{names[0] if names else os.uname().machine}, {cores} cores, numpy {np.__version__}"


def main(words: Sequence[str]) -> None:
    """Test this node and tell the report.

    Args:
        words: the folder, where to tell it, this node's name.
    """
    began = time.monotonic()
    signal.alarm(_LIFE)
    folder, line, name = words
    address, port, key = line.rsplit(":", 2)
    own = measure_node(folder)
    with socket.create_connection((address, int(port)), timeout=_LIFE) as connection, connection.makefile("rw") as hub:
        where = find_link_address(connection.getsockname()[0])
        links = Links(where, key.encode())
        print(key, json.dumps({"name": name, "address": where, "port": links.port}), sep="\n", file=hub, flush=True)
        figures, tried = links.try_all([(str(n), str(a), int(p)) for n, a, p in json.loads(hub.readline())])
        seconds = round(time.monotonic() - began, 2)
        report = Report((*own.figures, *figures), own.faults, tried, own.devices, seconds)
        print(json.dumps(asdict(report)), file=hub, flush=True)
        hub.readline()  # until all have: others may still be on their way here


if __name__ == "__main__":
    main(sys.argv[1:])
