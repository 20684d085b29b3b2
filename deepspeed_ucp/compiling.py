"""Report that DeepSpeed compiles an operator, or waits for a killed compilation.

torch logs neither. Its lock is a file, which stays if the compiling process is killed: the next process then waits
without end.
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
    """``OpBuilder.jit_load``: one line per node if it will take long."""
    if is_first_of_node():
        from torch.utils import cpp_extension

        find_folder = getattr(cpp_extension, "_get_build_directory", None)
        if find_folder is not None:
            report_compilation(builder.name, find_folder(builder.name, False))
    return original(builder, *args, **kwargs)


def report_compilation(name: str, folder: str) -> None:
    """Warn about a left-over lock in an operator's folder, or a first compilation."""
    lock = os.path.join(folder, "lock")
    if os.path.exists(lock) and not is_open(lock):
        logger.warning(
            "%s is waiting for %s, which no process on this machine holds: a compilation was probably killed. "
            "Unless another machine is compiling there, remove that file.",
            name,
            lock,
        )
    elif not os.path.exists(os.path.join(folder, f"{name}.so")):
        logger.warning("compiling DeepSpeed's operator %s into %s; this takes minutes, once per machine", name, folder)


def is_open(path: str) -> bool:
    """Return True if a process of this user has a file open."""
    real = os.path.realpath(path)
    for link in iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended meanwhile, or is another user's
            if os.readlink(link) == real:
                return True
    return False
