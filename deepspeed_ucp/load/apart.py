"""Live buffers are filled apart where there is memory for it: what fails while files are read changes no engine.

What is read for them goes into memory apart in the one pass over the files, and reaches the engine by copies of memory
when every rank has agreed. Where memory is too short for that, they are filled in a second pass over the files.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..comm import Comm
from ..errors import CheckpointError, UcpError
from ..io.memory import identify_host, measure_available
from ..targets.guard import BROKEN, HALF_STATES
from .sinks import Buffer

logger = logging.getLogger("deepspeed_ucp")

SHARE = 0.75
"""Of a machine's free memory that a load may use for what it reads, fresh optimizer states included."""


def set_apart(buffers: Sequence[Buffer], window: int, comm: Comm) -> bool:
    """Let all live buffers be filled apart where every machine has the memory; collective, the same on every rank.

    Args:
        buffers: all of this rank's.
        window: bytes of memory that reading needs besides.
    """
    hosted = [buffer for buffer in buffers if not buffer.fresh or buffer.tensor.device.type == "cpu"]
    told = comm.gather((identify_host(), sum(buffer.nbytes for buffer in hosted) + window, measure_available()))
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for host, nbytes, available in told:
        needed[host] += nbytes
        free[host] = min(available, free.get(host, available))
    if any(needed[host] > SHARE * free[host] for host in needed):
        if comm.rank == 0:
            logger.info("not enough free memory to fill the engine's buffers apart: they are read in a second pass")
        return False
    for buffer in buffers:
        if not buffer.fresh:
            buffer.set_apart()
    return True


@contextmanager
def guard_engine(engine: Any, *, with_states: bool) -> Iterator[None]:
    """Inside, the engine changes: an error marks it as one that must not be used, success takes the mark away.

    Args:
        with_states: its optimizer's states change as well.

    Raises:
        UcpError: the error with the mark's text; one that is not ours as a CheckpointError.
    """
    try:
        yield
    except Exception as error:
        kind = type(error) if isinstance(error, UcpError) else CheckpointError
        told = kind(_mark(engine, error, with_states))
        told.shared, told.echo = getattr(error, "shared", False), getattr(error, "echo", False)
        raise told from error
    except BaseException as interrupt:
        _mark(engine, interrupt, with_states)
        raise
    setattr(engine, BROKEN, None)
    setattr(engine, HALF_STATES, False)


def _mark(engine: Any, error: BaseException, with_states: bool) -> str:
    reason = str(error) or type(error).__name__
    told = (
        f"{reason} This happened while the engine was being filled: it holds a part of the checkpoint and must not be "
        "used. Load again (this tag or another one), or build the engine anew."
    )
    setattr(engine, BROKEN, told)
    setattr(engine, HALF_STATES, with_states or getattr(engine, HALF_STATES, False))
    return told
