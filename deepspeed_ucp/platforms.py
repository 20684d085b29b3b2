"""This process's launcher or scheduler: its rank, exit codes that restart a job."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables of a rank that only a launcher sets; ``RANK`` may also be set for a whole container."""

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")

_TERM, _USR1 = 128 + signal.SIGTERM, 128 + signal.SIGUSR1  # as a shell reports them


@dataclass(frozen=True, slots=True)
class Platform:
    """A launcher or scheduler, and the end of a rank that has saved on a signal.

    Attributes:
        variable: environment variable that identifies the platform.
        ends: signal → exit code; None continues training.
        raises: end a rank by an exception instead of an exit code.
    """

    name: str
    variable: str
    ends: Mapping[int, int | None]
    raises: bool = False


RESTARTED: Mapping[int, int | None] = {signal.SIGTERM: _TERM, signal.SIGUSR1: None}
"""Exit codes for platforms that restart a job unless it exits with 0; SIGUSR1 only asks for a save."""

REQUEUED: Mapping[int, int | None] = {signal.SIGTERM: _TERM, signal.SIGUSR1: _USR1}
"""Exit codes for platforms that restart a job after either signal."""

ALONE = Platform("no known platform", "", {signal.SIGTERM: 0, signal.SIGUSR1: None})

SLURM_JOB = "SLURM_JOB_ID"

PLATFORMS = (
    Platform("HyperPod", "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH", REQUEUED),
    Platform("torchrun", "TORCHELASTIC_RUN_ID", RESTARTED),
    Platform("Ray", "RAY_RAYLET_PID", RESTARTED, raises=True),
    Platform("Slurm", SLURM_JOB, RESTARTED),
    Platform("Kubernetes", "KUBERNETES_SERVICE_HOST", RESTARTED),
)
"""Innermost first: the innermost platform sees the exit code of a process, and passes it to the next one."""


def find_rank() -> int:
    """Return this process's rank as the launcher set it, or -1 without a launcher."""
    return next((int(os.environ[name]) for name in ("RANK", *MPI_RANKS) if os.environ.get(name, "").isdigit()), -1)


def is_first_of_node() -> bool:
    """Return True if this process is the first rank of its node, or has no launcher."""
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"


def find_platform() -> Platform:
    """Return the innermost platform of this process."""
    return next((platform for platform in PLATFORMS if os.environ.get(platform.variable)), ALONE)
