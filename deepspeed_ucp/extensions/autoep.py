"""Experts in the live model's form."""

from __future__ import annotations

from ..plan.autoep import adapt_experts
from ..plan.match import Adaptation
from .registry import Extension


class FusedExperts(Extension):
    """A checkpoint with experts, which the live model may hold in another form."""

    def adapt(self, adaptation: Adaptation) -> None:
        """Give the experts the live model's form."""
        adaptation.index = adapt_experts(adaptation.index, adaptation.view.shapes)
