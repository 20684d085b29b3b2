"""Pure plans, without tensors or files."""
