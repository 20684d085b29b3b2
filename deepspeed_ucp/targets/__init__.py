"""Live engines as destinations: which elements of which atoms each rank's buffers hold, and how a load is finished."""

from .base import Extra, Flat, Target
from .engines import open_target
from .finish import pickled_classes

__all__ = ["Extra", "Flat", "Target", "open_target", "pickled_classes"]
