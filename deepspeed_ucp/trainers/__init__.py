"""Replacements of methods of trainers, which restore the job around an engine; imported at their first call."""
