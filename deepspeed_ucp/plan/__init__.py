"""Pure planning: which byte ranges go where. No torch, no files, no processes."""

from .claims import Blocks, Claim, address_claims, list_claims, make_claims
from .load import LoadPlan, Round, make_plan
from .locate import Extent, View, Want, locate
from .requests import DISCARD, Part, Request
from .resolve import OwnerPlan, Send, decide

__all__ = [
    "DISCARD",
    "Blocks",
    "Claim",
    "Extent",
    "LoadPlan",
    "OwnerPlan",
    "Part",
    "Request",
    "Round",
    "Send",
    "View",
    "Want",
    "address_claims",
    "decide",
    "list_claims",
    "locate",
    "make_claims",
    "make_plan",
]
