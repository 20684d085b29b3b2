"""The launcher or scheduler of this process, read from its environment: rank, and exit codes that restart a job."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

SIGNALLED = 128
"""What is added to a signal's number where it has ended a process."""

MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables of a rank that only a launcher sets; ``RANK`` may also be set for a whole container."""

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")

_TERM, _USR1 = SIGNALLED + signal.SIGTERM, SIGNALLED + signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class Platform:
    """What a rank does there when it is told to go, after its save.

    Attributes:
        name: for people.
        variable: of the environment, by which it is known.
        ends: by signal the exit code, None to go on.
        raises: an error ends a rank in the place of an exit code.
    """

    name: str
    variable: str
    ends: Mapping[int, int | None]
    raises: bool = False


RESTARTED: Mapping[int, int | None] = {signal.SIGTERM: _TERM, signal.SIGUSR1: None}
"""Where 0 would be the end of the job, its work done, whoever asked it to go."""

REQUEUED: Mapping[int, int | None] = {signal.SIGTERM: _TERM, signal.SIGUSR1: _USR1}
"""Where either signal tells of the end, and the job is started again."""

ALONE = Platform("no platform that is known", "", {signal.SIGTERM: 0, signal.SIGUSR1: None})

SLURM_JOB = "SLURM_JOB_ID"

PLATFORMS = (
    Platform("HyperPod", "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH", REQUEUED),
    Platform("torchrun", "TORCHELASTIC_RUN_ID", RESTARTED),
    Platform("Ray", "RAY_RAYLET_PID", RESTARTED, raises=True),
    Platform("Slurm", SLURM_JOB, RESTARTED),
    Platform("Kubernetes", "KUBERNETES_SERVICE_HOST", RESTARTED),
)
"""From the inside out: what is nearest to a process sees its exit code, and answers for it to the next."""


def find_rank() -> int:
    """Return the rank of this process as its launcher set it, or -1 without a launcher."""
    return next((int(os.environ[name]) for name in ("RANK", *MPI_RANKS) if os.environ.get(name, "").isdigit()), -1)


def is_first_of_node() -> bool:
    """Return True if this process is the first rank of its node, or has no launcher."""
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"


def find_platform(environment: Mapping[str, str]) -> Platform:
    """The innermost platform of a process that has this environment."""
    return next((each for each in PLATFORMS if environment.get(each.variable)), ALONE)
