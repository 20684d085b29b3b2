"""Properties of the package as a whole: what every way in says of the same checkpoint."""
