"""Carries a load out: reads into the live buffers, exchanges what several ranks need, finishes the engine."""
