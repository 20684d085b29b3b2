"""A load as a JSON file: what every rank did, when and for how long; ``ds_ucp report`` reads it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from typing import Any

import psutil

from ..errors import hide_secrets
from .context import LoadContext

logger = logging.getLogger("deepspeed_ucp")

VERSION = 1


def write_report(job: LoadContext, path: str | None) -> None:
    """Write what all ranks tell of a load into the folder that the configuration names; collective.

    The load is done by now: a file that cannot be written is a warning.

    Args:
        path: of what was loaded.
    """
    comm, folder = job.comm, job.config.report
    if folder is None:
        return
    ranks = comm.gather(describe_rank(job))
    if comm.rank:
        return
    report, now = job.report, time.time()
    data: dict[str, Any] = {"version": VERSION, "time": now, "loaded": path, "step": int(job.engine.global_steps)}
    data |= {"direct": report.direct, "reason": report.reason, "state_bytes": report.state_bytes, "ranks": ranks}
    name = f"load-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{int(now * 1000) % 1000:03d}.json"
    aside = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(aside, "w", encoding="utf-8") as stream:
            stream.write(hide_secrets(json.dumps(data, indent=1)))
        os.replace(aside, os.path.join(folder, name))
    except OSError as error:
        logger.warning("%s: no report of this load: %s", folder, error)
        with contextlib.suppress(OSError):
            os.remove(aside)


def describe_rank(job: LoadContext) -> dict[str, Any]:
    """What this rank did, as plain data."""
    report = job.report
    return {
        "rank": job.comm.rank,
        "host": socket.gethostname(),
        "started": psutil.Process().create_time(),
        "spans": report.spans,
        "bytes_read": report.bytes_read,
        "bytes_again": report.bytes_again,
        "requests": report.requests,
        "threads": report.threads,
        "files": {path: list(spent) for path, spent in report.files.items()},
    }
