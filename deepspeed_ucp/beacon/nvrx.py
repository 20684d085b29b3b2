"""NVRx's rank monitor (nvidia-resiliency-ext, ``ft_launcher``), by its own client: a heartbeat per step, and the
sections that the launch gives timeouts for."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..platforms import find_rank
from .listener import Listener

logger = logging.getLogger("deepspeed_ucp")

_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"
_TIMEOUT = 30.0
"""Seconds that the monitor is waited for."""

_SETUP = "setup"
"""The section from the first phase to the end of the first step."""

_SECTIONS = {"save": "checkpointing", "load": "checkpointing"}
_SECTIONS |= dict.fromkeys(("forward", "backward", "step", "train_batch"), "step")
"""By phase, the section that it belongs to as Megatron and NeMo name them; a phase's own name is one as well."""


class NVRx(Listener):
    """Tells the monitor by a client that is connected.

    Sections without a timeout are not told: the monitor of 0.4 stumbles over them.

    Args:
        sections: those that have a timeout.
    """

    def __init__(self, client: Any, sections: Iterable[str]) -> None:
        self.client, self.sections = client, set(sections)
        self.depths: Counter[str] = Counter()
        self._open(_SETUP)

    def report_step(self, step: int, total: int | None) -> None:
        if self.depths[_SETUP]:
            self._close(_SETUP)
        self.client.send_heartbeat()

    def enter(self, phase: str) -> None:
        for section in {phase, _SECTIONS.get(phase, phase)}:
            self._open(section)

    def leave(self, phase: str) -> None:
        for section in {phase, _SECTIONS.get(phase, phase)}:
            self._close(section)

    def end(self) -> None:
        self.client.shutdown_workload_monitoring()

    def _open(self, section: str) -> None:
        self.depths[section] += 1
        if self.depths[section] == 1 and section in self.sections:
            self.client.start_section(section)

    def _close(self, section: str) -> None:
        self.depths[section] -= 1
        if self.depths[section] == 0 and section in self.sections:
            self.client.end_section(section)


def find(environment: Mapping[str, str]) -> NVRx | None:
    """Where ``ft_launcher`` has started this rank and nothing else here is connected to its monitor, which hears one
    client at a time: one that the script makes later takes our place."""
    path = environment.get(_VARIABLE)
    if not path or _is_connected(path):
        return None
    try:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    except ImportError as error:
        if find_rank() <= 0:
            logger.warning("NVRx's rank monitor gets no heartbeats: nvidia-resiliency-ext is not here (%s)", error)
        return None
    client, former = RankMonitorClient(), socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)  # its socket has none of its own
    try:
        client.init_workload_monitoring()
    except Exception as error:  # noqa: BLE001 - it raises what it meets: training goes on
        logger.warning("rank %d: NVRx's rank monitor cannot be reached, training goes on: %s", find_rank(), error)
        return None
    finally:
        socket.setdefaulttimeout(former)
    RankMonitorClient.init_workload_monitoring = _give_way(RankMonitorClient.init_workload_monitoring)
    return NVRx(client, client.section_timeouts.section)


def _give_way(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(client: Any, *args: Any, **kwargs: Any) -> Any:
        from . import mute

        mute(__name__.rpartition(".")[2])
        return original(client, *args, **kwargs)

    return wrapper


def _is_connected(path: str) -> bool:
    """Whether this process has a connection to a socket."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # one that is closed, or not connected
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as each:
                    if each.getpeername() == path:
                        return True
    return False
