"""Heartbeats and timed sections for NVRx's rank monitor (``ft_launcher``)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..platforms import find_rank
from . import Listener, mute

logger = logging.getLogger("deepspeed_ucp")

_TIMEOUT = 30.0
"""Timeout of the connection in seconds."""

_SETUP = "setup"
"""The section from the first phase to the end of the first step."""

_SECTIONS = {"save": "checkpointing", "load": "checkpointing"}
_SECTIONS |= dict.fromkeys(("forward", "backward", "step", "train_batch"), "step")
"""Phase → section in which Megatron and NeMo have it. A phase also counts as a section of the same name."""


class NVRx(Listener):
    """Reports through a connected client.

    Args:
        sections: sections with a timeout. Others are not reported: NVRx 0.4 fails on them.
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


def find(path: str) -> NVRx | None:
    """Connect to ``ft_launcher``'s monitor unless the script has connected already.

    The monitor accepts one client at a time. If the script connects later, this listener is muted.
    """
    if _is_connected(path):
        return None
    try:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    except ImportError as error:
        if find_rank() <= 0:
            logger.warning("NVRx's rank monitor gets no heartbeats. Install nvidia-resiliency-ext: %s", error)
        return None
    client, former = RankMonitorClient(), socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)  # the client sets no timeout
    try:
        client.init_workload_monitoring()
    except Exception as error:  # noqa: BLE001 - training continues
        logger.warning("rank %d: NVRx's rank monitor cannot be reached, training continues: %s", find_rank(), error)
        return None
    finally:
        socket.setdefaulttimeout(former)
    original = RankMonitorClient.init_workload_monitoring

    @functools.wraps(original)
    def connect(client: Any, *args: Any, **kwargs: Any) -> Any:
        mute("nvrx")
        return original(client, *args, **kwargs)

    RankMonitorClient.init_workload_monitoring = connect
    return NVRx(client, client.section_timeouts.section)


def _is_connected(path: str) -> bool:
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed, or not connected
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as connection:
                    if connection.getpeername() == path:
                        return True
    return False
