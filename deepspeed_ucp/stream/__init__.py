"""Streams of bytes: ranges of atoms, each byte read once, with its checksum, by several threads."""
