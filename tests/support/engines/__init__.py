"""Real engines: kinds, models, and the work of the ranks, which alone import most of it."""
