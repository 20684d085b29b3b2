"""Tensor-parallel layouts of parameters: geometry of shards, patterns, and rules that assign patterns."""
