"""One rank of a real launch (tests/test_comm.py): every collective, then the requested end."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from deepspeed_ucp import comm as comm_module
from deepspeed_ucp.comm import Comm, join_launch
from deepspeed_ucp.errors import CheckpointError, UcpError


def use(comm: Comm) -> dict[str, Any]:
    """Return this rank's results of all collectives."""
    counts = [(comm.rank + other) % 3 for other in range(comm.size)]
    tables = [np.full((other, 2), 10 * comm.rank + other, np.int32) for other in range(comm.size)]
    comm.gather(None)
    return {
        "comm": type(comm).__name__,
        "gather": comm.gather({"rank": comm.rank}),
        "long": [len(part) for part in comm.gather(bytes(5000 * comm.rank))],
        "broadcast": comm.broadcast(comm.rank, src=1),
        "swap": comm.swap(np.full(sum(counts), comm.rank, np.uint8), counts, counts).tolist(),
        "slices": exchange_slices(comm),
        "tables": [table.tolist() for table in comm.swap_tables(tables)],
        "any": comm.any_of(np.arange(3) == comm.rank).tolist(),
    }


def exchange_slices(comm: Comm) -> bool:
    whole, comm_module._MESSAGE = comm_module._MESSAGE, 7
    data = np.arange(100, dtype=np.uint8)
    received = comm.swap(np.concatenate([data] * comm.size), [100] * comm.size, [100] * comm.size)
    comm_module._MESSAGE = whole
    return bool((received == np.concatenate([data] * comm.size)).all())


def fail(rank: int) -> None:
    if rank == 1:
        raise CheckpointError("it broke")


def main(end: str) -> None:
    try:
        with join_launch() as comm:
            print(json.dumps({"rank": comm.rank, **use(comm)}), flush=True)
            if end == "alone" and comm.rank == 1:
                raise ZeroDivisionError("it broke")
            comm.run(lambda: fail(comm.rank) if end == "all" else None)
            comm.gather(None)
    except UcpError as error:
        if not error.echo:
            print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1])
