"""Pure planning: byte ranges and their destinations. No torch, no files, no processes."""

from .claims import DISCARD, Blocks, Claim, Part, Request, address_claims, list_claims, make_claims
from .locate import Extent, View, Want, locate
from .rounds import LoadPlan, OwnerPlan, ReadSizes, Round, Send, make_owner_plan, make_plan

__all__ = [
    "DISCARD",
    "Blocks",
    "Claim",
    "Extent",
    "LoadPlan",
    "OwnerPlan",
    "Part",
    "ReadSizes",
    "Request",
    "Round",
    "Send",
    "View",
    "Want",
    "address_claims",
    "list_claims",
    "locate",
    "make_claims",
    "make_owner_plan",
    "make_plan",
]
