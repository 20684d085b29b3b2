"""Pure planning: which byte ranges go where. No torch, no files, no processes."""

from .claims import Blocks, Claim, address_claims, make_claims, take_turns
from .load import LoadPlan, Round, make_plan
from .locate import Piece, View, Want, locate
from .requests import DISCARD, Part, Request
from .resolve import Judgement, Resolution, Send, judge_claims, schedule

__all__ = [
    "DISCARD",
    "Blocks",
    "Claim",
    "Judgement",
    "LoadPlan",
    "Part",
    "Piece",
    "Request",
    "Resolution",
    "Round",
    "Send",
    "View",
    "Want",
    "address_claims",
    "judge_claims",
    "locate",
    "make_claims",
    "make_plan",
    "schedule",
    "take_turns",
]
