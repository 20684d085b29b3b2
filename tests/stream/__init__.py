"""Reading, checksums."""
