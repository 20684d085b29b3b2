"""Loads: read into the live buffers, exchange bytes between ranks, finish the engine."""
