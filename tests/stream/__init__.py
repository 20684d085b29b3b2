"""Reads and checksums."""
