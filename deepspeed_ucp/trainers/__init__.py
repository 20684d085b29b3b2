"""Replacements of trainers' methods that restore the job around an engine."""
