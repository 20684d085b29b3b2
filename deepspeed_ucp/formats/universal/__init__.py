"""Atomic checkpoints as sources: this package's, and those of ``ds_to_universal``."""
