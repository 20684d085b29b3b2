"""Atomic checkpoints as sources: ours, which a manifest describes, and those of DeepSpeed's ``ds_to_universal``."""

from .folder import survey_atomic

__all__ = ["survey_atomic"]
