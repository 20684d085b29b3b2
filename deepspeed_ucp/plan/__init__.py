"""Pure planning: byte ranges and their destinations. No torch, no files, no processes."""

from .locate import View, Want, join_items, list_claims, list_reads, locate
from .rounds import Blocks, LoadPlan, Round, address_claims, make_owner_plan, make_plan

__all__ = [
    "Blocks",
    "LoadPlan",
    "Round",
    "View",
    "Want",
    "address_claims",
    "join_items",
    "list_claims",
    "list_reads",
    "locate",
    "make_owner_plan",
    "make_plan",
]
