"""Pure planning: which byte ranges go where. No torch, no files, no processes."""

from .load import LoadPlan, Part, Request, Want, plan_load
from .share import share_wants

__all__ = ["LoadPlan", "Part", "Request", "Want", "plan_load", "share_wants"]
