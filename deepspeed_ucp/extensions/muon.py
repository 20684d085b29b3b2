"""Muon with a momentum that ZeRO 3 keeps outside of the optimizer's state."""

from __future__ import annotations

from ..engine.base import Target
from ..model.wrappers import MOMENTUM
from .registry import Extension


class MuonMomentum(Extension):
    """An engine with ``save_muon_momentum_buffer_in_memory``, by sub-group."""

    def relink(self, target: Target) -> None:
        """Copy restored momentum to the engine's buffers; the optimizer shares them."""
        for index, momentum in target.wrapped.muon_momentum_buffer_partitioned_groups_flat.items():
            states = target.optimizer.state[target.wrapped.fp32_partitioned_groups_flat[index]]
            restored = states.get(MOMENTUM)
            if restored is None:  # saved before the first step
                momentum.zero_()
            elif restored is not momentum:
                momentum.copy_(restored)
            states[MOMENTUM] = momentum
