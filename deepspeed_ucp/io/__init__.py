"""Parallel reads with checksums, and writes that survive a crash, for local files and object stores."""
