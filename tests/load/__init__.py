"""Whole loads in one process, over synthesised checkpoints."""
