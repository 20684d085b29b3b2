"""Carries a load out: reads into the live buffers, exchanges what several ranks need, finishes the engine."""

from .census import join_groups, read_rules
from .direct import LoadArguments, has_masters, load_direct
from .report import LoadReport

__all__ = ["LoadArguments", "LoadReport", "has_masters", "join_groups", "load_direct", "read_rules"]
