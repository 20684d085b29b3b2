"""Live engines as load targets: their buffers, and the steps that finish a load."""
