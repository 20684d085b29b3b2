"""Examining: whether a checkpoint is whole, and how two differ."""
