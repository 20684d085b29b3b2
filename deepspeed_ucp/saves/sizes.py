"""Estimates the memory that an engine's saves take, before the first one."""

from __future__ import annotations

import logging
from typing import Any

from torch import is_tensor
from torch.optim import Optimizer

from ..comm import connect
from ..config import SaveOptions, UniversalConfig
from ..engine_state import find_state
from ..errors import ConfigError
from ..io.disk import count_allocated
from ..io.memory import identify_host
from ..model.wrappers import find_live
from .budget import ADVICE, count_free
from .memory import find_root, list_dead

logger = logging.getLogger("deepspeed_ucp")

MARGIN = 1.05
"""Factor from the bytes of a save's tensors or of the last save's files to the bytes reserved for the next save."""


def estimate_saves(engine: Any, config: UniversalConfig) -> None:
    """Store this node's estimated save size, and log the free memory (collective).

    Raises:
        ConfigError: a node has no room for a save; the same on all ranks.
    """
    options, comm = config.save or SaveOptions(), connect()

    def look() -> tuple[str, int, int]:
        root = find_root(options.memory)
        removable = sum(count_allocated(job.folder) for job in list_dead(root))
        return identify_host(), _count_saved(engine), count_free(root) + removable

    nodes = dict[str, tuple[int, int]]()
    for host, needed, free in comm.gather_results(look):
        known = nodes.get(host, (0, free))
        nodes[host] = known[0] + needed, min(known[1], free)
    find_state(engine).save_size = int(MARGIN * nodes[identify_host()][0])
    needed, free = max(nodes.values(), key=lambda node: node[0] - node[1])
    needed = int(MARGIN * needed)
    text = f"a save takes about {needed >> 20:,} MiB of {options.memory} on a node, where {free >> 20:,} MiB are free"
    if needed > free:
        raise comm.common(ConfigError(f'{text}. {ADVICE}, or leave out "save".'))
    if comm.rank == 0:
        wanted = 2 * needed * (1 + min(options.copies, len(nodes) - 1))
        few = "" if free >= wanted else "; it does not hold two, so the last one is deleted before the next is written"
        logger.info("%s%s", text, few)


def _count_saved(engine: Any) -> int:
    """Estimate the bytes that this rank saves, including states not yet created."""
    inner, masters, states = _list_states(engine)
    has_weights = engine.save_non_zero_checkpoint and not engine.zero_optimization_partition_weights()
    model = list(engine.module.parameters()) if has_weights else []  # ZeRO 3 saves masters only
    kept = [param for param in engine.module.parameters() if not param.requires_grad]
    model += [param.ds_tensor for param in kept if hasattr(param, "ds_tensor")]  # of ZeRO 3, by each rank
    groups = getattr(inner, "param_groups", ())
    later = max((len(group.get("betas", ())) or bool(group.get("momentum")) for group in groups), default=0)
    unmade = [master for master in masters if not inner.state.get(master)] * later
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in [*masters, *states, *unmade, *model])


def _list_states(engine: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return the unwrapped torch optimizer, its masters and its states."""
    optimizer, row = engine.optimizer, find_live(engine.optimizer)
    inner = getattr(optimizer, "optimizer", optimizer)
    if row is not None and row.masters:
        groups = [group if isinstance(group, list) else [group] for group in getattr(optimizer, row.masters)]
        masters = [master for group in groups for master in group]
    elif isinstance(optimizer, Optimizer):
        masters = [master for group in optimizer.param_groups for master in group["params"]]
    else:
        return inner, [], []
    states = [tensor for state in inner.state.values() for tensor in dict(state).values()]
    return inner, [*filter(is_tensor, masters)], [*filter(is_tensor, states)]
