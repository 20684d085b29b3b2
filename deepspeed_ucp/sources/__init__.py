"""Checkpoints on disk → :class:`~deepspeed_ucp.atoms.AtomicIndex`, header-only."""

from .files import check_tag, find_tags, read_latest
from .open import open_checkpoint
from .torchfile import is_zip

__all__ = ["check_tag", "find_tags", "is_zip", "open_checkpoint", "read_latest"]
