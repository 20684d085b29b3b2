"""Checksummed parallel reads and crash-safe writes, for files and object stores."""
