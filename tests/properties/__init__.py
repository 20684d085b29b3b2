"""Properties of the package: all commands and loads give the same verdict on a checkpoint."""
