"""Live engines as load targets: the elements in each rank's buffers, and the steps that finish a load."""
