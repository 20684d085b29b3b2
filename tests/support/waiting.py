"""One rank of a real launch (tests/test_meeting.py) that the others wait for outside of collectives."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_ucp import meeting
from deepspeed_ucp.comm import Comm, join_launch
from deepspeed_ucp.errors import UcpError

LATE = 0.5
"""Seconds of delay of one rank."""

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all_single", "broadcast")


def count_collectives(rank: int, more: int = 0) -> int:
    return int(dist.distributed_c10d._get_default_store().add(f"entered {rank}", more))


def enter(work: Any, *args: Any, **kwargs: Any) -> Any:
    count_collectives(dist.get_rank(), 1)
    return work(*args, **kwargs)


def take_long() -> None:
    """Sleep; meanwhile the other rank must not wait in a collective, which might end its process."""
    time.sleep(LATE)
    rank = dist.get_rank()
    assert count_collectives(1 - rank) <= count_collectives(rank)


def slow(owner: Any, name: str) -> None:
    work = getattr(owner, name)

    def wait(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, work)
        take_long()
        return work(*args, **kwargs)

    setattr(owner, name, wait)


def be_late(comm: Comm, source: str) -> None:
    """Delay the others before a load, for headers, in the first pass and in a conversion.

    At the end one rank runs out of memory, and all ranks raise its error.
    """
    from deepspeed_ucp.convert import ConvertOptions
    from deepspeed_ucp.io.store import LocalFile
    from tests.convert.conversions import MODEL
    from tests.support.contents import check_content
    from tests.support.conversion import convert_checkpoint
    from tests.support.reshard import Options, load_rank, make_targets, open_for
    from tests.synth import Topology, random_state

    if comm.rank == 1:
        take_long()
    comm.gather(None)
    target = make_targets(MODEL, Topology(3, comm.size, precision="bf16"))[comm.rank]
    if comm.rank == 0:
        slow(LocalFile, "__init__")
    index = open_for(source, target, comm)
    if comm.rank == 1:
        slow(LocalFile, "read_some")
    check_content([load_rank(index, target, comm, Options())], random_state(MODEL, 0, precision="bf16"))
    if comm.rank == 0:
        slow(LocalFile, "read_some")
    convert_checkpoint(source, comm=comm, options=ConvertOptions(workers=2))
    message = ""
    with short_of_memory() if comm.rank == 1 else nullcontext():
        try:
            load_rank(index, target, comm, Options(window=1 << 34))
        except UcpError as error:
            message = str(error)
    assert message.startswith("[rank 1] out of memory: "), message


@contextmanager
def short_of_memory() -> Iterator[None]:
    """Context manager that limits this process to 256 MiB more."""
    former = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)


def go(comm: Comm, source: str) -> None:
    """End one rank while the others wait for it, by SIGKILL or an interrupt."""
    meeting._INTERVAL = 0.2
    if source == "killed":
        meeting._TIMEOUT = 1.5

    def work() -> None:
        if comm.rank == 1 and source == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 1:
            raise KeyboardInterrupt("oh")  # which `run` does not hold back

    comm.run(work)


def main(what: str, source: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for name in COLLECTIVES:
        setattr(dist, name, partial(enter, getattr(dist, name)))
    try:
        with join_launch() as comm:
            {"late": be_late, "gone": go}[what](comm, source)
    except UcpError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
