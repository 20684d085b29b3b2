"""The recipes of examples/platforms under their launchers and schedulers, if these are installed."""
