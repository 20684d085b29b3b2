"""Atomic checkpoints as sources: by this package, with a manifest, and by DeepSpeed's ``ds_to_universal``."""
