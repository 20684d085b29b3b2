"""Checkpoints that are not DeepSpeed's own: one reader a format."""
