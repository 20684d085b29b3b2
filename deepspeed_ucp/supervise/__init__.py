"""Starts a launch again when it fails: what watches its ranks, which hosts are left, whether to try again."""
