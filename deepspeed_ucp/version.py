"""The package's version, for what is imported before the package is."""

__version__ = "0.1.0"
