"""Headers of checkpoints → :class:`~deepspeed_ucp.model.index.AtomicIndex`."""

from .latest import check_tag, find_tags, read_latest
from .open import open_checkpoint

__all__ = ["check_tag", "find_tags", "open_checkpoint", "read_latest"]
