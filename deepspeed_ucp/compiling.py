"""Warn before DeepSpeed waits for a killed compilation of one of its operators.

torch's lock is a file, which stays if the compiling process is killed. The next process waits without end and logs
nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from glob import iglob
from typing import Any

from .platforms import is_first_of_node

logger = logging.getLogger("deepspeed_ucp")


def jit_load(original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> Any:
    """``OpBuilder.jit_load``: warn of a stale lock (on one rank of a node), then load."""
    from torch.utils import cpp_extension

    find_folder = getattr(cpp_extension, "_get_build_directory", None)
    if find_folder is not None and is_first_of_node():
        lock = os.path.join(find_folder(builder.name, False), "lock")
        if os.path.exists(lock) and not _is_open(lock):
            logger.warning(
                "%s is waiting for %s, which no process on this machine holds: a compilation was probably killed. "
                "Unless another machine is compiling there, remove that file.",
                builder.name,
                lock,
            )
    return original(builder, *args, **kwargs)


def _is_open(path: str) -> bool:
    """Return True if a process of this user has a file open."""
    real = os.path.realpath(path)
    for link in iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended meanwhile, or is another user's
            if os.readlink(link) == real:
                return True
    return False
