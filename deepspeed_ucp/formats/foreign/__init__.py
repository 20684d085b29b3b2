"""Readers of foreign checkpoints, one per format."""
