"""Live engines as destinations: which elements of which atoms each rank's buffers hold, and how a load is finished."""

from .base import LiveBuffer, Target
from .engines import open_target
from .finish import pickled_classes
from .parallel import Instance, Place, find_place, live_attributes, live_universal_info

__all__ = [
    "Instance",
    "LiveBuffer",
    "Place",
    "Target",
    "find_place",
    "live_attributes",
    "live_universal_info",
    "open_target",
    "pickled_classes",
]
