"""Planning: byte ranges and their destinations. No torch, files or processes."""
