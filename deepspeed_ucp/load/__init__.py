"""Loads: read into live buffers, exchange bytes, finish the engine."""
