"""Helpers that several folders of tests share: synthesised checkpoints, ranks in one process, engines."""
