"""Checkpoints that a DeepSpeed engine saved, described from their headers alone."""
