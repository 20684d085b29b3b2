"""Reading of checkpoint folders into an AtomicIndex, and refusals."""
