"""Pure planning: byte ranges and their destinations. No torch, no files, no processes."""
