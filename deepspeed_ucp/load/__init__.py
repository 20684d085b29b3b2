"""Carries a load out: reads into the live buffers, exchanges what several ranks need, finishes the engine."""

from .direct import LoadArguments, load_direct
from .report import LoadReport

__all__ = ["LoadArguments", "LoadReport", "load_direct"]
