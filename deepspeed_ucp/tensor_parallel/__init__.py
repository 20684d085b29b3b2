"""Tensor-parallel layouts: geometry of shards, patterns, and rules for patterns."""
