"""Whole atoms: how a source's shards make up each, and ranges of them, read once with their checksums."""
