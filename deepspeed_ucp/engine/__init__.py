"""Live engines as load targets: the elements in each rank's buffers, and the steps that finish a load."""

from .base import Target
from .engines import open_target
from .finish import pickled_classes
from .parallel import Instance, Place, find_place, live_attributes, live_universal_info

__all__ = [
    "Instance",
    "Place",
    "Target",
    "find_place",
    "live_attributes",
    "live_universal_info",
    "open_target",
    "pickled_classes",
]
