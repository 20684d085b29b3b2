"""Converting: the atomic view written out as files."""

from .driver import ConvertOptions, convert_index, default_destination

__all__ = ["ConvertOptions", "convert_index", "default_destination"]
