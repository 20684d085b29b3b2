"""Reading and checksums."""
