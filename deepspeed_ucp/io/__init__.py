"""Reading bytes: parallel ``preadv`` with checksums."""

from .read import ReadStats, read_requests

__all__ = ["ReadStats", "read_requests"]
