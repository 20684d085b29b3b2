"""Atomic checkpoints as sources: ours, which a manifest describes, and those of DeepSpeed's ``ds_to_universal``."""

from .folder import is_atomic, open_atomic

__all__ = ["is_atomic", "open_atomic"]
