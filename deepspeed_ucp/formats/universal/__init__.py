"""Atomic checkpoints as sources: ours, which a manifest describes, and those of DeepSpeed's ``ds_to_universal``."""
