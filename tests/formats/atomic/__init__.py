"""Tests of atomic checkpoints."""
