"""Streams of atoms' bytes, read once by several threads, with their checksums."""
