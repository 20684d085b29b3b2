"""Checkpoint folders as the AtomicIndex: what is read, and what is refused."""
