"""Helpers of several folders of tests: synthesised checkpoints, ranks in one process, engines."""
