"""Real engines: kinds, models, and the work of the ranks. Only ranks import most of these modules."""
