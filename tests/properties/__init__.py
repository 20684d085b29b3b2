"""Properties of the whole package: all commands and loads agree on a checkpoint."""
