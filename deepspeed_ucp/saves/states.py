"""What of an engine its saves have, and what of that only the optimizer's step changes."""

from __future__ import annotations

import logging
from typing import Any

from torch import is_tensor
from torch.optim import Optimizer

from ..wrappers import USE_MUON, find_live
from .files import Stable

logger = logging.getLogger("deepspeed_ucp")


def count_saved(engine: Any) -> int:
    """Bytes of the tensors that a rank saves, about; with states that its optimizer makes in its first step."""
    inner, masters, states = _list_states(engine)
    model = _list_weights(engine) if engine.save_non_zero_checkpoint else []
    kept = [param for param in engine.module.parameters() if not param.requires_grad]
    model += [param.ds_tensor for param in kept if hasattr(param, "ds_tensor")]  # of ZeRO 3, by each rank
    groups = getattr(inner, "param_groups", ())
    later = max((len(group.get("betas", ())) or bool(group.get("momentum")) for group in groups), default=0)
    unmade = [each for each in masters if not inner.state.get(each)] * later
    return sum(int(each.numel() * each.element_size()) for each in [*masters, *states, *unmade, *model])


def _list_states(engine: Any) -> tuple[Any, list[Any], list[Any]]:
    """Torch's optimizer, within a wrapper or by itself; an engine's masters, and states; nothing of kinds not known."""
    optimizer, row = engine.optimizer, find_live(engine.optimizer)
    inner = getattr(optimizer, "optimizer", optimizer)
    if row is not None and row.masters:
        groups = [each if isinstance(each, list) else [each] for each in getattr(optimizer, row.masters)]
        masters = [each for group in groups for each in group]
    elif isinstance(optimizer, Optimizer):
        masters = [each for group in optimizer.param_groups for each in group["params"]]
    else:
        return inner, [], []
    states = [each for state in inner.state.values() for each in dict(state).values()]
    return inner, [*filter(is_tensor, masters)], [*filter(is_tensor, states)]


def find_stable(engine: Any) -> Stable:
    """What of an engine only its optimizer's step changes; nothing of engines that do so beside the backward pass."""
    inner, masters, states = _list_states(engine)
    is_muon = any(group.get(USE_MUON) for group in getattr(inner, "param_groups", ()))
    is_hybrid = type(engine).__name__ == "DeepSpeedHybridEngine"  # it fuses adapters into weights to generate
    if not masters or is_muon or is_hybrid or getattr(engine, "zenflow", False):
        return Stable()
    return Stable([*masters, *states, *_list_weights(engine)], engine.module.buffers())


def _list_weights(engine: Any) -> list[Any]:
    """Of the model, as far as saves have them: ZeRO 3 saves its masters alone."""
    return [] if engine.zero_optimization_partition_weights() else list(engine.module.parameters())
